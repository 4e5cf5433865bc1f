#include "engine/cuda/device_arena.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "transport/cuda/runtime.h"
#include "transport/fork.h"

namespace pycomm {

DeviceBlock::~DeviceBlock() {
  if (impl == nullptr) return;
  if (impl->fork_generation != fork_generation()) {
    (void)impl.release();  // the memory is the parent's, and locks may be held for good here
    return;
  }
  if (const auto arena = impl->arena.lock()) {
    arena->give_back(*impl);
  } else {
    (void)impl->memory->release(impl->data);
  }
}

void* DeviceBlock::data() const { return impl->data; }

void DeviceBlock::used_on(void* stream) {
  auto& known = impl->streams;
  if (std::find(known.begin(), known.end(), stream) == known.end())
    known.push_back(static_cast<cuda::Stream>(stream));
}

void DeviceBlock::hold() { impl->is_held = true; }

namespace cuda {

Status DeviceArena::allocate(size_t n_bytes, Stream stream, CallerHooks* hooks,
                             std::unique_ptr<DeviceBlock>* out) {
  const double end_s = monotonic_s() + kWait_s;
  double asked_s = monotonic_s();
  void* p = nullptr;
  for (auto pause = std::chrono::microseconds(10);;
       pause = std::min(2 * pause, std::chrono::microseconds(1000))) {
    const double now_s = monotonic_s();
    bool may_come = false;
    Status s;
    {
      const std::lock_guard lock(mutex_);
      const size_t n_coming = free_passed();
      s = memory_->allocate(n_bytes, &p);
      // What is not there in all is not waited for.
      may_come = n_coming > 0 && n_bytes <= n_coming + memory_->n_bytes_free();
    }
    if (s.ok()) break;
    if (s.code() != Code::kSystem || !may_come || now_s > end_s)
      return Status::error(s.code(), s.message() + why_not_free(may_come));
    if (hooks != nullptr) {
      hooks->before_block();
      if (now_s - asked_s > 0.001 * kSliceMs) {
        asked_s = now_s;
        PYCOMM_RETURN_IF_ERROR(hooks->poll());
      }
    }
    std::this_thread::sleep_for(pause);
  }
  auto block = std::make_unique<DeviceBlock>();
  block->impl = std::make_unique<DeviceBlock::Impl>(
      DeviceBlock::Impl{weak_from_this(), memory_, p, n_bytes, {stream}, fork_generation()});
  *out = std::move(block);
  return Status();
}

// Null: nothing will say when the stream has passed what is on it.
std::shared_ptr<HeldEvent> DeviceArena::mark(Stream stream) const {
  bool is_captured = false;
  std::shared_ptr<HeldEvent> event;
  if (!capture_state(stream, "the end of a tensor", &is_captured).ok() || is_captured) return nullptr;
  if (!HeldEvent::take(context_, &event).ok()) return nullptr;
  if (!cuda_status(cudaEventRecord(event->get(), stream), "cudaEventRecord").ok()) return nullptr;
  return event;
}

// Calls that use the block have been issued, or would hold it: the last one's end is behind them all. The
// communication stream is not asked for more, but whether a call is captured there now.
void DeviceArena::give_back(const DeviceBlock::Impl& given) {
  GivenBack block{given.data, given.n_bytes, {}};
  if (auto end = context_->last_end()) block.after.push_back(std::move(end));
  {
    const DeviceGuard guard(context_->device());
    bool is_captured = false;
    const Status known = capture_state(context_->streams().comm(), "the end of a tensor", &is_captured);
    block.is_held = given.is_held || is_captured || !known.ok() || !guard.status().ok();
    for (const Stream stream : given.streams) {
      if (block.is_held) break;
      block.after.push_back(mark(stream));
      block.is_held = block.after.back() == nullptr;
    }
  }
  if (block.is_held) block.after.clear();
  const std::lock_guard lock(mutex_);
  if (has_ended_ && !block.is_held) {
    (void)memory_->release(block.p);
  } else {
    given_back_.push_back(std::move(block));
  }
}

void DeviceArena::end() {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  if (packing_ != nullptr && !packing_is_captured_) (void)memory_->release(packing_);
  packing_ = nullptr;
  for (const GivenBack& block : given_back_) {
    if (!block.is_held) (void)memory_->release(block.p);
  }
  given_back_.clear();
}

// Returns how many bytes are still waited for.
size_t DeviceArena::free_passed() {
  size_t n_coming = 0;
  std::erase_if(given_back_, [&](GivenBack& block) {
    if (block.is_held) return false;
    bool passed = true;
    while (passed && !block.after.empty()) {
      block.is_held = !event_passed(context_->device(), block.after.back()->get(), &passed).ok();
      if (passed) block.after.pop_back();
    }
    if (block.is_held) {
      block.after.clear();
      return false;
    }
    if (!passed) {
      n_coming += block.n_bytes;
      return false;
    }
    (void)memory_->release(block.p);
    return true;
  });
  return n_coming;
}

std::byte* DeviceArena::packing(size_t n_bytes, bool is_captured) {
  const std::lock_guard lock(mutex_);
  if (n_bytes <= n_heap_bytes_ / 2) n_largest_bytes_ = std::max(n_largest_bytes_, n_bytes);
  if (n_bytes > n_packing_bytes_ && n_bytes <= n_heap_bytes_ / 2) replace_packing(n_bytes);
  if (n_bytes > n_packing_bytes_) return nullptr;
  packing_is_captured_ |= is_captured;
  return packing_;
}

// The old one goes first: where there is no room for both, a later call finds it free, and takes what the
// largest so far needs.
void DeviceArena::replace_packing(size_t n_bytes) {
  const size_t n_wanted = std::max(n_largest_bytes_, n_packing_bytes_ / 4 * 5);
  if (packing_ != nullptr) {
    GivenBack old{packing_, n_packing_bytes_, {}, packing_is_captured_, true};
    if (auto end = context_->last_end(); end != nullptr && !old.is_held) old.after.push_back(std::move(end));
    given_back_.push_back(std::move(old));
  }
  packing_ = nullptr;
  n_packing_bytes_ = 0;
  packing_is_captured_ = false;
  (void)free_passed();
  size_t n_left = n_heap_bytes_ / 2;
  for (const GivenBack& block : given_back_)
    n_left -= block.was_packing ? std::min(block.n_bytes, n_left) : 0;
  for (const size_t n : {std::min(n_wanted, n_left), n_bytes}) {
    void* p = nullptr;
    if (n < n_bytes || n > n_left || !memory_->allocate(n, &p).ok()) continue;
    packing_ = static_cast<std::byte*>(p);
    n_packing_bytes_ = n;
    return;
  }
}

// To be put behind the words of PeerMemory.
std::string DeviceArena::why_not_free(bool has_waited) const {
  size_t n_coming = 0, n_held = 0;
  const std::lock_guard lock(mutex_);
  for (const GivenBack& block : given_back_) (block.is_held ? n_held : n_coming) += block.n_bytes;
  std::string text;
  if (n_coming > 0) {
    text +=
        format("; %zu bytes more are of tensors that are gone, and streams have not passed what uses them",
               n_coming);
    if (has_waited) text += format(" (waited %g s)", kWait_s);
  }
  if (n_packing_bytes_ > 0) text += format("; %zu bytes are for packing lists of tensors", n_packing_bytes_);
  if (n_held > 0) {
    text += format(
        "; %zu bytes more are kept until the process ends, since their tensors went while a CUDA "
        "graph was captured, or the device had failed: let them go before a capture",
        n_held);
  }
  return text;
}

}  // namespace cuda
}  // namespace pycomm
