#include "transport/tcp/sender.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace pycomm {

namespace {
constexpr int kMaxParts = 32;
// The limit of a stuffed connection is set a little late, and what it counts from may be a little older.
constexpr double kSlackS = 2;
// A process that does not greet may be stopped. Whether its host is there, the heartbeat shows.
constexpr int64_t kNever = INT64_MAX;
}  // namespace

Status Sender::open(const Secret& secret, Route route) {
  route_ = std::move(route);
  secret_ = &secret;
  const int64_t deadline_ns = now_ns() + static_cast<int64_t>(route_.connect_timeout_s * 1e9);
  PYCOMM_RETURN_IF_ERROR(Connector::start(route_.from, route_.to, route_.who, deadline_ns, &connector_));
  fd_ = connector_->fd();
  began_s_ = clock_s();
  stuffed_since_s_ = 0;
  set_heartbeat(fd_, route_.heartbeat_s);
  return Status();
}

Status Sender::greet() {
  if (connector_ != nullptr) {
    bool connected = false;
    PYCOMM_RETURN_IF_ERROR(connector_->step(&connected));
    if (!connected) return Status();
    Handshake handshake;
    PYCOMM_RETURN_IF_ERROR(Handshake::initiate(
        *secret_, route_.terms, route_.who + " at " + route_.to.to_string(), kNever, &handshake));
    fd_ = connector_->release();
    connector_.reset();
    greeting_.emplace(std::move(handshake));
  }
  bool wants_write = false;
  Status s = drive(&*greeting_, fd_, &wants_write);
  if (!s.ok()) {
    ::close(fd_);
    fd_ = -1;
    greeting_.reset();
    return s;
  }
  if (!greeting_->done()) return Status();
  s = Channel::open(fd_, greeting_->take_session(), &channel_);
  greeting_.reset();
  if (s.ok() && !channel_->encrypted()) channel_->zero_copy().enable(fd_, route_.zero_copy);
  return s;
}

bool Sender::goes_without_copy(const Outgoing& m) const {
  return m.header.n_bytes >= ZeroCopy::kMinBytes && channel_->zero_copy().worthwhile();
}

// The first message has left, as far as the queue is concerned.
void Sender::finish_first() {
  Outgoing m = std::move(queue_.front());
  queue_.pop_front();
  done_ -= sizeof(MessageHeader) + m.header.n_bytes;
  const bool without_copy = std::exchange(without_copy_, false);
  // (Its beginning may have been acknowledged before its end went as a copy: then nothing is pending.)
  if (without_copy && channel_->zero_copy().pending()) {
    unacknowledged_.push_back({std::move(m), channel_->zero_copy().n_begun()});
  } else if (m.sink != nullptr) {
    m.sink->sent(m.token);  // last: it may send more, and so come back here
  }
}

// Its header, which moves within the queue, as a copy, its payload without one.
Status Sender::write_large(bool* blocked) {
  const Outgoing& m = queue_.front();
  size_t written = 0;
  bool begun = false;
  if (done_ < sizeof m.header) {
    const iovec header{reinterpret_cast<std::byte*>(const_cast<MessageHeader*>(&m.header)) + done_,
                       sizeof m.header - done_};
    PYCOMM_RETURN_IF_ERROR(channel_->write_plain(&header, 1, MSG_MORE, &written, &begun));
    done_ += written;
    *blocked = written < header.iov_len;
    if (*blocked) return Status();
  }
  const size_t at = done_ - sizeof m.header;
  const iovec rest{const_cast<std::byte*>(m.data) + at, m.header.n_bytes - at};
  PYCOMM_RETURN_IF_ERROR(channel_->write_plain(&rest, 1, MSG_ZEROCOPY, &written, &begun));
  without_copy_ = without_copy_ || begun;
  done_ += written;
  *blocked = written < rest.iov_len;
  if (!*blocked) finish_first();
  return Status();
}

// Tells whose memory is free again.
void Sender::reap() {
  ZeroCopy& z = channel_->zero_copy();
  if (!z.pending()) return;
  z.reap();
  while (!unacknowledged_.empty() &&
         static_cast<int32_t>(unacknowledged_.front().n_begun - z.n_done()) <= 0) {
    const Outgoing m = std::move(unacknowledged_.front().message);
    unacknowledged_.pop_front();
    if (m.sink != nullptr) m.sink->sent(m.token);
  }
}

