#include "transport/tcp/channel.h"

#include <limits.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "transport/tcp/address.h"
#include "transport/tcp/records.h"

namespace pycomm {

static_assert(Channel::kMaxRecord == kMaxText);

namespace {
std::string route_of(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t n_here = sizeof here, n_there = sizeof there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &n_here) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&there), &n_there) != 0)
    return "";
  return format(", %s to %s", Address::from_sockaddr(reinterpret_cast<sockaddr*>(&here)).to_string().c_str(),
                Address::from_sockaddr(reinterpret_cast<sockaddr*>(&there)).to_string().c_str());
}

bool is_loss(int err) {
  switch (err) {
    case ECONNRESET:
    case EPIPE:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ECONNABORTED: return true;
    default: return false;
  }
}
}  // namespace

Status Channel::open(int fd, Session session, std::unique_ptr<Channel>* out) {
  std::unique_ptr<Channel> channel(new Channel);
  channel->fd_ = fd;
  channel->peer_ = session.peer;
  channel->route_ = route_of(fd);
  if (session.cipher != Session::Cipher::kNone) {
    channel->writer_ =
        std::make_unique<RecordWriter>(session.cipher, session.send_key, session.n_records_per_key);
    channel->reader_ =
        std::make_unique<RecordReader>(session.cipher, session.receive_key, session.n_records_per_key);
  }
  *out = std::move(channel);
  return Status();
}

Channel::~Channel() { ::close(fd_); }

void Channel::cut_off() {
  const linger none{1, 0};
  (void)setsockopt(fd_, SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

Status Channel::lost(const char* doing, int err) const {
  const char* why = err == 0 ? "it closed the connection"
                    : err == ETIMEDOUT
                        ? "its host has answered nothing for longer than PYCOMM_HEARTBEAT_TIMEOUT"
                        : std::strerror(err);
  if (err == 0 || is_loss(err)) {
    return Status::error(Code::kPeerLost,
                         format("lost %s while %s: %s%s", peer_.c_str(), doing, why, route_.c_str()));
  }
  return Status::error(Code::kSystem,
                       format("%s %s failed: %s%s", doing, peer_.c_str(), why, route_.c_str()));
}

Status Channel::send_some(const iovec* parts, int n_parts, int flags, size_t* n) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(std::min(n_parts, IOV_MAX));
  *n = 0;
  ssize_t rc;
  do {
    rc = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
  } while (rc < 0 && errno == EINTR);
  if (rc < 0) {
    if (errno == EAGAIN || (errno == ENOBUFS && (flags & MSG_ZEROCOPY) != 0)) return Status();
    write_failure_ = lost("sending to it", errno);
    return write_failure_.clone();
  }
  *n = static_cast<size_t>(rc);
  n_sent_.fetch_add(*n, std::memory_order_relaxed);
  return Status();
}

Status Channel::receive_some(const iovec* parts, int n_parts, size_t* n) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(std::min(n_parts, IOV_MAX));
  *n = 0;
  ssize_t rc;
  do {
    rc = recvmsg(fd_, &message, MSG_DONTWAIT);
  } while (rc < 0 && errno == EINTR);
  if (rc < 0 && errno == EAGAIN) return Status();
  if (rc <= 0) {
    read_failure_ = lost("receiving from it", rc == 0 ? 0 : errno);
    return read_failure_.clone();
  }
  *n = static_cast<size_t>(rc);
  n_received_.fetch_add(*n, std::memory_order_relaxed);
  return Status();
}

Status Channel::write(const iovec* parts, int n_parts, size_t* n_written) {
  *n_written = 0;
  if (!write_failure_.ok()) [[unlikely]]
    return write_failure_.clone();
  Status status =
      writer_ == nullptr ? send_some(parts, n_parts, 0, n_written) : write_records(parts, n_parts, n_written);
  n_written_.fetch_add(*n_written, std::memory_order_relaxed);
  return status;
}

