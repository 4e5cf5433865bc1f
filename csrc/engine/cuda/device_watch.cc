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
  const DeviceGuard guard(device);  // the thread's own
  std::unique_lock lock(watch_mutex);
  while (!stop) {
    if (pending.empty()) {
      watch_changed.wait(lock, [&] { return stop || !pending.empty(); });
      continue;
    }
    lock.unlock();
    Status s = look();
    lock.lock();
    while (s.ok() && !pending.empty()) {  // others only add to them
      const Pending front = pending.front();
      lock.unlock();
      const double asked_s = monotonic_s();
      bool passed = front.end->impl->is_captured;
      if (!passed) s = event_passed(device, front.end->impl->event, &passed);
      lock.lock();
      if (passed) {
        pending.pop_front();
      } else {
        if (s.ok() && asked_s > front.until_s) s = late(front.what);
        break;
      }
    }
    if (!s.ok()) {
      lock.unlock();
      fail(s);
      lock.lock();
      pending.clear();
      continue;
    }
    watch_changed.wait_for(lock, kBetweenLooks, [&] { return stop; });
  }
}

Status DeviceEngine::Impl::late(const std::string& what) const {
  return Status::error(
      Code::kTimeout,
      format("%s on CUDA device %d: all ranks have made the call, and it has not ended in time on %s: its "
             "device, or one that it waits for, is stuck or very slow (other work on its stream?); see "
             "nvidia-smi and dmesg on the hosts",
             what.c_str(), device, link.describe(link.rank).c_str()));
}

// Ends what is under way; the communicator has failed. Twice does no harm.
void DeviceEngine::Impl::fail(const Status& why) {
  failure->set(why);
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
