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
constexpr double kLetGoS = 1;
}  // namespace

void DeviceEngine::Impl::watch_for(std::shared_ptr<DeviceEnd> end, double timeout_s, const Call& call) {
  {
    const std::lock_guard lock(watch_mutex);
    pending.push_back({std::move(end), monotonic_s() + timeout_s, call.sig.text()});
    if (!watcher.joinable()) watcher = std::thread([this] { watch(); });
  }
  watch_changed.notify_one();
}

// Something that ends the calls under way, or OK. No call of CUDA: these may wait for the issuing thread.
Status DeviceEngine::Impl::look() {
  if (peers != nullptr) PYCOMM_RETURN_IF_ERROR(peers->failure());
  PYCOMM_RETURN_IF_ERROR(link.trouble());
  const std::unique_lock lock(comm_mutex, std::try_to_lock);  // whoever holds it is told by NCCL
  return lock.owns_lock() && comm.valid() ? comm.async_error() : Status();
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
  end_nccl();
}

// The issuing thread polls for trouble, and lets go; but where a launch keeps it, only the abort frees it. It
// then finds no communicator.
void DeviceEngine::Impl::end_nccl() {
  std::unique_lock lock(comm_mutex, std::defer_lock);
  for (const double end_s = monotonic_s() + kLetGoS; !lock.try_lock() && monotonic_s() < end_s;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (!has_comm.load(std::memory_order_acquire)) return;
  const DeviceGuard guard(device);
  const Status aborted = comm.abort();
  const std::lock_guard text_lock(left_mutex);
  if (!aborted.ok()) left += "; " + aborted.message();
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
