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
constexpr double kGraceS = 0.5;  // for the word of another host
}  // namespace

void DeviceEngine::Impl::begin_watch() {
  if (!watcher.joinable()) watcher = std::thread([this] { watch(); });
  watch_changed.notify_one();
}

void DeviceEngine::Impl::watch_for(std::shared_ptr<DeviceEnd> end, std::shared_ptr<cuda::HeldEvent> ready,
                                   double timeout_s, const Call& call) {
  const std::lock_guard lock(watch_mutex);
  note_passed();
  pending.push_back(
      {std::move(end), std::move(ready), timeout_s, monotonic_s() + timeout_s, call.sig.text()});
  begin_watch();
}

void DeviceEngine::Impl::watch_replays() {
  const std::lock_guard lock(watch_mutex);
  has_captured = true;
  begin_watch();
}

void DeviceEngine::Impl::note_passed() {
  while (!pending.empty() && pending.front().end->passed()) {
    pending.pop_front();
    n_passed++;
  }
  if (failure->failed.load()) return;  // then all count as passed, and peers shall see how far this rank came
  const bool reached = !pending.empty() && cudaEventQuery(pending.front().ready->get()) != cudaErrorNotReady;
  link.show(n_passed + (reached ? 1 : 0), n_passed);
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
  const auto nothing_to_see = [&] { return failure->failed.load() || (pending.empty() && !has_captured); };
  while (!stop) {
    note_passed();
    if (nothing_to_see()) {
      watch_changed.wait(lock, [&] { return stop || !nothing_to_see(); });
      continue;
    }
    lock.unlock();
    Status s = look();
    lock.lock();
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
  if (!failure->set(why)) return;
  link.fail(why);
  if (peers != nullptr) peers->abort(why.clone());
  // Whoever issues a call polls for trouble, and lets go.
  const std::lock_guard lock(context->issuing());
  const DeviceGuard guard(device);
  end_nccl();
}

// What is under way on it ends. Where NCCL can go on with the ranks that are left, it stays for them.
void DeviceEngine::Impl::end_nccl() {
  if (!comm.valid() || comm_is_revoked) return;
  if (comm.can_shrink() && comm.can_revoke()) {
    comm_is_revoked = comm.revoke({nccl::NcclComm::kAbortTimeout_s / 2, {}}).ok();
    if (comm_is_revoked) return;
  }
  const Status left = comm.abort();
  if (!left.ok()) nccl_text += "; " + left.message();
}

// ---- the end

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
  while (cudaStreamQuery(stream()) == cudaErrorNotReady) {
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
  log_line(LogLevel::kWarning,
           format("rank %d closed a communicator whose calls on CUDA device %d do not end, %.1f s after its "
                  "failure; left until the process ends are its stream, scratch memory and memory of peers. "
                  "NCCL: %s. The failure: %s",
                  link.rank, device, monotonic_s() - failure->at_s.load(), nccl_text.c_str(),
                  failure->get().message().c_str()));
  cuda::DeviceContext::keep(context);
  if (peers != nullptr) PeerCollectives::keep(std::move(peers), memory);
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
