#include "engine/cuda/device_context.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "transport/cuda/device_memory.h"
#include "transport/cuda/runtime.h"

namespace pycomm::cuda {

namespace {
std::mutex all_mutex;
std::map<int, std::weak_ptr<DeviceContext>>& all_contexts() {
  static auto* const all = new std::map<int, std::weak_ptr<DeviceContext>>;
  return *all;
}
}  // namespace

Status DeviceContext::get(int device, std::shared_ptr<DeviceContext>* out) {
  const std::lock_guard lock(all_mutex);
  std::weak_ptr<DeviceContext>& known = all_contexts()[device];
  if ((*out = known.lock()) != nullptr) return Status();
  const DeviceGuard guard(device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  std::shared_ptr<DeviceContext> made(new DeviceContext(device));
  PYCOMM_RETURN_IF_ERROR(DeviceStreams::make(device, &made->streams_));
  known = made;
  *out = std::move(made);
  return Status();
}

void DeviceContext::keep(std::shared_ptr<DeviceContext> context) {
  static auto* const kept = new std::vector<std::shared_ptr<DeviceContext>>;
  const std::lock_guard lock(all_mutex);
  std::erase_if(all_contexts(), [&](const auto& known) { return known.second.lock() == context; });
  kept->push_back(std::move(context));
}

DeviceContext::~DeviceContext() {
  const DeviceGuard guard(device_);
  streams_.reset();
  for (const Event e : events_) (void)cudaEventDestroy(e);
  for (void* const p : blocks_) (void)cudaFree(p);
}

Status DeviceContext::scratch(size_t n_bytes, std::byte** p) {
  if (n_bytes > n_scratch_bytes_) {
    const size_t wanted = std::max({n_bytes, n_scratch_bytes_ / 4 * 5, size_t{1} << 20});
    size_t got = 0;
    void* block = nullptr;
    PYCOMM_RETURN_IF_ERROR(device_malloc(device_, wanted, n_bytes, "scratch", &block, &got));
    blocks_.push_back(block);
    n_scratch_bytes_ = got;
  }
  *p = blocks_.empty() ? nullptr : static_cast<std::byte*>(blocks_.back());
  return Status();
}

Status DeviceContext::take_event(Event* out) {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      *out = events_.back();
      events_.pop_back();
      return Status();
    }
  }
  const DeviceGuard guard(device_);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  return cuda_status(cudaEventCreateWithFlags(out, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

void DeviceContext::give_event(Event event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

// The one before goes without the lock, which it takes.
void DeviceContext::note_end(std::shared_ptr<HeldEvent> event) {
  const std::lock_guard lock(mutex_);
  last_end_.swap(event);
}

std::shared_ptr<HeldEvent> DeviceContext::last_end() {
  const std::lock_guard lock(mutex_);
  return last_end_;
}

Status HeldEvent::take(const std::shared_ptr<DeviceContext>& context, std::shared_ptr<HeldEvent>* out) {
  Event event = nullptr;
  PYCOMM_RETURN_IF_ERROR(context->take_event(&event));
  out->reset(new HeldEvent(context, event));
  return Status();
}

HeldEvent::~HeldEvent() {
  if (const auto context = context_.lock()) {
    context->give_event(event_);
    return;
  }
  const DeviceGuard guard(device_);
  (void)cudaEventDestroy(event_);
}

uint64_t DeviceContext::take_turn() {
  const std::lock_guard lock(mutex_);
  return next_turn_++;
}

void DeviceContext::end_turn(uint64_t turn) {
  {
    const std::lock_guard lock(mutex_);
    ended_early_.insert(turn);
    while (!ended_early_.empty() && *ended_early_.begin() == now_) {
      ended_early_.erase(ended_early_.begin());
      now_++;
    }
  }
  changed_.notify_all();
}

bool DeviceContext::await_turn(uint64_t turn, double slice_s) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(slice_s), [&] { return now_ >= turn; });
}

}  // namespace pycomm::cuda
