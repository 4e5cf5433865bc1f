#include "engine/remote.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"

namespace pycomm {

namespace {
// As a peer said it; what cannot have been a failure's is kClosed (an interrupt is the other process's own).
Code failure_code(std::byte said) {
  switch (static_cast<Code>(said)) {
    case Code::kValue:
    case Code::kType:
    case Code::kSchedule:
    case Code::kRefused:
    case Code::kMismatch:
    case Code::kPeerLost:
    case Code::kTimeout:
    case Code::kClosed:
    case Code::kSystem: return static_cast<Code>(said);
    case Code::kOk:
    case Code::kInterrupt: break;
  }
  return Code::kClosed;
}
}  // namespace

Remote::Remote(std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks, int rank, Group& group)
    : net_(std::move(net)), id_(id), job_ranks_(std::move(job_ranks)), rank_(rank), group_(group) {
  for (size_t q = 0; q < job_ranks_.size(); q++) ranks_[job_ranks_[q]] = static_cast<int>(q);
  greeted_.resize(job_ranks_.size());
  probed_.resize(job_ranks_.size());
  entered_.resize(job_ranks_.size());
  is_here_.resize(job_ranks_.size());
  for (int i = 0; i < group_.size(); i++) is_here_[static_cast<size_t>(group_.name(i))] = true;
  const auto lock = net_->lock();
  net_->attach(id_, this);
}

Remote::~Remote() { leave(""); }

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
  began_at_s_ = monotonic_s();
  history_[call % history_.size()] = sig;
  std::erase_if(not_well_, [&](uint32_t c) { return call - c >= history_.size(); });
  probed_.assign(probed_.size(), false);
  std::erase_if(opened_, [&](const auto& o) { return o.first.first < call; });
  std::erase_if(refused_, [&](const auto& r) { return r.first < call; });
  entered_.assign(entered_.size(), false);
  for (const auto* said : {&opened_, &probes_}) {
    for (auto it = said->lower_bound({call, 0}); it != said->end() && it->first.first == call; ++it) {
      entered_[static_cast<size_t>(it->first.second)] = true;
      if (agrees(it->first.second, it->second) && said == &probes_) answer(it->first.second);
    }
  }
  probes_.erase(probes_.begin(), probes_.lower_bound({call + 1, 0}));
  for (auto it = ahead_.begin(); it != ahead_.end() && it->first <= call; it = ahead_.erase(it))
    n_ahead_bytes_ -= it->second;
}

void Remote::end(bool well) {
  if (!active_) return;
  active_ = false;
  if (!expected_.empty() || !leaving_.empty()) net_->forget(this);
  expected_.clear();
  blocked_.clear();
  leaving_.clear();
  if (!well) not_well_.insert(call_);
  for (auto it = kept_.begin(); it != kept_.end() && it->first.call <= call_; it = kept_.erase(it))
    unwanted(it->first.from, it->second.header);
}

// A message of a call that is over. Where ranks make the same calls there is none, unless the call was
// refused. The rank that it is of must not be left to believe that all is well.
void Remote::unwanted(int from, const MessageHeader& h) {
  if (not_well_.contains(h.call) || group_.failed() || call_ - h.call >= history_.size()) return;
  const Signature& ours = history_[h.call % history_.size()];
  group_.fail(Status::error(Code::kMismatch,
                            format("%s #%u: ranks made different calls: rank %d called %s; rank %d called %s",
                                   call_kind_name(ours.kind), h.call, rank_, ours.text().c_str(), from,
                                   Signature::unpack(h.signature, h.count, h.extra).text().c_str())));
  tell_failure(group_.failure());
}

// What a peer called, against what we call, will call or have called.
void Remote::compare(int from, const MessageHeader& h) {
  if (h.call > call_) {
    if (may_keep(from, h)) probes_[{h.call, from}] = h;
  } else if (h.call == call_ && active_) {
    entered_[static_cast<size_t>(from)] = true;
    const bool asks = h.kind == static_cast<uint8_t>(RemoteKind::kGreet) && h.flags == kAsks;
    if (agrees(from, h) && asks) answer(from);
  } else if (call_ - h.call < history_.size()) {
    const Signature& ours = history_[h.call % history_.size()];
    if (h.signature != ours.packed() || h.count != ours.count || h.extra != ours.extra) unwanted(from, h);
  }
}

void Remote::probe() {
  if (!active_ || monotonic_s() - std::max(began_at_s_, moved_at_s_) < kProbeS) return;
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (probed_[q] || !needs(static_cast<int>(q))) continue;
    probed_[q] = true;
    MessageHeader h = header(RemoteKind::kGreet);
    h.flags = kAsks;
    net_->send_copy(job_ranks_[q], 0, h, nullptr);
  }
}

void Remote::answer(int to) {
  net_->send_copy(job_ranks_[static_cast<size_t>(to)], 0, header(RemoteKind::kGreet), nullptr);
}

bool Remote::all_needed_entered() const {
  for (size_t q = 0; q < job_ranks_.size(); q++) {
    if (needs(static_cast<int>(q)) && !entered_[q]) return false;
  }
  return true;
}

void Remote::greet(int to) {
  if (greeted_[static_cast<size_t>(to)]) return;
  greeted_[static_cast<size_t>(to)] = true;
  MessageHeader h = header(RemoteKind::kGreet);
  net_->send_copy(job_ranks_[static_cast<size_t>(to)], 0, h, nullptr);
}

