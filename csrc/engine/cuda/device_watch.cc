// What goes wrong after a call was issued: a thread for each communicator that looks at what is under way.
//
// It looks every kBetweenLooks while calls are pending, and every kBetweenReplays once a call was captured:
// of a graph's replays the host knows nothing, but a dead rank, an error of NCCL's and kernels that gave up
// show all the same. A call that has not passed in time, such an error, a rank that is lost: each fails the
// communicator, which its other ranks are told by the host's ways (engine/group.h), and ends what is on the
// stream, so that streams pass and nobody waits for ever. Where that does not help (NCCL's abort hangs, the
// caller's own stream is stuck), what is on the stream is kept until the process ends.
//
// Who is late: over peers' memory the kernels know whom they wait for, and are asked; else how far each
// rank's device is (Shown, engine/control.h), which ranks of other hosts are told by those of the culprit's.
#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "engine/cuda/device_impl.h"

namespace pycomm {

namespace {
constexpr auto kBetweenLooks = std::chrono::milliseconds(5);
constexpr auto kBetweenReplays = std::chrono::milliseconds(100);
constexpr double kLetGoS = 1;
constexpr double kGraceS = 0.5;  // for the word of another host
constexpr double kNameS = 1;
}  // namespace

void DeviceEngine::Impl::begin_watch() {
  if (!watcher.joinable()) watcher = std::thread([this] { watch(); });
  watch_changed.notify_one();
}

void DeviceEngine::Impl::watch_for(std::shared_ptr<DeviceEnd> end, std::shared_ptr<cuda::HeldEvent> ready,
                                   double timeout_s, const Call& call) {
  const std::lock_guard lock(watch_mutex);
  pending.push_back(
      {std::move(end), std::move(ready), timeout_s, monotonic_s() + timeout_s, call.sig.text()});
  begin_watch();
}

void DeviceEngine::Impl::watch_replays() {
  const std::lock_guard lock(watch_mutex);
  has_captured = true;
  begin_watch();
}

// How far this device is, which the other ranks see. No lock is held in calls of CUDA, which may block.
Status DeviceEngine::Impl::note_passed(std::unique_lock<std::mutex>& lock) {
  bool reached = false;
  while (!pending.empty() && !reached) {  // others only add to them
    const std::shared_ptr<DeviceEnd> end = pending.front().end;
    const std::shared_ptr<cuda::HeldEvent> ready = pending.front().ready;
    bool passed = false;
    lock.unlock();
    Status s = event_passed(device, end->impl->event->get(), &passed);
    if (s.ok() && !passed) s = event_passed(device, ready->get(), &reached);
    lock.lock();
    PYCOMM_RETURN_IF_ERROR(std::move(s));
    if (!passed) break;
    pending.pop_front();
    n_passed++;
  }
  // After a failure streams pass what was not done, and peers shall see how far this rank had come.
  if (!failure->failed.load()) link.show(n_passed + (reached ? 1 : 0), n_passed);
  return Status();
}

// That a call has not ended in time, when nobody knows better.
Status DeviceEngine::Impl::overdue() {
  const double now_s = monotonic_s();
  const auto late =
      std::find_if(pending.begin(), pending.end(), [&](const Pending& p) { return now_s > p.until_s; });
  if (late == pending.end()) return Status();
  if (peers != nullptr && peers->give_up(late->limit_s)) return Status();  // look() sees what they say
  std::string who = link.behind(n_passed + 1);
  if (who.empty() && !link.one_host && now_s < late->until_s + kGraceS) return Status();
  if (who.empty()) {
    who = format(
        "the devices of all ranks %sare in it: one of them, or a path between them, is stuck or very "
        "slow",
        link.one_host ? "" : "of this host ");
  }
  return Status::error(Code::kTimeout,
                       format("%s on CUDA has not ended in time (timeout %g s), and all ranks have made it: "
                              "%s; see nvidia-smi and dmesg on the hosts",
                              pending.front().what.c_str(), late->limit_s, who.c_str()));
}

// NCCL may tell that a peer is gone before the kernel has told that it died, and does not know its name.
// Called without locks.
Status DeviceEngine::Impl::named(Status s) {
  if (s.code() != Code::kPeerLost && s.code() != Code::kSystem) return s;
  for (const double end_s = monotonic_s() + kNameS; monotonic_s() < end_s;) {
    PYCOMM_RETURN_IF_ERROR(link.trouble());
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return s;
}

// Something that ends the calls under way, or OK. No call of CUDA: these may wait for the issuing thread.
Status DeviceEngine::Impl::look() {
  if (peers != nullptr) PYCOMM_RETURN_IF_ERROR(peers->failure());
  PYCOMM_RETURN_IF_ERROR(link.trouble());
  Status s;
  {
    const std::unique_lock lock(comm_mutex, std::try_to_lock);  // whoever holds it is told by NCCL
    if (lock.owns_lock() && comm.valid()) s = comm.async_error();
  }
  return named(std::move(s));
}

void DeviceEngine::Impl::watch() {
  const DeviceGuard guard(device);  // the thread's own
  std::unique_lock lock(watch_mutex);
  const auto nothing_to_see = [&] { return failure->failed.load() || (pending.empty() && !has_captured); };
  while (!stop) {
    if (nothing_to_see()) {
      watch_changed.wait(lock, [&] { return stop || !nothing_to_see(); });
      continue;
    }
    lock.unlock();
    Status s = look();
    lock.lock();
    if (s.ok()) s = note_passed(lock);
    if (s.ok()) s = overdue();
    if (!s.ok()) {
      lock.unlock();
      fail(s);
      lock.lock();
      continue;
    }
    if (pending.empty()) {
      watch_changed.wait_for(lock, kBetweenReplays, [&] { return stop || !pending.empty(); });
    } else {
      watch_changed.wait_for(lock, kBetweenLooks, [&] { return stop; });
    }
  }
}

// Ends what is under way; the communicator has failed. Twice does no harm.
void DeviceEngine::Impl::fail(const Status& why) {
  failure->set(why);
  end_nccl();
}

// Not owned where the issuing thread, which has it, does not come back in time.
std::unique_lock<std::mutex> DeviceEngine::Impl::lock_comm() {
  std::unique_lock lock(comm_mutex, std::defer_lock);
  for (const double end_s = monotonic_s() + kLetGoS; !lock.try_lock() && monotonic_s() < end_s;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return lock;
}

// What is under way on it ends. Where NCCL can go on with the ranks that are left, it stays for them.
//
// The issuing thread polls for trouble, and lets go; but where a launch keeps it, only the abort frees it. It
// then finds no communicator.
void DeviceEngine::Impl::end_nccl() {
  const auto lock = lock_comm();
  if (!has_comm.load(std::memory_order_acquire) || comm_is_revoked.load()) return;
  const DeviceGuard guard(device);
  if (lock.owns_lock() && comm.can_shrink() && comm.can_revoke()) {
    comm_is_revoked.store(comm.revoke({nccl::NcclComm::kAbortTimeout_s / 2, {}}).ok());
    if (comm_is_revoked.load()) return;
  }
  const Status aborted = comm.abort();
  const std::lock_guard text_lock(history_mutex);
  if (!aborted.ok()) history += "; " + aborted.message();
}

// ---- the end

// Whether the stream has not passed this communicator's calls. It is the device's: what other communicators
// have on it may be stuck, and is asked only where nobody knows what this one has (graphs; after a failure).
bool DeviceEngine::Impl::is_busy() {
  std::unique_lock lock(watch_mutex);
  const bool is_known = !has_captured && !failure->failed.load();
  const std::shared_ptr<DeviceEnd> last = pending.empty() ? nullptr : pending.back().end;
  lock.unlock();
  if (!is_known) return stream_is_busy(device, stream());
  bool passed = last == nullptr;
  return !passed && event_passed(device, last->impl->event->get(), &passed).ok() && !passed;
}

// Until the stream has passed what is on it. False: it does not, though a failure should have ended it.
bool DeviceEngine::Impl::await_end() {
  constexpr double kAtLeastS = 0.5;
  bool may_be_replayed = false;
  {
    const std::lock_guard lock(watch_mutex);
    may_be_replayed = has_captured;
  }
  if (may_be_replayed) {  // on a stream of the caller's: behind it (DeviceStreams::begin_operation)
    const std::lock_guard lock(context->issuing());
    (void)context->streams().begin_operation("close");
  }
  const double begin_s = monotonic_s();
  auto pause = std::chrono::microseconds(10);
  while (is_busy()) {
    if (failure->failed.load()) {
      const double end_s =
          std::max(failure->at_s.load() + nccl::NcclComm::kAbortTimeout_s, begin_s + kAtLeastS);
      if (monotonic_s() > end_s) return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
  }
  return true;
}

// What kernels that may still run, or begin to, can touch.
void DeviceEngine::Impl::keep() {
  const std::lock_guard lock(history_mutex);
  log_line(LogLevel::kWarning,
           format("rank %d closed a communicator whose calls on CUDA device %d do not end, %.1f s after its "
                  "failure; left until the process ends are its stream, scratch memory and memory of peers. "
                  "NCCL: %s%s. The failure: %s",
                  link.rank, device, monotonic_s() - failure->at_s.load(), nccl_text.c_str(), history.c_str(),
                  failure->get().message().c_str()));
  cuda::DeviceContext::keep(context);
  PeerMemory::abandon(device);
  if (peers != nullptr) PeerCollectives::keep(std::move(peers));
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
