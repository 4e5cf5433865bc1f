// A connection that a peer has opened to this process, and the message that is coming in on it.
//
// Small messages are read many at a time into a buffer; the rest of a large payload goes straight to where
// its group wants it. Guarded by the Net's mutex.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "transport/tcp/channel.h"
#include "transport/tcp/listener.h"
#include "transport/tcp/message.h"

namespace pycomm {

class Receiver {
 public:
  uint64_t number = 0;  // the Net's

  // Finds the sink of a group; null: there is none (yet, or any more).
  using Find = std::function<Sink*(int peer, const MessageHeader&)>;

  // Whether a peer that has just proved itself may go on; else why not.
  using Admit = std::function<Status(const Receiver&, int peer, uint32_t lane)>;

  Receiver(int fd, Address from, Handshake greeting);
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // Greets, then reads until the socket is empty or kTurnBytes have come (*more). A message whose header is
  // not one of pycomm's ends the connection.
  Status pump(const Admit& admit, const Find& find, bool* more);
  // A message that is coming in for this sink goes nowhere from now on.
  void forget(const Sink* sink);

  int fd() const { return fd_; }
  int peer() const { return peer_; }  // -1 before it has been authenticated and admitted
  uint32_t lane() const { return lane_; }
  bool refused() const { return refused_; }                 // by `admit`
  const Terms& claims() const { return greeting_.peer(); }  // when authenticated
  std::string who() const { return greeting_.peer().who; }  // "host b, pid 811"; when authenticated
  const Address& from() const { return from_; }
  bool greeting() const { return channel_ == nullptr; }
  bool authenticated() const { return channel_ != nullptr || greeting_.authenticated(); }
  int64_t deadline_ns() const { return greeting_.deadline_ns(); }
  bool in_message() const { return have_header_ || filled_ > begin_; }

 private:
  Status greet(const Admit& admit);
  Status parse(const Find& find);
  Status begin_payload(const Find& find);
  void end_payload();

  int fd_;
  Address from_;
  Handshake greeting_;
  std::unique_ptr<Channel> channel_;
  int peer_ = -1;
  uint32_t lane_ = 0;
  bool refused_ = false;

  std::vector<std::byte> buffer_;
  size_t begin_ = 0, filled_ = 0;  // what of the buffer has been read and not been looked at
  bool have_header_ = false;
  MessageHeader header_{};
  Sink* sink_ = nullptr;  // of the message coming in; null: nobody wants it
  std::byte* to_ = nullptr;
  std::unique_ptr<std::byte[]> own_;
  size_t got_ = 0;  // of the payload
};

}  // namespace pycomm