Link Sender::look(double now_s) {
  Link link;
  if (connector_ != nullptr) link.silent_s = now_s - began_s_;
  if (connector_ != nullptr || fd_ < 0) return link;
  link = look_at_link(fd_);
  if (link.stuffed) {
    if (stuffed_since_s_ == 0) stuffed_since_s_ = now_s;
    set_limit(fd_, now_s - link.heard_s - stuffed_since_s_ + route_.heartbeat_s + kSlackS);
  } else if (stuffed_since_s_ > 0) {
    stuffed_since_s_ = 0;
    set_limit(fd_, route_.heartbeat_s);
  }
  return link;
}

// Gathers the messages at the head of the queue into one system call.
Status Sender::write_some(bool* blocked) {
  if (goes_without_copy(queue_.front())) return write_large(blocked);
  iovec parts[kMaxParts];
  int n = 0;
  size_t skip = done_, want = 0;
  const auto add = [&](const void* data, size_t n_bytes) {
    if (skip >= n_bytes) {
      skip -= n_bytes;
      return;
    }
    parts[n++] = {static_cast<std::byte*>(const_cast<void*>(data)) + skip, n_bytes - skip};
    want += n_bytes - skip;
    skip = 0;
  };
  for (const Outgoing& m : queue_) {
    if (n + 2 > kMaxParts || goes_without_copy(m)) break;
    add(&m.header, sizeof m.header);
    add(m.data, m.header.n_bytes);
  }
  size_t written = 0;
  PYCOMM_RETURN_IF_ERROR(channel_->write(parts, n, &written));
  *blocked = written < want;
  done_ += written;
  while (!queue_.empty() && done_ >= sizeof(MessageHeader) + queue_.front().header.n_bytes) {
    finish_first();
  }
  return Status();
}

Status Sender::pump() {
  if (channel_ == nullptr) {
    PYCOMM_RETURN_IF_ERROR(greet());
    if (channel_ == nullptr) return Status();
  }
  reap();
  if (channel_ == nullptr) return Status();  // a sink sent more in there, and the connection was broken
  bool blocked = false;
  if (channel_->unsent()) {
    PYCOMM_RETURN_IF_ERROR(channel_->flush());
    blocked = channel_->unsent();
  }
  while (!blocked && !queue_.empty()) PYCOMM_RETURN_IF_ERROR(write_some(&blocked));
  return Status();
}

Status Sender::ended() {
  std::byte none;
  size_t n = 0;
  return channel_->read(&none, 1, &n);
}

uint32_t Sender::forget(const Sink* sink) {
  uint32_t n_dropped = 0;
  for (Unacknowledged& u : unacknowledged_) {
    if (u.message.sink == sink) u.message.sink = nullptr;
  }
  for (size_t i = 0; i < queue_.size(); i++) {
    Outgoing& m = queue_[i];
    if (m.sink != sink) continue;
    m.sink = nullptr;
    const bool begun = i == 0 && done_ > 0;
    if (!begun) {
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i--));
      n_dropped++;
    } else if (m.own == nullptr && m.header.n_bytes > 0) {
      m.own = std::make_unique<std::byte[]>(m.header.n_bytes);
      std::memcpy(m.own.get(), m.data, m.header.n_bytes);
      m.data = m.own.get();
    }
  }
  return n_dropped;
}

std::deque<Outgoing> Sender::abandon() {
  if (channel_ != nullptr && channel_->zero_copy().pending()) channel_->cut_off();
  const std::deque<Unacknowledged> over = std::exchange(unacknowledged_, {});
  std::deque<Outgoing> rest = let_go();
  for (const Unacknowledged& u : over) {
    if (u.message.sink != nullptr) u.message.sink->sent(u.message.token);
  }
  return rest;
}

std::deque<Outgoing> Sender::let_go() {
  if (greeting_) ::close(fd_);
  greeting_.reset();
  connector_.reset();
  channel_.reset();
  fd_ = -1;
  done_ = 0;
  without_copy_ = false;
  unacknowledged_.clear();
  return std::move(queue_);
}

}  // namespace pycomm
