// What goes wrong after a call was issued: a thread for each communicator that looks at what is under way.
//
// It runs while calls are pending. A call that has not passed in time, an error that NCCL or the kernels
// tell, a rank that is lost: each fails the communicator, which its other ranks are told by the host's ways
// (engine/group.h), and ends what is on the stream, so that streams pass and nobody waits for ever.
#include <chrono>

#include "engine/cuda/device_impl.h"

namespace pycomm {

namespace {
constexpr auto kBetweenLooks = std::chrono::milliseconds(5);
}

void DeviceEngine::Impl::watch_for(std::shared_ptr<DeviceEnd> end, double timeout_s, const Call& call) {
  {
    const std::lock_guard lock(watch_mutex);
    while (!pending.empty() && pending.front().end->passed()) pending.pop_front();
    pending.push_back({std::move(end), monotonic_s() + timeout_s, call.sig.text()});
    if (!watcher.joinable()) watcher = std::thread([this] { watch(); });
  }
  watch_changed.notify_one();
}

// Something that ends the calls under way, or OK.
Status DeviceEngine::Impl::look() {
  if (peers != nullptr) PYCOMM_RETURN_IF_ERROR(peers->failure());
  if (context->issuing().try_lock()) {  // whoever holds it makes calls of NCCL, and is told by them
    const std::lock_guard lock(context->issuing(), std::adopt_lock);
    if (comm.valid()) PYCOMM_RETURN_IF_ERROR(comm.async_error());
  }
  return link.trouble();
}

void DeviceEngine::Impl::watch() {
  // Or it would spoil captures of other threads, which forbid that events are asked in this process.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(watch_mutex);
  while (!stop) {
    while (!pending.empty() && pending.front().end->passed()) pending.pop_front();
    if (pending.empty()) {
      watch_changed.wait(lock, [&] { return stop || !pending.empty(); });
      continue;
    }
    Status s;
    if (monotonic_s() > pending.front().until_s) {
      s = Status::error(
          Code::kTimeout,
          format("%s on CUDA device %d: all ranks have made the call, and it has not ended in time on "
                 "%s: its device, or one that it waits for, is stuck or very slow (other work on its "
                 "stream?); see nvidia-smi and dmesg on the hosts",
                 pending.front().what.c_str(), device, link.describe(link.rank).c_str()));
    }
    lock.unlock();
    if (s.ok()) s = look();
    if (!s.ok()) fail(s);
    lock.lock();
    if (!s.ok()) {
      pending.clear();
      continue;
    }
    watch_changed.wait_for(lock, kBetweenLooks, [&] { return stop; });
  }
}

// Ends what is under way; the communicator has failed. Twice does no harm.
void DeviceEngine::Impl::fail(const Status& why) {
  if (!failure->set(why)) return;
  link.fail(why);
  if (peers != nullptr) peers->abort(why.clone());
  // Whoever issues a call polls for trouble, and lets go.
  const std::lock_guard lock(context->issuing());
  if (!comm.valid()) return;
  const DeviceGuard guard(device);
  const Status left = comm.abort();
  if (!left.ok()) nccl_text += "; " + left.message();
}

void DeviceEngine::Impl::end() {
  {
    const std::lock_guard lock(watch_mutex);
    stop = true;
  }
  watch_changed.notify_all();
  if (watcher.joinable()) watcher.join();
}

}  // namespace pycomm