Status Channel::write_plain(const iovec* parts, int n_parts, int flags, size_t* n_written, bool* begun) {
  *n_written = 0;
  *begun = false;
  if (!write_failure_.ok()) [[unlikely]]
    return write_failure_.clone();
  PYCOMM_RETURN_IF_ERROR(send_some(parts, n_parts, flags, n_written));
  if ((flags & MSG_ZEROCOPY) != 0) {
    *begun = *n_written > 0;
    if (*begun)
      zero_copy_.began();
    else  // full, or no pages can be pinned: only a copy tells which
      PYCOMM_RETURN_IF_ERROR(send_some(parts, n_parts, 0, n_written));
  }
  n_written_.fetch_add(*n_written, std::memory_order_relaxed);
  return Status();
}

Status Channel::read(const iovec* parts, int n_parts, size_t* n_read) {
  *n_read = 0;
  if (!read_failure_.ok()) [[unlikely]]
    return read_failure_.clone();
  // An empty read must not look like the end of the stream.
  if (std::all_of(parts, parts + n_parts, [](const iovec& part) { return part.iov_len == 0; }))
    return Status();
  Status status =
      reader_ == nullptr ? receive_some(parts, n_parts, n_read) : read_records(parts, n_parts, n_read);
  n_read_.fetch_add(*n_read, std::memory_order_relaxed);
  return status;
}

Status Channel::read(void* to, size_t n_bytes, size_t* n_read) {
  const iovec part{to, n_bytes};
  return read(&part, 1, n_read);
}

Status Channel::flush() {
  if (writer_ == nullptr) return Status();
  if (!write_failure_.ok()) return write_failure_.clone();
  while (!writer_->pending().empty()) {
    const std::span<const uint8_t> pending = writer_->pending();
    const iovec part{const_cast<uint8_t*>(pending.data()), pending.size()};
    size_t n = 0;
    PYCOMM_RETURN_IF_ERROR(send_some(&part, 1, 0, &n));
    if (n == 0) break;
    writer_->sent(n);
  }
  return Status();
}

bool Channel::unsent() const { return writer_ != nullptr && !writer_->pending().empty(); }

bool Channel::has_buffered() const { return reader_ != nullptr && reader_->has_some(); }

Status Channel::write_records(const iovec* parts, int n_parts, size_t* n_written) {
  PYCOMM_RETURN_IF_ERROR(flush());
  size_t skip = 0;  // of parts[0]
  while (n_parts > 0 && !unsent()) {
    iovec first = parts[0];
    first.iov_base = static_cast<uint8_t*>(first.iov_base) + skip;
    first.iov_len -= skip;
    if (first.iov_len == 0) {
      parts++, n_parts--, skip = 0;
      continue;
    }
    // Small parts share a record; the first 16 that are left suffice for one.
    std::array<iovec, 16> next;
    const int n_next = std::min<int>(n_parts, static_cast<int>(next.size()));
    std::copy_n(parts, n_next, next.begin());
    next[0] = first;
    const size_t n = writer_->put(next.data(), n_next);
    *n_written += n;
    skip += n;
    while (n_parts > 0 && skip >= parts[0].iov_len) {
      skip -= parts[0].iov_len;
      parts++, n_parts--;
    }
    PYCOMM_RETURN_IF_ERROR(flush());
  }
  return Status();
}

// What was read before a failure is delivered; the next call tells the failure.
Status Channel::read_records(const iovec* parts, int n_parts, size_t* n_read) {
  size_t skip = 0;  // of parts[0]
  while (n_parts > 0) {
    if (skip == parts[0].iov_len) {
      parts++, n_parts--, skip = 0;
      continue;
    }
    size_t n = 0;
    const bool intact =
        reader_->take(static_cast<uint8_t*>(parts[0].iov_base) + skip, parts[0].iov_len - skip, &n);
    *n_read += n;
    skip += n;
    if (!intact) {
      read_failure_ = Status::error(
          Code::kPeerLost,
          format("lost %s: what came is not what it sent, an encrypted record was broken on the "
                 "way%s",
                 peer_.c_str(), route_.c_str()));
      break;
    }
    if (skip == parts[0].iov_len) continue;
    const std::span<uint8_t> room = reader_->room();
    const iovec part{room.data(), room.size()};
    if (!receive_some(&part, 1, &n).ok() || n == 0) break;
    reader_->added(n);
  }
  return *n_read > 0 ? Status() : read_failure_.clone();
}

}  // namespace pycomm
