#include <chrono>
#include <cmath>
#include <thread>

#include "engine/cuda/device_impl.h"

namespace pycomm {

// ---- turns

Status DeviceTurn::take(int device, void* stream, std::shared_ptr<DeviceTurn>* out) {
  std::shared_ptr<cuda::DeviceContext> context;
  PYCOMM_RETURN_IF_ERROR(cuda::DeviceContext::get(device, &context));
  const DeviceGuard guard(device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  std::shared_ptr<cuda::HeldEvent> ready;
  bool is_captured = false;
  PYCOMM_RETURN_IF_ERROR(
      cuda::capture_state(static_cast<cudaStream_t>(stream), "a call on CUDA", &is_captured));
  if (!is_captured) {  // waiting for this one would invalidate that
    bool another_is = false;
    PYCOMM_RETURN_IF_ERROR(cuda::capture_state(context->streams().comm(), "a call on CUDA", &another_is));
    if (another_is) {
      return Status::error(
          Code::kValue, format("a call on cuda:%d while pycomm's calls there are captured into a CUDA graph "
                               "from another stream: make it before the capture, or after its end",
                               device));
    }
  }
  PYCOMM_RETURN_IF_ERROR(cuda::HeldEvent::take(context, &ready));
  PYCOMM_RETURN_IF_ERROR(cuda_status(cudaEventRecord(ready->get(), static_cast<cudaStream_t>(stream)),
                                     "cudaEventRecord on the caller's stream"));
  auto turn = std::make_shared<DeviceTurn>();
  const uint64_t number = context->take_turn();
  turn->impl = std::make_unique<Impl>(Impl{std::move(context), std::move(ready), is_captured, number});
  *out = std::move(turn);
  return Status();
}

Status DeviceTurn::wait(CallerHooks* hooks, const std::function<Status()>& trouble) {
  if (impl->context->await_turn(impl->turn, 0)) return Status();
  if (hooks != nullptr) hooks->before_block();
  while (!impl->context->await_turn(impl->turn, 0.001 * kSliceMs)) {
    if (hooks != nullptr) PYCOMM_RETURN_IF_ERROR(hooks->poll());
    PYCOMM_RETURN_IF_ERROR(trouble());
  }
  return Status();
}

bool DeviceTurn::is_captured() const { return impl->is_captured; }

DeviceTurn::~DeviceTurn() {
  if (impl != nullptr) impl->context->end_turn(impl->turn);
}

// ---- ends

DeviceEnd::~DeviceEnd() = default;

Status DeviceEnd::order(void* stream) const {
  const DeviceGuard guard(impl->context->device());
  PYCOMM_RETURN_IF_ERROR(guard.status());
  // Also of a failed call, which may still read and write its tensors.
  Status ordered = cuda_status(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), impl->event->get(), 0),
                               "cudaStreamWaitEvent on the caller's stream");
  PYCOMM_RETURN_IF_ERROR(impl->failure->get());
  if (ordered.ok() && stream == impl->caller) impl->is_ordered.store(true);
  return ordered;
}

bool DeviceEnd::is_ordered() const { return impl->is_ordered.load(); }

// The engine's watch finds the device's error as well, and ends what is under way.
bool DeviceEnd::Impl::ask() const {
  bool passed = false;
  const Status s = event_passed(context->device(), event->get(), &passed);
  if (!s.ok()) failure->set(s);
  return passed;
}

// A failed call counts as passed, too: nobody should wait for it.
bool DeviceEnd::passed() const {
  return impl->is_captured || impl->failure->failed.load() || impl->ask() || impl->failure->failed.load();
}

bool DeviceEnd::over() const {
  bool passed = impl->is_captured;
  return passed || !event_passed(impl->context->device(), impl->event->get(), &passed).ok() || passed;
}

Status DeviceEnd::failure() const { return impl->failure->get(); }

int DeviceEnd::device() const { return impl->context->device(); }

Status DeviceEnd::wait(double timeout_s, CallerHooks* hooks) const {
  if (impl->is_captured) return impl->failure->get();
  const double end_s = timeout_s < 0 ? INFINITY : monotonic_s() + timeout_s;
  double asked_s = monotonic_s();
  for (int i = 0; !impl->ask(); i++) {
    PYCOMM_RETURN_IF_ERROR(impl->failure->get());
    if (i < 50) {
      std::this_thread::yield();
      continue;
    }
    if (i == 50 && hooks != nullptr) hooks->before_block();
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(1000, 10 * (i - 49))));
    const double now_s = monotonic_s();
    if (now_s > end_s)
      return Status::error(Code::kTimeout, format("the call is not done after %g s", timeout_s));
    if (hooks != nullptr && now_s - asked_s > 0.001 * kSliceMs) {
      asked_s = now_s;
      PYCOMM_RETURN_IF_ERROR(hooks->poll());
    }
  }
  return impl->failure->get();
}

}  // namespace pycomm
