#include "transport/tcp/receiver.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace pycomm {

namespace {
constexpr size_t kBufferBytes = size_t{64} << 10;
constexpr size_t kLargeBytes = size_t{16} << 10;
constexpr size_t kTurnBytes = size_t{4} << 20;
}  // namespace

Receiver::Receiver(int fd, Address from, Handshake greeting)
    : fd_(fd), from_(from), greeting_(std::move(greeting)) {}

Receiver::~Receiver() {
  if (channel_ == nullptr && fd_ >= 0) ::close(fd_);
}

Status Receiver::greet(const Admit& admit) {
  bool wants_write = false;
  PYCOMM_RETURN_IF_ERROR(drive(&greeting_, fd_, &wants_write));
  if (!greeting_.done()) return Status();
  const int peer = static_cast<int>(greeting_.peer().from_rank);
  lane_ = greeting_.peer().channel;
  Status admitted = admit(*this, peer, lane_);
  refused_ = !admitted.ok();
  PYCOMM_RETURN_IF_ERROR(std::move(admitted));
  const int fd = fd_;
  PYCOMM_RETURN_IF_ERROR(Channel::open(fd, greeting_.take_session(), &channel_));
  peer_ = peer;
  buffer_.resize(kBufferBytes);
  return Status();
}

Status Receiver::begin_payload(const Find& find) {
  if (header_.magic != kMessageMagic || header_.n_bytes > kMaxPayload) {
    return Status::error(Code::kPeerLost,
                         channel_->peer() + " sent something that is not a message of pycomm's");
  }
  got_ = 0;
  own_.reset();
  sink_ = find(peer_, header_);
  to_ = sink_ != nullptr ? sink_->landing(peer_, header_) : nullptr;
  if (to_ != nullptr || header_.n_bytes == 0) return Status();
  own_.reset(new (std::nothrow) std::byte[header_.n_bytes]);
  to_ = own_.get();
  if (to_ == nullptr)
    return Status::error(Code::kSystem,
                         "no memory for a message of " + channel_->peer() + " that nobody waits for yet");
  return Status();
}

void Receiver::end_payload() {
  have_header_ = false;
  if (sink_ != nullptr) sink_->arrived(peer_, header_, to_, std::move(own_));
  own_.reset();
  sink_ = nullptr;
}

// Takes whole messages, and the beginning of one, from the buffer.
Status Receiver::parse(const Find& find) {
  while (filled_ > begin_ || have_header_) {
    if (!have_header_) {
      if (filled_ - begin_ < sizeof header_) break;
      std::memcpy(&header_, buffer_.data() + begin_, sizeof header_);
      begin_ += sizeof header_;
      PYCOMM_RETURN_IF_ERROR(begin_payload(find));
      have_header_ = true;
    }
    const size_t n = std::min<size_t>(header_.n_bytes - got_, filled_ - begin_);
    if (n > 0) std::memcpy(to_ + got_, buffer_.data() + begin_, n);
    got_ += n;
    begin_ += n;
    if (got_ < header_.n_bytes) break;
    end_payload();
  }
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, filled_ - begin_);
    filled_ -= begin_;
    begin_ = 0;
  }
  return Status();
}

Status Receiver::pump(const Admit& admit, const Find& find, bool* more) {
  *more = false;
  if (channel_ == nullptr) {
    PYCOMM_RETURN_IF_ERROR(greet(admit));
    if (channel_ == nullptr) return Status();
  }
  for (size_t turn = 0; turn < kTurnBytes;) {
    size_t n = 0;
    // The payload's rest first, then what follows into the buffer, in one system call: behind a large payload
    // only the next header, whose payload shall not be copied either.
    const size_t left = have_header_ ? header_.n_bytes - got_ : 0;
    const size_t room = left > kLargeBytes ? sizeof header_ : buffer_.size();
    const iovec parts[2] = {{to_ + got_, left}, {buffer_.data() + filled_, room - filled_}};
    const int first = left > 0 ? 0 : 1;
    PYCOMM_RETURN_IF_ERROR(channel_->read(parts + first, 2 - first, &n));
    if (n == 0) return Status();
    turn += n;
    const size_t direct = std::min(n, left);
    got_ += direct;
    filled_ += n - direct;
    if (have_header_ && got_ == header_.n_bytes) end_payload();
    PYCOMM_RETURN_IF_ERROR(parse(find));
  }
  *more = true;
  return Status();
}

void Receiver::forget(const Sink* sink) {
  if (!have_header_ || sink_ != sink) return;
  sink_ = nullptr;
  if (own_ != nullptr || header_.n_bytes == 0) return;
  own_.reset(new std::byte[header_.n_bytes]);  // bounded by kMaxPayload
  to_ = own_.get();
}

}  // namespace pycomm
