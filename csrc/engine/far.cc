#include "engine/far.h"

#include <algorithm>

#include "engine/p2p.h"

namespace pycomm {

Far::Far(PointToPoint& p2p, std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks)
    : p2p_(p2p),
      net_(std::move(net)),
      id_(id),
      job_ranks_(std::move(job_ranks)),
      to_come_(job_ranks_.size()),
      greeted_(job_ranks_.size()) {
  for (size_t q = 0; q < job_ranks_.size(); q++) ranks_[job_ranks_[q]] = static_cast<int>(q);
  const auto lock = net_->lock();
  net_->attach(id_, this);
}

Far::~Far() { leave(""); }

void Far::leave(const std::string& why) {
  if (net_->forked()) return;
  const auto lock = net_->lock();
  net_->detach(id_, why);
}

void Far::greet(int q) {
  const auto lock = net_->lock();
  for (size_t i = 0; i < job_ranks_.size(); i++) {
    const bool meant = q < 0 || static_cast<size_t>(q) == i;
    if (!meant || greeted_[i] || !p2p_.is_far(static_cast<int>(i))) continue;
    greeted_[i] = true;
    MessageHeader h;
    h.group = id_;
    h.flags = kGreeting;
    net_->send_copy(job_ranks_[i], 0, h, nullptr);
  }
}

std::string Far::ask(int q) {
  const auto lock = net_->lock();
  const int peer = job_ranks_[static_cast<size_t>(q)];
  const uint64_t group = id_ & ~uint64_t{1};  // the collectives' (engine/remote.h), which answers
  net_->ask(peer, group, 0);
  return net_->state(peer, group);
}

void Far::send(Message message, DType dtype, const std::byte* data, size_t n_bytes) {
  const auto net_lock = net_->lock();
  const int peer = job_ranks_[static_cast<size_t>(message.peer)];
  message.n_left = std::max<size_t>(1, (n_bytes + kPieceBytes - 1) / kPieceBytes);
  MessageHeader h;
  h.group = id_;
  h.part = static_cast<uint32_t>(message.tag);
  h.count = n_bytes;
  h.extra = static_cast<uint32_t>(dtype);
  const size_t n_pieces = message.n_left;
  uint64_t token = 0;
  {
    std::lock_guard lock(p2p_.mutex_);
    if (!p2p_.begin_far(*message.work)) return;
    token = next_token_++;
    messages_.emplace(token, std::move(message));
  }
  for (size_t i = 0; i < n_pieces; i++) {
    const size_t at = i * kPieceBytes;
    h.flags = i == 0 ? 1 : 0;
    h.n_bytes = std::min(kPieceBytes, n_bytes - at);
    net_->send_copy(peer, 0, h, data + at, this, token);
  }
}

void Far::sent(uint64_t token) {
  std::lock_guard lock(p2p_.mutex_);
  const auto found = messages_.find(token);
  if (found == messages_.end() || --found->second.n_left > 0) return;
  const auto work = found->second.work;
  messages_.erase(found);
  p2p_.end_far(*work);
}

// Whether this piece continues the message that is coming from that rank, or begins one where none is. The
// mailbox believes it. (Ranks of this host come through their pipes, into the same mailbox.)
bool Far::fits(size_t from, const MessageHeader& h) const {
  if (!p2p_.is_far(static_cast<int>(from)) || h.flags > 1) return false;
  if (h.extra >= static_cast<uint32_t>(kNumDTypes) || h.count > kMaxMessageBytes) return false;
  if (h.flags == 1) return to_come_[from] == 0 && h.n_bytes <= h.count && (h.n_bytes > 0 || h.count == 0);
  return h.n_bytes > 0 && h.n_bytes <= to_come_[from];
}

void Far::arrived(int peer, const MessageHeader& h, std::byte* data, std::unique_ptr<std::byte[]>) {
  const auto found = ranks_.find(peer);
  if (found == ranks_.end() || h.flags == kGreeting) return;
  const auto from = static_cast<size_t>(found->second);
  if (!fits(from, h)) return p2p_.fail_far(found->second, h.n_bytes, to_come_[from]);
  if (h.flags == 1) to_come_[from] = h.count;
  to_come_[from] -= h.n_bytes;
  const CellHeader cell{h.count, static_cast<uint32_t>(h.n_bytes), static_cast<int32_t>(h.part), h.extra,
                        static_cast<uint32_t>(h.flags == 1)};
  p2p_.add_far(found->second, cell, data);
}

void Far::lost(int peer, const Status& why) {
  const auto found = ranks_.find(peer);
  if (found == ranks_.end()) return;
  std::lock_guard lock(p2p_.mutex_);
  gone_.emplace(found->second, why.message());
}

void Far::left(int peer, const std::string& why) {
  const auto found = ranks_.find(peer);
  if (found == ranks_.end()) return;
  std::lock_guard lock(p2p_.mutex_);
  gone_.emplace(found->second,
                name(found->second) + " closed its communicator" + (why.empty() ? "" : ": " + why));
}

const std::string* Far::gone(int q) const {
  const auto found = gone_.find(q);
  return found == gone_.end() ? nullptr : &found->second;
}

void Far::fail_all(const Status& status) {
  for (auto& [token, m] : messages_) m.work->finish(status.clone());
  messages_.clear();
}

}  // namespace pycomm
