// A Sender alone, against a Channel of the test: what its sinks do in sent(), and when memory is free again.
#include <functional>

#include "transport/tcp/sender.h"
#include "transport/tcp_pair.h"

namespace pycomm {
namespace {

// Calls `then` with the token of what has left.
class Told final : public Sink {
 public:
  std::function<void(uint64_t)> then;
  std::byte* landing(int, const MessageHeader&) override { return nullptr; }
  void arrived(int, const MessageHeader&, std::byte*, std::unique_ptr<std::byte[]>) override {}
  void sent(uint64_t token) override { then(token); }
  void lost(int, const Status&) override {}
  void left(int, const std::string&) override {}
  void tick() override {}
};

struct Line {
  Secret secret = secret_of(1);
  std::unique_ptr<Listener> listener;
  Sender sender;
  std::unique_ptr<Channel> peer;

  explicit Line(ZeroCopy::Mode mode) {
    Address at;
    EXPECT_TRUE(Address::parse("127.0.0.1", &at).ok());
    EXPECT_TRUE(Listener::open(at, {}, 4, &listener).ok());
    EXPECT_TRUE(
        sender.open(secret, {at, listener->address(), initiator_terms(), "rank 1", 20, mode, 10}).ok());
    Handshake handshake;
    int fd = -1;
    const int64_t limit = now_ns() + 20 * kSecond;
    while ((!sender.is_open() || !handshake.done()) && now_ns() < limit) {
      EXPECT_TRUE(sender.pump().ok());
      Address from;
      bool ignored;
      if (fd < 0) {
        EXPECT_TRUE(listener->accept(&fd, &from).ok());
        if (fd < 0) continue;
        EXPECT_TRUE(Handshake::accept(secret, acceptor_terms(), from.to_string(), limit, &handshake).ok());
      }
      EXPECT_TRUE(drive(&handshake, fd, &ignored).ok());
    }
    EXPECT_TRUE(sender.is_open() && handshake.done());
    EXPECT_TRUE(Channel::open(fd, handshake.take_session(), &peer).ok());
  }

  void push(const std::vector<std::byte>& data, Sink* sink, uint64_t token) {
    Outgoing m;
    m.header.n_bytes = data.size();
    m.data = data.data();
    m.sink = sink;
    m.token = token;
    sender.push(std::move(m));
  }
};

// Three messages: one without a copy, which the peer's kernel has no room for yet; a small one, whose sink
// sends the third when it is told. That one begins without a copy, and ends as a copy, because the kernel
// says of the first that it copies here after all. Its memory must not be called free while its beginning is
// to be read.
TEST(TcpSender, MemoryIsFreeWhenTheKernelHasReadAllOfIt) {
  const std::vector<std::byte> first(size_t{600} << 10), small(8);
  for (size_t n = size_t{1} << 20; n <= size_t{4} << 20; n += size_t{128} << 10) {
    Line line(ZeroCopy::Mode::kAuto);
    std::vector<std::byte> large(n, std::byte{1});
    bool is_free = false;
    Told sink;
    sink.then = [&](uint64_t token) {
      if (token == 1) {
        line.push(large, &sink, 2);
        EXPECT_TRUE(line.sender.pump().ok());  // as Net::queue does
      } else if (token == 2) {
        is_free = true;
        std::fill(large.begin(), large.end(), std::byte{2});  // another call's
      }
    };
    line.push(first, &sink, 0);
    line.push(small, &sink, 1);
    std::vector<std::byte> got(3 * sizeof(MessageHeader) + first.size() + small.size() + n);
    size_t n_got = 0;
    const int64_t limit = now_ns() + 20 * kSecond;
    EXPECT_TRUE(line.sender.pump().ok());
    while ((n_got < got.size() || !is_free) && now_ns() < limit) {
      // As epoll would have it: when there is room again, which is when the first one is over.
      const bool has_room = n_got > first.size();
      EXPECT_TRUE(!has_room || line.sender.pump().ok());
      size_t some = 0;
      const size_t room = std::min<size_t>(got.size() - n_got, 65536);
      EXPECT_TRUE(line.peer->read(got.data() + n_got, room, &some).ok());
      n_got += some;
    }
    ASSERT_TRUE(is_free);
    const auto begin = got.end() - static_cast<std::ptrdiff_t>(n);
    ASSERT_EQ(std::count(begin, got.end(), std::byte{1}), static_cast<std::ptrdiff_t>(n)) << n;
  }
}

// As the Net does when it cannot send: the connection is given up from inside sent().
TEST(TcpSender, AConnectionMayBreakWhileASinkIsTold) {
  Line line(ZeroCopy::Mode::kAlways);
  const std::vector<std::byte> large(ZeroCopy::kMinBytes, std::byte{1}), small(8);
  int n_broken = 0, n_told = 0;
  Told sink;
  sink.then = [&](uint64_t) {
    n_told++;
    line.peer.reset();
    for (int i = 0; i < 3 && n_broken == 0; i++) {  // the first one may only bring the reset
      line.push(small, nullptr, 0);
      if (line.sender.pump().ok()) continue;
      n_broken++;
      line.sender.abandon();
    }
  };
  line.push(large, &sink, 1);
  const int64_t limit = now_ns() + 20 * kSecond;
  while (n_told == 0 && now_ns() < limit) {
    EXPECT_TRUE(line.sender.pump().ok());
    std::byte ignored[4096];
    size_t n;
    if (line.peer == nullptr) continue;
    EXPECT_TRUE(line.peer->read(ignored, sizeof ignored, &n).ok());
  }
  EXPECT_EQ(n_told, 1);
  EXPECT_EQ(n_broken, 1);
  EXPECT_TRUE(line.sender.idle());
}

// What the kernel still reads is not empty, and nobody gets it changed when the connection is given up.
TEST(TcpSender, WhatIsGivenUpDoesNotArriveChanged) {
  Line line(ZeroCopy::Mode::kAlways);
  if (!const_cast<Channel*>(line.sender.channel())->zero_copy().worthwhile())
    GTEST_SKIP() << "this kernel has no SO_ZEROCOPY";
  std::vector<std::byte> large(size_t{3} << 20, std::byte{1});
  Told sink;
  sink.then = [](uint64_t) {};
  line.push(large, &sink, 1);
  EXPECT_TRUE(line.sender.pump().ok());
  EXPECT_FALSE(line.sender.empty());
  EXPECT_EQ(line.sender.forget(&sink), 0u);
  line.sender.abandon();
  std::fill(large.begin(), large.end(), std::byte{2});
  std::vector<std::byte> got(large.size());
  Status s;
  const int64_t limit = now_ns() + 20 * kSecond;
  while (s.ok() && now_ns() < limit) {
    size_t n = 0;
    s = line.peer->read(got.data(), got.size(), &n);
    EXPECT_EQ(std::count(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(n), std::byte{2}), 0);
  }
  EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
}

}  // namespace
}  // namespace pycomm
