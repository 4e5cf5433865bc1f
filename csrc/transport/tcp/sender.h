// A connection that this process opens to a peer, and the messages queued for it.
//
// Data flow one way only: each of two processes opens its own connections to the other, so there is never a
// question of who connects. The first message opens it. States: idle, connecting, greeting (the handshake),
// open, ended. Messages keep their order. Guarded by the Net's mutex.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "transport/tcp/channel.h"
#include "transport/tcp/connect.h"
#include "transport/tcp/link.h"
#include "transport/tcp/message.h"

namespace pycomm {

struct Outgoing {
  MessageHeader header;
  const std::byte* data = nullptr;
  Sink* sink = nullptr;  // told when it has left; null: nobody
  uint64_t token = 0;
  std::unique_ptr<std::byte[]> own;  // the payload, when nobody else keeps it
};

class Sender {
 public:
  struct Route {
    Address from, to;
    Terms terms;
    std::string who;
    double connect_timeout_s;
    ZeroCopy::Mode zero_copy = ZeroCopy::Mode::kOff;
    double heartbeat_s;
  };
  // Begins to connect. `fd()` is then to be watched for both directions.
  Status open(const Secret& secret, Route route);
  // About once a second: how the peer's host does. Silent is also one that does not answer a connect.
  Link look(double now_s);
  // Goes on: connects, greets, writes until the socket is full.
  Status pump();
  // Of an open connection: whether the peer has closed it. Nothing else ever comes on it.
  Status ended();
  void push(Outgoing message) { queue_.push_back(std::move(message)); }
  // Drops what is queued for this sink, and says how many messages; what has begun to leave is copied first.
  // (What has left without a copy the kernel may still read, to send it again; it keeps the pages itself.)
  uint32_t forget(const Sink* sink);
  // Ends the connection, and takes what has not left. Memory that the kernel was still to read is the owners'
  // again, and they are told: what they write there does not reach the peer.
  std::deque<Outgoing> abandon();
  // The same in a forked child, whose parent has the connection, too, and goes on with it.
  std::deque<Outgoing> let_go();

  bool idle() const { return connector_ == nullptr && channel_ == nullptr && !greeting_; }
  bool is_open() const { return channel_ != nullptr; }
  // Nothing of this process's memory is still to be read, neither here nor by the kernel.
  bool empty() const {
    return queue_.empty() && unacknowledged_.empty() && (channel_ == nullptr || !channel_->unsent());
  }
  bool queued() const { return !queue_.empty(); }
  bool acknowledged() const { return unacknowledged_.empty() && !without_copy_; }
  int fd() const { return fd_; }
  const Channel* channel() const { return channel_.get(); }

 private:
  Status greet();
  Status write_some(bool* blocked);
  Status write_large(bool* blocked);
  bool goes_without_copy(const Outgoing& message) const;
  void finish_first();
  void reap();

  int fd_ = -1;
  Route route_{};
  const Secret* secret_ = nullptr;
  double began_s_ = 0;
  double stuffed_since_s_ = 0;  // 0: it is not
  std::unique_ptr<Connector> connector_;
  std::optional<Handshake> greeting_;
  std::unique_ptr<Channel> channel_;
  std::deque<Outgoing> queue_;
  size_t done_ = 0;  // bytes of the first message that have left, header included
  // Messages that have left without a copy, and the number of the send that must be over for each.
  struct Unacknowledged {
    Outgoing message;
    uint32_t n_begun;
  };
  std::deque<Unacknowledged> unacknowledged_;
  bool without_copy_ = false;  // some of the first message
};

}  // namespace pycomm
