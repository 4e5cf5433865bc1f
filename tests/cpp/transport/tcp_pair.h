// Two ends of a handshake, of a socket and of a Channel, for the tests of transport/tcp.
//
// The handshakes here run without sockets unless a test is about them: `exchange` carries bytes from one to
// the other in pieces of a given size. Words: *initiator* connected, *acceptor* listened.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "transport/tcp/channel.h"
#include "transport/tcp/connect.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/listener.h"

namespace pycomm {

inline constexpr int64_t kSecond = 1'000'000'000;

inline Secret secret_of(uint8_t first) {
  std::vector<uint8_t> bytes(Secret::kBytes);
  std::iota(bytes.begin(), bytes.end(), first);
  Secret secret;
  EXPECT_TRUE(Secret::from_bytes(bytes.data(), bytes.size(), &secret).ok());
  return secret;
}

// Rank 2 connects to rank 1 of 4, socket 1 of 3.
inline Terms initiator_terms() {
  Terms t;
  t.n_ranks = 4;
  t.from_rank = 2;
  t.to_rank = 1;
  t.channel = 1;
  t.n_channels = 3;
  t.job = 0x1234;
  t.group = 7;
  t.settings = 99;
  t.set_who("host b, pid 22");
  t.set_settings_text("slice=64K");
  return t;
}

inline Terms acceptor_terms() {
  Terms t = initiator_terms();
  t.from_rank = kAnyRank;
  t.channel = 0;
  t.set_who("host a, pid 11");
  return t;
}

struct Ends {
  Handshake initiator, acceptor;
  Status initiator_status, acceptor_status;

  explicit Ends(const Terms& i = initiator_terms(), const Terms& a = acceptor_terms(), uint8_t secret_i = 1,
                uint8_t secret_a = 1) {
    const int64_t deadline = now_ns() + 20 * kSecond;
    EXPECT_TRUE(
        Handshake::initiate(secret_of(secret_i), i, "rank 1 at 10.0.0.1:5", deadline, &initiator).ok());
    EXPECT_TRUE(Handshake::accept(secret_of(secret_a), a, "10.0.0.2:6", deadline, &acceptor).ok());
  }
  bool both_done() const { return initiator.done() && acceptor.done(); }
};

// Carries at most `piece` bytes; false when there was nothing to carry.
inline bool carry(Handshake* from, Handshake* to, size_t piece, Status* from_status, Status* to_status) {
  const std::span<const uint8_t> out = from->to_send();
  const std::span<uint8_t> in = to->to_receive();
  const size_t n = std::min({out.size(), in.size(), piece});
  if (n == 0) return false;
  std::memcpy(in.data(), out.data(), n);
  if (Status s = from->sent(n); !s.ok()) *from_status = std::move(s);
  if (Status s = to->received(n); !s.ok()) *to_status = std::move(s);
  return true;
}

// Until neither side has anything to say that the other wants to hear.
inline void exchange(Ends* ends, size_t piece = 1000) {
  while (carry(&ends->initiator, &ends->acceptor, piece, &ends->initiator_status, &ends->acceptor_status) ||
         carry(&ends->acceptor, &ends->initiator, piece, &ends->acceptor_status, &ends->initiator_status)) {
  }
}

// All that a handshake has to say now.
inline std::vector<uint8_t> say(Handshake* from) {
  const std::span<const uint8_t> out = from->to_send();
  std::vector<uint8_t> bytes(out.begin(), out.end());
  const Status status = from->sent(bytes.size());
  EXPECT_TRUE(status.ok()) << status.message();
  return bytes;
}

// Bytes to a handshake, as many as it wants.
inline Status hear(Handshake* to, const std::vector<uint8_t>& bytes) {
  const std::span<uint8_t> in = to->to_receive();
  const size_t n = std::min(in.size(), bytes.size());
  EXPECT_GT(n, 0u) << "it does not listen";
  if (n == 0) return Status();
  std::memcpy(in.data(), bytes.data(), n);
  return to->received(n);
}

inline bool wait_for(int fd, short events, int timeout_ms = 10'000) {
  pollfd p{fd, events, 0};
  return poll(&p, 1, timeout_ms) > 0;
}

struct SocketPair {
  int a = -1, b = -1;
};

// A TCP connection over loopback: a connected, b was accepted.
inline SocketPair tcp_pair(sa_family_t family = AF_INET) {
  std::unique_ptr<Listener> listener;
  SocketPair pair;
  Status status = Listener::open(Address::loopback(family), {}, 8, &listener);
  EXPECT_TRUE(status.ok()) << status.message();
  if (!status.ok()) return pair;
  std::unique_ptr<Connector> connector;
  status = Connector::start({}, listener->address(), "the listener", now_ns() + 10 * kSecond, &connector);
  EXPECT_TRUE(status.ok()) << status.message();
  if (!status.ok()) return pair;
  EXPECT_TRUE(wait_for(connector->fd(), POLLOUT));
  bool connected = false;
  status = connector->step(&connected);
  EXPECT_TRUE(status.ok() && connected) << status.message();
  EXPECT_TRUE(wait_for(listener->fd(), POLLIN));
  Address from;
  status = listener->accept(&pair.b, &from);
  EXPECT_TRUE(status.ok()) << status.message();
  pair.a = connector->release();
  return pair;
}

// Runs both ends over real sockets until both are done or have failed.
inline void drive_both(Ends* ends, const SocketPair& pair) {
  const int64_t limit = now_ns() + 15 * kSecond;
  while (now_ns() < limit) {
    bool wants_write;
    const bool i_open = !ends->initiator.done() && ends->initiator_status.ok();
    const bool a_open = !ends->acceptor.done() && ends->acceptor_status.ok();
    if (!i_open && !a_open) return;
    if (i_open) ends->initiator_status = drive(&ends->initiator, pair.a, &wants_write);
    if (a_open) ends->acceptor_status = drive(&ends->acceptor, pair.b, &wants_write);
    if (!ends->initiator_status.ok()) shutdown(pair.a, SHUT_RDWR);
    if (!ends->acceptor_status.ok()) shutdown(pair.b, SHUT_RDWR);
  }
  ADD_FAILURE() << "the handshake did not end";
}

struct Channels {
  std::unique_ptr<Channel> a, b;  // a's socket connected
};

inline Channels channel_pair(bool encrypt, sa_family_t family = AF_INET,
                             uint64_t n_records_per_key = 1 << 20) {
  Terms i = initiator_terms(), a = acceptor_terms();
  i.encrypt = a.encrypt = encrypt;
  Ends ends(i, a);
  const SocketPair pair = tcp_pair(family);
  drive_both(&ends, pair);
  EXPECT_TRUE(ends.both_done()) << ends.initiator_status.message() << ends.acceptor_status.message();
  Channels channels;
  Session session_a = ends.initiator.take_session(), session_b = ends.acceptor.take_session();
  session_a.n_records_per_key = session_b.n_records_per_key = n_records_per_key;
  EXPECT_TRUE(Channel::open(pair.a, std::move(session_a), &channels.a).ok());
  EXPECT_TRUE(Channel::open(pair.b, std::move(session_b), &channels.b).ok());
  return channels;
}

}  // namespace pycomm
