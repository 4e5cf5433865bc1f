// How a call between hosts ends otherwise than well: who is gone, who refused, who is late, and who is told.
//
// *Needed* is a rank of which something is expected, or for which something is to leave: only such a one ends
// a call when it is gone, and of those the first that has not entered the call is *awaited*: named when the
// time is over. A rank that fails tells all ranks of other hosts, once; what it has heard from one of them it
// passes on when it leaves.
//
// With the Net's mutex, but for wait() and what it calls (remote.h).
#include <algorithm>

#include "engine/remote.h"

namespace pycomm {

void Remote::tell_now() {
  const auto lock = net_->lock();
  tell_failure(group_.failure());
}

void Remote::leave(const std::string& why) {
  if (net_->forked()) return;
  const auto lock = net_->lock();
  tell_failure(group_.failure());
  // Our end is soon seen, and must not be taken for the reason where the news that we have heard is late.
  if (heard_) send_failure(group_.failure(), [this](int peer) { return net_->connected(peer); });
  heard_ = false;
  net_->detach(id_, why);
}

void Remote::lost(int peer, const Status& why) {
  const int q = rank_of(peer);
  if (q >= 0) gone_.emplace(q, Gone{why.message(), false});
}

void Remote::left(int peer, const std::string& why) {
  const int q = rank_of(peer);
  if (q < 0) return;
  gone_.emplace(q, Gone{name(q) + " closed its communicator" + (why.empty() ? "" : ": " + why), true});
}

void Remote::tick() {
  if (group_.failed() && !told_) tell_failure(group_.failure());
  probe();
}

// Of a rank of this host, for one on another that waits for it.
std::string Remote::state(int peer, uint32_t call) {
  const int q = rank_of(peer);
  for (int i = 0; q >= 0 && i < group_.size(); i++) {
    if (group_.name(i) == q) return group_.state(i, call);
  }
  return "";
}

std::string Remote::described(int q) const {
  return name(q) + net_->state(job_ranks_[static_cast<size_t>(q)], id_);
}

bool Remote::needs(int q) const {
  return blocked_.contains(q) ||
         std::any_of(expected_.begin(), expected_.end(), [q](const auto& e) { return e.first.from == q; }) ||
         (std::any_of(leaving_.begin(), leaving_.end(), [q](const auto& m) { return m.second.to == q; }) &&
          net_->holds_back(job_ranks_[static_cast<size_t>(q)]));
}

int Remote::awaited() const {
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (needs(static_cast<int>(q)) && !entered_[q]) return static_cast<int>(q);
  }
  if (!blocked_.empty()) return blocked_.begin()->first;
  if (!expected_.empty()) return expected_.begin()->first.from;
  return -1;
}

Status Remote::trouble() const {
  if (group_.failed()) return group_.failure();
  if (!verdict_.ok()) return verdict_.clone();
  const auto refused = refused_.find(call_);
  if (refused != refused_.end()) {
    return Status::error(
        Code::kRefused,
        format("%s #%u: rank %d refused its call: %s (the communicator stays usable)",
               call_kind_name(sig_.kind), call_, refused->second.first, refused->second.second.c_str()));
  }
  if (gone_.empty()) return Status();
  for (const auto& [q, gone] : gone_) {
    if (!needs(q)) continue;
    return Status::error(Code::kPeerLost,
                         format("%s #%u: %s", call_kind_name(sig_.kind), call_, gone.why.c_str()));
  }
  return Status();
}

Status Remote::lost_rank(const std::string& here) const {
  const auto lock = net_->lock();
  for (const auto& [q, gone] : gone_) {
    if (!gone.left) return Status::error(Code::kPeerLost, here + ": " + gone.why);
  }
  return Status();
}

