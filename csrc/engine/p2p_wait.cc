// Waiting for a send or recv: who waits moves the data, and looks every slice whether it is still worth
// while.
//
// A pending transfer is *hopeless* when its time is over, when its peer is gone (for a recv from any source:
// all of them), or when the communicator has failed; then every pending transfer ends with the reason.
//
// Threads: await() and finish() by any caller; find_hopeless() and expire() with PointToPoint's mutex.
#include <algorithm>
#include <cmath>

#include "engine/p2p.h"

namespace pycomm {

// Looks at every slice whether the transfer has become hopeless, which the bell does not tell, and says when
// it takes long.
class PointToPoint::Finisher final : public WaitClient {
 public:
  Finisher(PointToPoint& p2p, const Work& work, CallerHooks* hooks, double end_s)
      : p2p_(p2p), work_(work), hooks_(hooks), began_s_(monotonic_s()), end_s_(end_s) {}
  ~Finisher() override {
    if (shown_) p2p_.group_.show_no_transfer();
  }
  bool is_over() const { return end_s_ < INFINITY && monotonic_s() >= end_s_; }
  void before_block() override {
    if (hooks_ != nullptr) hooks_->before_block();
  }
  Status check(int) override {
    if (hooks_ != nullptr) PYCOMM_RETURN_IF_ERROR(hooks_->poll());
    if (const Awaited a = find(); a.found) look(a);
    {
      std::lock_guard lock(p2p_.mutex_);
      p2p_.expire();
    }
    return is_over() ? Status::error(Code::kTimeout, "the caller waits no longer") : Status();
  }

 private:
  Awaited find() const {
    std::lock_guard lock(p2p_.mutex_);
    return p2p_.awaited(work_);
  }
  void look(const Awaited& a) {
    const double waited_s = monotonic_s() - began_s_;
    p2p_.group_.show_transfer(a.is_send, a.peer, began_s_);
    shown_ = true;
    const bool far = a.peer >= 0 && p2p_.is_far(a.peer);
    std::string state;
    if (far && waited_s > std::min(Late::kAskS, (a.deadline_s - began_s_) / 2)) {
      state = p2p_.far_->ask(a.peer);
      std::lock_guard lock(p2p_.mutex_);
      p2p_.known_[a.peer] = state;
    }
    if (!late_.due(waited_s)) return;
    if (!far && a.peer >= 0)
      state = ", which " + p2p_.group_.state(p2p_.local_of_[static_cast<size_t>(a.peer)], 0);
    p2p_.group_.say_late(waited_s, format("%s(tag %d)", a.is_send ? "send" : "recv", a.tag),
                         (a.peer < 0 ? "any rank" : p2p_.who(a.peer)) + state);
  }

  PointToPoint& p2p_;
  const Work& work_;
  CallerHooks* hooks_;
  double began_s_, end_s_;
  bool shown_ = false;
  Late late_;
};

PointToPoint::Awaited PointToPoint::awaited(const Work& work) const {
  Awaited out;
  for (size_t q = 0; q < outbound_.size(); q++) {
    for (const Message& m : outbound_[q]) {
      if (m.work.get() == &work) return {true, true, static_cast<int>(q), m.tag, m.deadline_s};
    }
  }
  if (far_ != nullptr) {
    for (const auto& [token, m] : far_->messages()) {
      if (m.work.get() == &work) return {true, true, m.peer, m.tag, m.deadline_s};
    }
  }
  const Status ignored = mailbox_.for_each_pending([&](const Posted& p, int from) {
    if (p.work.get() == &work) out = {false, true, from, p.tag, p.deadline_s};
    return Status();
  });
  return out;
}

Status PointToPoint::await(const Work& work, CallerHooks* hooks, double timeout_s, bool* finished) {
  Control& own = group_.own();
  Finisher finisher(*this, work, hooks, timeout_s < 0 ? INFINITY : monotonic_s() + timeout_s);
  callers_.fetch_add(1, std::memory_order_relaxed);
  calls_.fetch_add(1, std::memory_order_relaxed);
  Status interrupted;
  while (interrupted.ok()) {
    const uint64_t seen = own.bell.word.load(std::memory_order_acquire);
    {
      std::lock_guard lock(mutex_);
      progress();
      expire();
    }
    if (work.done()) break;
    interrupted = wait(
        own.bell.word, Half::kLow, own.bell_sleepers, [&](uint64_t w) { return w != seen || work.done(); },
        group_.policy(), finisher, -1);
    if (interrupted.ok() && finisher.is_over()) break;  // other transfers go on and on
  }
  callers_.fetch_sub(1);
  if (resting_.load()) {
    std::lock_guard lock(mutex_);
    cv_.notify_all();
  }
  *finished = work.done();
  if (*finished) return work.result();
  return interrupted.code() == Code::kInterrupt ? std::move(interrupted) : Status();
}

Status PointToPoint::finish(const std::shared_ptr<Work>& work, CallerHooks* hooks) {
  bool finished;
  Status s = await(*work, hooks, -1, &finished);
  if (s.code() != Code::kInterrupt) return s;
  // Part of the message may have moved, and its tensor is about to go: nothing can be saved.
  std::lock_guard lock(mutex_);
  const Status failure = Status::error(Code::kClosed, "send/recv was interrupted (Ctrl-C)");
  group_.fail(failure);
  fail_all(failure);
  return s;
}

void PointToPoint::hurry() {
  {
    std::lock_guard lock(mutex_);
    calls_seen_ = calls_.load(std::memory_order_relaxed);
  }
  cv_.notify_all();
}

// The first pending transfer that is past its deadline or whose peer is gone, as an error that names the
// peer.
Status PointToPoint::find_hopeless() const {
  const double now = monotonic_s();
  const auto look = [&](int peer, double deadline_s, const char* what, int tag) {
    const std::string here = format("%s(tag %d) on rank %d", what, tag, rank_);
    if (now > deadline_s) {
      const auto known = known_.find(peer);
      return Status::error(Code::kTimeout, format("%s: timed out waiting for %s%s", here.c_str(),
                                                  peer < 0 ? "any rank" : describe(peer).c_str(),
                                                  known == known_.end() ? "" : known->second.c_str()));
    }
    return hopeless(peer, here);
  };
  for (size_t q = 0; q < outbound_.size(); q++) {
    for (const Message& m : outbound_[q])
      PYCOMM_RETURN_IF_ERROR(look(static_cast<int>(q), m.deadline_s, "send", m.tag));
  }
  if (far_ != nullptr) {
    for (const auto& [token, m] : far_->messages())
      PYCOMM_RETURN_IF_ERROR(look(m.peer, m.deadline_s, "send", m.tag));
  }
  return mailbox_.for_each_pending(
      [&](const Posted& p, int from) { return look(from, p.deadline_s, "recv", p.tag); });
}

void PointToPoint::expire() {
  const double now = monotonic_s();
  if (now - expired_at_s_ < 0.05) return;
  expired_at_s_ = now;
  if (active_ == 0) return;
  if (group_.failed()) return fail_all(group_.failure());
  if (find_hopeless().ok()) return;
  progress();  // the last words of a peer that has gone
  const Status failure = find_hopeless();
  if (failure.ok()) return;
  group_.fail(failure);
  fail_all(failure);
}

}  // namespace pycomm
