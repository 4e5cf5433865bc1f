#include "engine/remote.h"

#include <algorithm>
#include <cstring>

namespace pycomm {

Remote::Remote(std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks, int rank, Group& group)
    : net_(std::move(net)), id_(id), job_ranks_(std::move(job_ranks)), rank_(rank), group_(group) {
  for (size_t q = 0; q < job_ranks_.size(); q++) ranks_[job_ranks_[q]] = static_cast<int>(q);
  const auto lock = net_->lock();
  net_->attach(id_, this);
}

Remote::~Remote() {
  if (net_->forked()) return;
  const auto lock = net_->lock();
  net_->detach(id_);
}

const std::string& Remote::name(int q) const { return net_->name(job_ranks_[static_cast<size_t>(q)]); }

int Remote::rank_of(int peer) const {
  const auto found = ranks_.find(peer);
  return found == ranks_.end() ? -1 : found->second;
}

MessageHeader Remote::header(RemoteKind kind) const {
  MessageHeader h;
  h.kind = static_cast<uint8_t>(kind);
  h.group = id_;
  h.call = call_;
  h.signature = sig_.packed();
  h.count = sig_.count;
  h.extra = sig_.extra;
  return h;
}

void Remote::begin(uint32_t call, const Signature& sig) {
  call_ = call;
  sig_ = sig;
  active_ = true;
  verdict_ = Status();
  std::erase_if(kept_, [&](const auto& k) { return k.first.call < call; });
  std::erase_if(opened_, [&](const auto& o) { return o.first < call; });
  std::erase_if(refused_, [&](const auto& r) { return r.first < call; });
}

void Remote::end() {
  active_ = false;
  if (!expected_.empty() || !leaving_.empty()) net_->forget(this);
  expected_.clear();
  blocked_.clear();
  leaving_.clear();
}

// ---- messages --------------------------------------------------------------------------------------------

void Remote::send(int to, const Key& key, const std::byte* data, size_t n_bytes, std::function<void()> left) {
  MessageHeader h = header(RemoteKind::kData);
  h.part = key.tile;
  h.run = key.run;
  h.flags = static_cast<uint16_t>(key.index);
  h.n_bytes = n_bytes;
  const uint64_t token = next_token_++;
  leaving_[token] = std::move(left);
  const int lane = static_cast<int>(key.tile % static_cast<uint32_t>(net_->n_lanes()));
  net_->send(job_ranks_[static_cast<size_t>(to)], lane, h, data, this, token);
}

void Remote::sent(uint64_t token) {
  const auto found = leaving_.find(token);
  if (found == leaving_.end()) return;
  moved_at_s_ = monotonic_s();
  const auto left = std::move(found->second);
  leaving_.erase(found);
  if (left) left();
}

void Remote::open(int to) {
  net_->send_copy(job_ranks_[static_cast<size_t>(to)], 0, header(RemoteKind::kOpen), nullptr);
}

void Remote::when_opened(int from, std::function<void()> then) {
  if (has_opened(from)) return then();
  blocked_.emplace(from, std::move(then));
}

void Remote::expect(const Key& key, std::byte* landing, size_t n_bytes, Then then) {
  const auto found = kept_.find(key);
  if (found == kept_.end()) {
    expected_[key] = {landing, n_bytes, std::move(then)};
    return;
  }
  const Kept kept = std::move(found->second);
  kept_.erase(found);
  if (!agrees(key.from, kept.header)) return;
  if (kept.header.n_bytes != n_bytes) return take(key.from, kept.header, kept.own.get());  // says so
  if (landing != nullptr && n_bytes > 0) std::memcpy(landing, kept.own.get(), n_bytes);
  then(landing != nullptr ? landing : kept.own.get());
}

bool Remote::agrees(int from, const MessageHeader& h) {
  if (h.signature == sig_.packed() && h.count == sig_.count && h.extra == sig_.extra) return true;
  if (verdict_.ok()) {
    verdict_ = Status::error(
        Code::kMismatch, format("%s #%u: ranks made different calls: rank %d called %s; rank %d called %s",
                                call_kind_name(sig_.kind), call_, rank_, sig_.text().c_str(), from,
                                Signature::unpack(h.signature, h.count, h.extra).text().c_str()));
  }
  return false;
}

std::byte* Remote::landing(int peer, const MessageHeader& h) {
  const int from = rank_of(peer);
  if (from < 0 || h.kind != static_cast<uint8_t>(RemoteKind::kData)) return nullptr;
  const auto found = expected_.find({h.call, h.run, h.part, h.flags, from});
  if (found == expected_.end() || found->second.n_bytes != h.n_bytes) return nullptr;
  if (!agrees(from, h)) return nullptr;
  return found->second.landing;
}

void Remote::take(int from, const MessageHeader& h, const std::byte* data) {
  const Key key{h.call, h.run, h.part, h.flags, from};
  const auto found = expected_.find(key);
  if (!agrees(from, h)) return;
  moved_at_s_ = monotonic_s();
  if (found != expected_.end() && found->second.n_bytes == h.n_bytes) {
    const Expected e = std::move(found->second);
    expected_.erase(found);
    // Of another message of this key, or before the receive was there, it has not landed.
    if (e.landing != nullptr && data != e.landing && h.n_bytes > 0) std::memcpy(e.landing, data, h.n_bytes);
    e.then(e.landing != nullptr ? e.landing : data);
    return;
  }
  if (verdict_.ok()) {
    verdict_ = Status::error(
        Code::kMismatch,
        format("%s #%u: rank %d sent %llu bytes where rank %d expected another number: the "
               "sizes that they gave differ",
               call_kind_name(sig_.kind), call_, from, static_cast<unsigned long long>(h.n_bytes), rank_));
  }
}

void Remote::differ(int from, uint64_t theirs, uint64_t ours) {
  if (!verdict_.ok()) return;
  verdict_ = Status::error(
      Code::kMismatch, format("%s #%u: rank %d sends %llu elements to rank %d, which expects %llu",
                              call_kind_name(sig_.kind), call_, from, static_cast<unsigned long long>(theirs),
                              rank_, static_cast<unsigned long long>(ours)));
}

void Remote::arrived(int peer, const MessageHeader& h, std::byte* data, std::unique_ptr<std::byte[]> own) {
  const int from = rank_of(peer);
  if (from < 0 || h.kind > static_cast<uint8_t>(RemoteKind::kFail)) return;
  const bool old = h.call < call_ || (h.call == call_ && !active_);
  switch (static_cast<RemoteKind>(h.kind)) {
    case RemoteKind::kData: {
      if (old) return;
      const Key key{h.call, h.run, h.part, h.flags, from};
      if (h.call == call_ && expected_.contains(key)) return take(from, h, data);
      if (own == nullptr && h.n_bytes > 0) {  // its receive was taken back
        return;
      }
      kept_[key] = {h, std::move(own)};
      return;
    }
    case RemoteKind::kOpen: {
      if (old) return;
      opened_.insert({h.call, from});
      if (h.call != call_ || !agrees(from, h)) return;
      auto [first, last] = blocked_.equal_range(from);
      std::vector<std::function<void()>> ready;
      for (auto it = first; it != last; ++it) ready.push_back(std::move(it->second));
      blocked_.erase(first, last);
      for (const auto& then : ready) then();
      return;
    }
    case RemoteKind::kRefuse:
      if (!old) refused_[h.call] = {from, std::string(reinterpret_cast<const char*>(data), h.n_bytes)};
      return;
    case RemoteKind::kFail:
      if (h.n_bytes < 1) return;
      told_ = true;  // whoever said so tells the others
      group_.fail(Status::error(static_cast<Code>(data[0]),
                                std::string(reinterpret_cast<const char*>(data) + 1, h.n_bytes - 1)));
      return;
  }
}

// ---- what goes wrong -------------------------------------------------------------------------------------

void Remote::lost(int peer, const Status& why) {
  const int q = rank_of(peer);
  if (q >= 0) gone_[q] = why.message();
}

void Remote::tick() {
  if (group_.failed() && !told_) tell_failure(group_.failure());
}

int Remote::awaited() const {
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
  const auto hopeless = [&](int q) { return gone_.contains(q); };
  for (const auto& [q, then] : blocked_) {
    if (hopeless(q)) return Status::error(Code::kPeerLost, gone_.at(q));
  }
  for (const auto& [key, e] : expected_) {
    if (hopeless(key.from)) return Status::error(Code::kPeerLost, gone_.at(key.from));
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
    PYCOMM_RETURN_IF_ERROR(remote_.group_.trouble(-1, here_, ""));
    const auto lock = remote_.net_->lock();
    if (monotonic_s() < std::max(started_s_, remote_.moved_at_s_) + timeout_s_) return Status();
    const int q = remote_.awaited();
    return Status::error(Code::kTimeout,
                         format("%s: waited %.1f s for %s (timeout %.1f s; is it slow, stopped, or did it "
                                "skip this call?)",
                                here_.c_str(), timeout_s_,
                                q < 0 ? "what was sent to leave" : remote_.name(q).c_str(), timeout_s_));
  }

 private:
  Remote& remote_;
  CallerHooks* hooks_;
  double started_s_, timeout_s_;
  const std::string& here_;
};

Status Remote::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, CallerHooks* hooks,
                    double timeout_s, const std::string& here) {
  Waiting waiting(*this, hooks, timeout_s, here);
  Status found;
  PYCOMM_RETURN_IF_ERROR(net_->wait(
      lock,
      [&] {
        if (done()) return true;
        found = trouble();
        return !found.ok();
      },
      waiting));
  return done() ? Status() : std::move(found);
}

void Remote::refuse(uint32_t call, const std::string& why) {
  MessageHeader h = header(RemoteKind::kRefuse);
  h.call = call;
  h.n_bytes = utf8_prefix(why, 1000);
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (job_ranks_[q] != net_->rank()) net_->send_copy(job_ranks_[q], 0, h, why.data());
  }
}

void Remote::tell_failure(const Status& status) {
  if (told_ || status.ok()) return;
  told_ = true;
  const std::string text = static_cast<char>(status.code()) + status.message().substr(0, 4000);
  MessageHeader h = header(RemoteKind::kFail);
  h.n_bytes = text.size();
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (job_ranks_[q] != net_->rank()) net_->send_copy(job_ranks_[q], 0, h, text.data());
  }
}

}  // namespace pycomm