// ---- messages --------------------------------------------------------------------------------------------

void Remote::send(int to, const Key& key, const std::byte* data, size_t n_bytes, std::function<void()> left,
                  int n_sockets) {
  MessageHeader h = header(RemoteKind::kData);
  h.part = key.tile;
  h.run = key.run;
  h.flags = static_cast<uint16_t>(key.index);
  h.n_bytes = n_bytes;
  const uint64_t token = next_token_++;
  leaving_[token] = {to, std::move(left)};
  const int n_lanes = n_sockets == 0 ? net_->n_lanes() : std::min(n_sockets, net_->n_lanes());
  const int lane = static_cast<int>(key.tile % static_cast<uint32_t>(n_lanes));
  net_->send(job_ranks_[static_cast<size_t>(to)], lane, h, data, this, token);
}

void Remote::sent(uint64_t token) {
  const auto found = leaving_.find(token);
  if (found == leaving_.end()) return;
  moved_at_s_ = monotonic_s();
  const auto then = std::move(found->second.then);
  leaving_.erase(found);
  if (then) then();
}

void Remote::open(int to) {
  net_->send_copy(job_ranks_[static_cast<size_t>(to)], 0, header(RemoteKind::kOpen), nullptr);
}

void Remote::when_opened(int from, std::function<void()> then) {
  if (has_opened(from)) return then();
  greet(from);
  blocked_.emplace(from, std::move(then));
}

void Remote::expect(const Key& key, std::byte* landing, size_t n_bytes, Then then) {
  const auto found = kept_.find(key);
  if (found == kept_.end()) {
    greet(key.from);
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
  if (!agrees(from, h) || found->second.is_landing) return nullptr;
  found->second.is_landing = found->second.landing != nullptr && h.n_bytes > 0;
  return found->second.landing;
}

void Remote::take(int from, const MessageHeader& h, const std::byte* data) {
  const Key key{h.call, h.run, h.part, h.flags, from};
  const auto found = expected_.find(key);
  if (!agrees(from, h)) return;
  moved_at_s_ = monotonic_s();
  if (found != expected_.end() && found->second.is_landing && data != found->second.landing) {
    // Were the receive to end with this one, the other would go on into memory that is not ours any more.
    verdict_ = Status::error(Code::kMismatch, format("%s #%u: rank %d sent one message twice",
                                                     call_kind_name(sig_.kind), call_, from));
    return;
  }
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

// Room for a message of a call that this rank has not made yet; without it the communicator fails.
bool Remote::may_keep(int from, const MessageHeader& h) {
  if (h.call <= call_) return true;  // what a call under way keeps ends with it
  if (group_.failed()) return false;
  constexpr size_t kEntry = 256;  // in a map, about
  const size_t n_bytes = kEntry + h.n_bytes;
  if (n_ahead_bytes_ + n_bytes > kMaxAheadBytes) {
    group_.fail(Status::error(
        Code::kSystem,
        format("%s is at call #%u and rank %d at #%u, which would have to keep more than %zu MiB "
               "of messages until then; do all ranks make the same calls?",
               name(from).c_str(), h.call, rank_, call_, kMaxAheadBytes >> 20)));
    tell_failure(group_.failure());
    return false;
  }
  ahead_[h.call] += n_bytes;
  n_ahead_bytes_ += n_bytes;
  return true;
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
  if (from < 0 || is_here_[static_cast<size_t>(from)] || h.kind > static_cast<uint8_t>(RemoteKind::kGreet))
    return;
  const bool old = h.call < call_ || (h.call == call_ && !active_);
  switch (static_cast<RemoteKind>(h.kind)) {
    case RemoteKind::kData: {
      if (old) return unwanted(from, h);
      const Key key{h.call, h.run, h.part, h.flags, from};
      if (h.call == call_ && expected_.contains(key)) return take(from, h, data);
      if (own == nullptr && h.n_bytes > 0) {  // its receive was taken back
        return;
      }
      if (may_keep(from, h)) kept_[key] = {h, std::move(own)};
      return;
    }
    case RemoteKind::kOpen: {
      if (old) return compare(from, h);
      if (!may_keep(from, h)) return;
      opened_[{h.call, from}] = h;
      if (h.call == call_) entered_[static_cast<size_t>(from)] = true;
      if (h.call != call_ || !agrees(from, h)) return;
      auto [first, last] = blocked_.equal_range(from);
      std::vector<std::function<void()>> ready;
      for (auto it = first; it != last; ++it) ready.push_back(std::move(it->second));
      blocked_.erase(first, last);
      for (const auto& then : ready) then();
      return;
    }
    case RemoteKind::kRefuse:
      if (old || !may_keep(from, h)) return;
      refused_[h.call] = {from, printable({reinterpret_cast<const char*>(data), h.n_bytes}, kMaxRefusal)};
      return;
    case RemoteKind::kFail:
      if (h.n_bytes < 1) return;
      if (!group_.failed()) told_ = heard_ = true;  // whoever said so tells the others
      group_.fail(Status::error(
          failure_code(data[0]),
          // A mismatch has both calls in it, and who sees it first is not to blame.
          (failure_code(data[0]) == Code::kMismatch ? "" : name(from) + " failed: ") +
              printable({reinterpret_cast<const char*>(data) + 1, h.n_bytes - 1}, kMaxFailure)));
      return;
    case RemoteKind::kGreet: return compare(from, h);
  }
}

}  // namespace pycomm
