// Messages that no pycomm would send, from processes that have proved that they belong to the job: each test
// is something that fuzzing (tests/fuzz) has found, or would.
//
// Rank 0 of this host is real, with its group and Net; ranks 1 and 2 are on other hosts, where nobody is.
// What they say is handed to the sinks as the Net hands it over (transport/tcp/receiver.cc): header, then
// payload.
#include <gtest/gtest.h>

#include <fstream>

#include "engine/remote.h"
#include "engine/run_hosts.h"

namespace pycomm {
namespace {

constexpr uint64_t kId = 5;
constexpr size_t kMiB = size_t{1} << 20;

struct OneRank {
  OneRank() { make(); }
  void make() {
    setenv("PYCOMM_ARENA_MAX", "268435456", 0);
    PYCOMM_ASSERT_OK(Node::join(folder.run(), 0, 1, kControlBytes, kDeadlineS, nullptr, &node));
    PYCOMM_ASSERT_OK(loopback_net(0, 3, {}, &net));
    std::vector<Address> nobody(3, net->address().with_port(1));
    net->set_peers(std::move(nobody), {"rank 0", "rank 1 (host b)", "rank 2 (host c)"});
    group = std::make_unique<Group>(node, std::vector<int>{0}, 0, kDeadlineS, std::vector<uint64_t>{0});
  }
  PrivateFolder folder;
  std::shared_ptr<Node> node;
  std::shared_ptr<Net> net;
  std::unique_ptr<Group> group;
};

// As the Net does with a message whose payload goes to memory of its own.
void hear(Net& net, Sink& sink, int peer, const MessageHeader& h, const std::string& payload = "") {
  std::unique_ptr<std::byte[]> own;
  if (h.n_bytes > 0) own = std::make_unique_for_overwrite<std::byte[]>(h.n_bytes);
  if (h.n_bytes > 0) std::memcpy(own.get(), payload.data(), std::min<size_t>(payload.size(), h.n_bytes));
  std::byte* const data = own.get();
  const auto lock = net.lock();
  sink.arrived(peer, h, data, std::move(own));
}

// ---- send and recv ---------------------------------------------------------------------------------------

MessageHeader piece(bool first, uint64_t count, uint64_t n_bytes) {
  MessageHeader h;
  h.group = kId;
  h.flags = first ? 1 : 0;
  h.count = count;
  h.n_bytes = n_bytes;
  h.extra = static_cast<uint32_t>(DType::kUInt8);
  return h;
}

struct FarRank : OneRank {
  PointToPoint p2p{*group, 0, {0, -1, -1}, net, kId + 1, {0, 1, 2}};
  Far far{p2p, net, kId, {0, 1, 2}};  // a second one on the same mailbox, to be told directly
};

TEST(FarBytes, APieceOfNoMessageEndsTheCommunicatorWithItsSendersName) {
  MessageHeader of_no_dtype = piece(true, 8, 4), odd_flags = piece(false, 8, 4);
  of_no_dtype.extra = kNumDTypes;
  odd_flags.flags = 3;
  const std::vector<std::vector<MessageHeader>> cases = {
      {piece(false, 8, 4)},                                             // no message has begun
      {piece(true, Far::kMaxMessageBytes + 1, 4), piece(false, 8, 4)},  // nor has one too large
      {of_no_dtype, piece(false, 8, 4)},                                // nor one of no type
      {piece(true, 8, 9), piece(false, 8, 4)},                          // more than announced, at first
      {piece(true, 8, 4), piece(false, 8, 5)},                          // and later
      {piece(true, 8, 4), piece(true, 8, 8)},                           // the first one is not over
      {piece(true, 8, 4), piece(false, 8, 0)},                          // a piece of nothing
      {piece(true, 8, 0)},                                              // also at first
      {piece(true, 8, 4), odd_flags},
  };
  for (size_t i = 0; i < cases.size(); i++) {
    FarRank self;
    std::byte memory[8];
    const auto work = self.p2p.recv(1, 0, DType::kUInt8, memory, sizeof memory, kDeadlineS);
    for (const MessageHeader& h : cases[i]) hear(*self.net, self.far, 1, h);
    ASSERT_TRUE(work->done()) << i;
    EXPECT_EQ(work->result().code(), Code::kPeerLost) << i;
    EXPECT_NE(work->result().message().find("rank 1 sent a piece of"), std::string::npos)
        << work->result().message();
    EXPECT_TRUE(self.group->failed()) << i;
  }
}

// Ranks of this host share the mailbox through their pipes: a message that claims to be of one of them would
// be mixed with what comes there.
TEST(FarBytes, ARankOfThisHostDoesNotSendFromAnother) {
  FarRank self;
  hear(*self.net, self.far, 0, piece(true, 8, 4));
  EXPECT_EQ(self.group->failure().code(), Code::kPeerLost);
}

TEST(FarBytes, WhatIsOnlyAnnouncedTakesNoMemory) {
  const auto resident_bytes = [] {
    std::ifstream statm("/proc/self/statm");
    size_t total = 0, resident = 0;
    statm >> total >> resident;
    return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  };
  FarRank self;
  const size_t before = resident_bytes();
  hear(*self.net, self.far, 1, piece(true, 512 * kMiB, 8), "12345678");
  EXPECT_FALSE(self.group->failed());
  EXPECT_LT(resident_bytes(), before + 256 * kMiB);
}

// ---- collectives -----------------------------------------------------------------------------------------

struct RemoteRank : OneRank {
  RemoteRank() {
    sig.count = 3;
    const auto lock = net->lock();
    remote.begin(1, sig);
  }
  MessageHeader header(RemoteKind kind, size_t n_bytes) const {
    MessageHeader h;
    h.kind = static_cast<uint8_t>(kind);
    h.group = kId;
    h.call = 1;
    h.signature = sig.packed();
    h.count = sig.count;
    h.n_bytes = n_bytes;
    return h;
  }
  Remote remote{net, kId, {0, 1, 2}, 0, *group};
  Signature sig;
};

TEST(RemoteBytes, AFailureHasACodeAndWordsThatCanBeRaised) {
  for (const int code : {0, 10, 11, 255}) {  // kOk, kInterrupt (of that process, not ours), none
    RemoteRank self;
    const std::string payload = static_cast<char>(code) + std::string("no \xff\x1b[2J memory");
    hear(*self.net, self.remote, 1, self.header(RemoteKind::kFail, payload.size()), payload);
    EXPECT_EQ(self.group->failure().code(), Code::kClosed) << code;
    EXPECT_EQ(self.group->failure().message(), "rank 1 (host b) failed: no ??[2J memory");
  }
  RemoteRank self;
  hear(*self.net, self.remote, 2, self.header(RemoteKind::kFail, 4 * kMiB),
       static_cast<char>(Code::kTimeout) + std::string(4 * kMiB - 1, 'x'));
  EXPECT_EQ(self.group->failure().code(), Code::kTimeout);
  EXPECT_LT(self.group->failure().message().size(), 4100u);
}

TEST(RemoteBytes, ARefusalIsKeptShort) {
  RemoteRank self;
  hear(*self.net, self.remote, 1, self.header(RemoteKind::kRefuse, kMiB), "bad\xc3" + std::string(kMiB, 'x'));
  const auto lock = self.net->lock();
  const Status s = self.remote.trouble();
  EXPECT_EQ(s.code(), Code::kRefused);
  EXPECT_NE(s.message().find("bad?xxx"), std::string::npos) << s.message();
  EXPECT_LT(s.message().size(), 1200u);
}

// Two messages of one key, on two connections: the receive must not end with the one while the other is being
// received into its memory, which after the call is somebody else's.
TEST(RemoteBytes, AMessageSentTwiceDoesNotOutliveItsReceive) {
  RemoteRank self;
  std::byte memory[4];
  bool ended = false;
  const MessageHeader h = self.header(RemoteKind::kData, sizeof memory);
  {
    const auto lock = self.net->lock();
    self.remote.expect({1, 0, 0, 0, 1}, memory, sizeof memory, [&](const std::byte*) { ended = true; });
    EXPECT_EQ(self.remote.landing(1, h), memory);
    EXPECT_EQ(self.remote.landing(1, h), nullptr);
  }
  hear(*self.net, self.remote, 1, h, "1234");
  EXPECT_FALSE(ended);
  const auto lock = self.net->lock();
  EXPECT_EQ(self.remote.trouble().code(), Code::kMismatch);
  EXPECT_NE(self.remote.trouble().message().find("rank 1 sent one message twice"), std::string::npos);
  self.remote.end(false);
}

TEST(RemoteBytes, WhatIsKeptOfCallsToComeIsBounded) {
  RemoteRank self;
  MessageHeader h = self.header(RemoteKind::kData, 4 * kMiB);
  for (uint32_t n = 0; n < Remote::kMaxAheadBytes / h.n_bytes + 1; n++) {
    EXPECT_FALSE(self.group->failed()) << n;
    h.call = 2 + n;
    if (n < 3) {  // what belongs to calls that were made does not count
      const auto lock = self.net->lock();
      self.remote.end(false);
      self.remote.begin(h.call, self.sig);
    }
    hear(*self.net, self.remote, 1, h);
  }
  h.call++;
  for (int n = 0; n < 3; n++, h.call++) hear(*self.net, self.remote, 1, h);
  EXPECT_EQ(self.group->failure().code(), Code::kSystem);
  EXPECT_NE(self.group->failure().message().find("rank 1 (host b) is at call #"), std::string::npos)
      << self.group->failure().message();
}

}  // namespace
}  // namespace pycomm
