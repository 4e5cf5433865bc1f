// Replays of captured calls that go wrong, of which the host knows nothing; and captures that ranks do not
// agree on.
#include "cuda/captured_graph.h"
#include "cuda/device_ranks.h"

namespace pycomm {
namespace {

// Rank 1 fails while the others wait for it in a replay: their streams pass, and they are told.
TEST(DeviceReplays, ARankThatFailsIsNamed) {
  for (const char* way : {"nccl", "peer"}) {
    const double begin_s = monotonic_s();
    run_device_ranks(3, [&](DeviceRank& self) {
      OnStream t(self.stream, Bytes(400));
      const Buffer b(t.data(), 100);
      PYCOMM_ASSERT_OK(sum(self, b, way));
      CapturedGraph graph;
      PYCOMM_ASSERT_OK(graph.capture(self.stream, [&] { return sum(self, b, way); }));
      PYCOMM_ASSERT_OK(graph.replay(self.stream));
      (void)t.get();
      PYCOMM_ASSERT_OK(barrier(*self.comm));
      if (self.rank == 1) {
        self.comm->abort("the test says so");
      } else {
        PYCOMM_ASSERT_OK(graph.replay(self.stream));
        (void)t.get();  // ends
        const Status s = until_failure(self);
        EXPECT_NE(s.message().find("rank 1 (host"), std::string::npos) << s.message();
        EXPECT_NE(s.message().find("the test says so"), std::string::npos) << s.message();
      }
      EXPECT_FALSE(sum(self, b, way).ok());
      graph.reset();  // before the communicator
    });
    EXPECT_LT(monotonic_s() - begin_s, 20) << way;
  }
}

// The limit of the captured call is the replay's, and the kernels know whom they waited for. As soon as the
// stream has passed, a question is answered, and no further call is made.
TEST(DeviceReplays, WhoDoesNotReplayIsNamed) {
  for (const bool asks : {false, true}) {
    run_device_ranks(
        3,
        [&](DeviceRank& self) {
          OnStream t(self.stream, Bytes(400));
          const Buffer b(t.data(), 100);
          PYCOMM_ASSERT_OK(sum(self, b, "peer"));
          CapturedGraph graph;
          PYCOMM_ASSERT_OK(graph.capture(self.stream, [&] { return sum(self, b, "peer"); }));
          PYCOMM_ASSERT_OK(barrier(*self.comm));
          if (self.rank != 1) {
            PYCOMM_ASSERT_OK(graph.replay(self.stream));
            (void)t.get();
          }
          const Status s = self.rank == 1 ? until_failure(self)
                           : asks         ? self.comm->check_usable()
                                          : sum(self, b, "peer");
          EXPECT_FALSE(s.ok()) << "rank " << self.rank;
          EXPECT_NE(s.message().find("rank 1 (host"), std::string::npos) << s.message();
        },
        1);
  }
}

// What one rank has not there is refused on all, naming it, and harms nothing.
TEST(DeviceReplays, WhatOneRankCannotCapture) {
  run_device_ranks(3, [](DeviceRank& self) {
    constexpr uint64_t kMany = 400'000;  // more than the first piece of scratch memory
    OnStream t(self.stream, Bytes(4 * kMany + 64));
    auto* const data = reinterpret_cast<std::byte*>(t.data());
    const Buffer whole(data, kMany);
    const Buffer pieces(std::vector<Segment>{{data, kMany / 2}, {data + 2 * kMany + 32, kMany / 2}}, 4);
    PYCOMM_ASSERT_OK(sum(self, whole, "peer"));
    (void)t.get();
    CapturedGraph graph;
    const Status s =
        graph.capture(self.stream, [&] { return sum(self, self.rank == 1 ? pieces : whole, "peer"); });
    EXPECT_EQ(s.code(), Code::kValue) << s.message();
    EXPECT_EQ(s.message().find("rank 1 (host "), 0u) << s.message();
    EXPECT_NE(s.message().find("it needs more scratch memory; make the same call once"), std::string::npos)
        << s.message();
    PYCOMM_ASSERT_OK(sum(self, self.rank == 1 ? pieces : whole, "peer"));
    (void)t.get();
    PYCOMM_ASSERT_OK(
        graph.capture(self.stream, [&] { return sum(self, self.rank == 1 ? pieces : whole, "peer"); }));
    PYCOMM_ASSERT_OK(graph.replay(self.stream));
    (void)t.get();
    graph.reset();
  });
}

// A tree from another root has other connections, and some ranks have all of theirs.
TEST(DeviceReplays, ConnectionsThatSomeRanksLack) {
  run_device_ranks(4, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    const auto broadcast = [&](int root) {
      Request r = self.request(CallKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, 100, root);
      r.call.in = r.call.out = Buffer(t.data(), 100);
      return self.call(&r, "binomial");
    };
    PYCOMM_ASSERT_OK(broadcast(0));
    (void)t.get();
    CapturedGraph graph;
    const Status s = graph.capture(self.stream, [&] { return broadcast(1); });
    EXPECT_EQ(s.code(), Code::kValue) << s.message();
    EXPECT_NE(s.message().find("NCCL connects at the first message"), std::string::npos) << s.message();
    PYCOMM_ASSERT_OK(broadcast(1));
    (void)t.get();
    PYCOMM_ASSERT_OK(graph.capture(self.stream, [&] { return broadcast(1); }));
    graph.reset();
  });
}

TEST(DeviceReplays, ACaptureAgainstACallThatIsMadeNow) {
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    const Buffer b(t.data(), 100);
    PYCOMM_ASSERT_OK(sum(self, b, "peer"));
    (void)t.get();
    CapturedGraph graph;
    const Status s = self.rank == 0 ? graph.capture(self.stream, [&] { return sum(self, b, "peer"); })
                                    : sum(self, b, "peer");
    EXPECT_EQ(s.code(), Code::kMismatch) << s.message();
    EXPECT_NE(s.message().find("rank 0 called all_reduce/peer(op sum, float32, count 100, on CUDA, captured "
                               "into a graph, "),
              std::string::npos)
        << s.message();
    EXPECT_NE(s.message().find("rank 1 called all_reduce/peer(op sum, float32, count 100, on CUDA, param"),
              std::string::npos)
        << s.message();
  });
}

}  // namespace
}  // namespace pycomm