// Looks, every slice, at the caller (Ctrl-C), the deadline and the ranks of this host.
class Remote::Waiting final : public WaitClient {
 public:
  Waiting(Remote& remote, CallerHooks* hooks, double timeout_s, const std::string& here)
      : remote_(remote), hooks_(hooks), started_s_(monotonic_s()), timeout_s_(timeout_s), here_(here) {}
  void before_block() override {
    if (hooks_ != nullptr) hooks_->before_block();
  }
  Status check(int) override {
    if (hooks_ != nullptr) PYCOMM_RETURN_IF_ERROR(hooks_->poll());
    PYCOMM_RETURN_IF_ERROR(remote_.group_.failed_peer(here_));
    std::string late;
    Status s = look(&late);
    if (!late.empty()) remote_.group_.say_late(waited_s_, here_, late);
    return s;
  }

 private:
  // Asks in time what the awaited rank does. `late`: who is to be named to a person now.
  Status look(std::string* late) {
    const auto lock = remote_.net_->lock();
    Net& net = *remote_.net_;
    const double since_s = std::max(started_s_, remote_.moved_at_s_);
    if (since_s > since_s_) late_.restart();
    since_s_ = since_s;
    waited_s_ = monotonic_s() - since_s;
    const int q = remote_.awaited();
    remote_.group_.show_wait(q, since_s);
    if (q >= 0) {
      const int peer = remote_.job_ranks_[static_cast<size_t>(q)];
      const bool silent = net.silent_s(peer) > Late::kFirstS;
      if (waited_s_ > std::min(Late::kAskS, timeout_s_ / 2)) net.ask(peer, remote_.id_, remote_.call_);
      const bool news = silent && !told_silent_;  // what is told before the first time is not told again then
      if (late_.due(news ? std::max(waited_s_, Late::kFirstS) : waited_s_) || news)
        *late = remote_.described(q);
      told_silent_ = silent;
    }
    const double grace_s = remote_.all_needed_entered() ? 3 * kGraceS : kGraceS;
    if (waited_s_ < timeout_s_ + grace_s) return Status();
    return Status::error(Code::kTimeout,
                         format("%s: waited %.1f s for %s (timeout %.1f s)", here_.c_str(), waited_s_,
                                q < 0 ? "what was sent to leave" : remote_.described(q).c_str(), timeout_s_));
  }

  Remote& remote_;
  CallerHooks* hooks_;
  double started_s_, timeout_s_;
  double since_s_ = 0, waited_s_ = 0;
  bool told_silent_ = false;
  Late late_;
  const std::string& here_;
};

Status Remote::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, CallerHooks* hooks,
                    double timeout_s, const std::string& here) {
  Waiting waiting(*this, hooks, timeout_s, here);
  Status found;
  Status ended = net_->wait(
      lock,
      [&] {
        if (done()) return true;
        found = trouble();
        return !found.ok();
      },
      waiting);
  group_.show_no_wait();
  PYCOMM_RETURN_IF_ERROR(std::move(ended));
  return done() ? Status() : std::move(found);
}

void Remote::refuse(uint32_t call, const std::string& why) {
  MessageHeader h = header(RemoteKind::kRefuse);
  h.call = call;
  h.n_bytes = utf8_prefix(why, kMaxRefusal);
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (!is_here_[q]) net_->send_copy(job_ranks_[q], 0, h, why.data());
  }
}

void Remote::tell_failure(const Status& status) {
  if (told_ || status.ok()) return;
  told_ = true;
  const auto all = [](int) { return true; };
  send_failure(status, all);
}

void Remote::send_failure(const Status& status, const std::function<bool(int)>& to) {
  const std::string& why = status.message();
  const std::string text = static_cast<char>(status.code()) + why.substr(0, utf8_prefix(why, kMaxFailure));
  MessageHeader h = header(RemoteKind::kFail);
  h.n_bytes = text.size();
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (!is_here_[q] && to(job_ranks_[q])) net_->send_copy(job_ranks_[q], 0, h, text.data());
  }
}

}  // namespace pycomm
