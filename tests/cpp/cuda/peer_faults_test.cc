// Ranks that do not come, come with something else, or are lost: an error that names them, in time, and
// kernels that end.
#include "cuda/peer_values.h"

namespace pycomm {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Status call(PeerRank& self, const Tensor& t, size_t n_elems, ReduceOp op = ReduceOp::kSum) {
  PYCOMM_RETURN_IF_ERROR(self.comm->all_reduce(t.data(), t.data(), n_elems, DType::kFloat32, op, 1,
                                               PeerWay::kTwoShot, self.on()));
  return self.pass();
}

TEST(PeerFaults, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  PeerOptions options = small_options();
  options.timeout_s = 0.3;
  options.describe = [](int r) { return format("rank %d (host b)", r); };
  run_peers(4, options, [&](PeerRank& self) {
    const Tensor t(self, 4000, 0, false);
    ASSERT_OK(self.comm->broadcast(t.data(), 4000, 0, PeerWay::kAuto, self.on()));
    ASSERT_OK(self.pass());
    if (self.rank != 2) {
      const auto start = std::chrono::steady_clock::now();
      const Status s = call(self, t, 1000);
      EXPECT_LT(seconds_since(start), 20);
      EXPECT_FALSE(s.ok());
      // Whoever reaches his deadline first tells the others, who may have seen for themselves.
      const bool own = s.code() == Code::kTimeout;
      EXPECT_EQ(s.message().find("all_reduce/two_shot of 4000 bytes over peer memory, call 2: "), 0u);
      EXPECT_NE(s.message().find(own ? ": rank 2 (host b) did not come; waited 0.3 s"
                                     : " gave up, waiting for rank 2 (host b)"),
                std::string::npos)
          << s.message();
      const Status again = call(self, t, 10);
      EXPECT_EQ(again.message(), s.message()) << "failed for good";
      EXPECT_EQ(again.code(), s.code());
    }
    uint64_t mine = 0, all[4];  // the late rank comes when the others have given up
    ASSERT_OK(self.exchange(&mine, sizeof mine, all));
    if (self.rank == 2) {
      const Status s = call(self, t, 1000);
      EXPECT_EQ(s.code(), Code::kPeerLost);
      EXPECT_EQ(
          s.message(),
          "all_reduce/two_shot of 4000 bytes over peer memory, call 2: rank 0 (host b), rank 1 (host b), "
          "rank 3 (host b) gave up, waiting for rank 2 (host b)");
    }
  });
}

// A call may say that it takes longer, and that its time is over.
TEST(PeerFaults, TheCallsLimitCounts) {
  PeerOptions options = small_options();
  options.timeout_s = 0.2;
  run_peers(2, options, [&](PeerRank& self) {
    const Tensor t(self, 4000, 0, false);
    self.comm->allow(1000);
    self.comm->allow(0.1);  // shorter: nothing new
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    ASSERT_OK(call(self, t, 1000));
    EXPECT_FALSE(self.comm->give_up(7)) << "nothing waits";
    ASSERT_OK(call(self, t, 1000));
    if (self.rank == 1) return;
    ASSERT_OK(self.comm->all_reduce(t.data(), t.data(), 1000, DType::kFloat32, ReduceOp::kSum, 1,
                                    PeerWay::kTwoShot, self.on()));
    while (!self.comm->give_up(7)) std::this_thread::yield();  // until the kernel has begun
    const Status s = self.pass();
    EXPECT_EQ(s.code(), Code::kTimeout);
    EXPECT_EQ(s.message(),
              "all_reduce/two_shot of 4000 bytes over peer memory, call 3: rank 1 did not come; waited 7 s");
  });
}

TEST(PeerFaults, CallsThatDifferAreSeenOnEveryRank) {
  for (const int odd_one : {0, 2}) {
    run_peers(3, small_options(), [&](PeerRank& self) {
      const Tensor t(self, 4000, 0, false);
      const ReduceOp op = self.rank == odd_one ? ReduceOp::kMax : ReduceOp::kSum;
      const Status s = call(self, t, 1000, op);
      EXPECT_EQ(s.code(), Code::kMismatch) << s.message();
      EXPECT_NE(s.message().find("called something else"), std::string::npos) << s.message();
    });
  }
}

TEST(PeerFaults, SizesThatUseMoreBlocksOnOneRank) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    const Tensor t(self, 4000, 0, false);
    const Status s = call(self, t, self.rank == 0 ? 4 : 1000);
    EXPECT_EQ(s.code(), Code::kMismatch) << s.message();
    EXPECT_NE(
        s.message().find(self.rank == 0 ? "rank 1 called something else" : "rank 0 called something else"),
        std::string::npos)
        << s.message();
  });
}

TEST(PeerFaults, ALostPeerEndsTheWaitAtOnce) {
  std::atomic<bool> lost{false};
  PeerOptions options = small_options();
  options.trouble = [&] {
    return lost ? Status::error(Code::kPeerLost, "rank 1 (host b, pid 811) died") : Status();
  };
  run_peers(2, options, [&](PeerRank& self) {
    const Tensor t(self, 4000, 0, false);
    if (self.rank == 0) {
      ASSERT_OK(self.comm->all_reduce(t.data(), t.data(), 1000, DType::kFloat32, ReduceOp::kSum, 1,
                                      PeerWay::kOneShot, self.on()));
      EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
      lost = true;
      const auto start = std::chrono::steady_clock::now();
      ASSERT_CUDA(cudaStreamSynchronize(self.stream));
      EXPECT_LT(seconds_since(start), 20) << "far less than the timeout";
      const Status s = self.comm->failure();
      EXPECT_EQ(s.code(), Code::kPeerLost);
      EXPECT_EQ(s.message(), "rank 1 (host b, pid 811) died");
    }
  });
}

TEST(PeerFaults, AbortEndsTheWait) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    const Tensor t(self, 4000, 0, false);
    if (self.rank == 0) {
      ASSERT_OK(self.comm->all_reduce(t.data(), t.data(), 1000, DType::kFloat32, ReduceOp::kSum, 1,
                                      PeerWay::kOneShot, self.on()));
      self.comm->abort(Status::error(Code::kClosed, "aborted by the user"));
      const Status s = self.pass();
      EXPECT_EQ(s.code(), Code::kClosed);
      EXPECT_EQ(s.message(), "aborted by the user");
    }
  });
}

TEST(PeerFaults, MemoryIsNotUsedAgain) {
  PeerOptions options = small_options();
  options.timeout_s = 0.3;
  run_peers(2, options, [&](PeerRank& self) {
    void* p = nullptr;
    void* q = nullptr;
    ASSERT_OK(self.memory->allocate(1000, &p));
    if (self.rank == 0) {
      EXPECT_FALSE(
          self.comm->all_reduce(p, p, 100, DType::kFloat32, ReduceOp::kSum, 1, PeerWay::kTwoShot, self.on())
              .ok() &&
          self.pass().ok());
    } else {
      self.comm->abort(Status::error(Code::kClosed, "aborted by the user"));
    }
    ASSERT_OK(self.memory->release(p));
    ASSERT_OK(self.memory->allocate(1000, &q));
    EXPECT_NE(p, q) << "peers may still write into it";
    EXPECT_EQ(self.memory->release(p).code(), Code::kValue) << "twice";
    ASSERT_OK(self.memory->release(q));
  });
}

TEST(PeerFaults, OptionsMustBeAlike) {
  Board board(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      PeerRank self;
      self.rank = self.device = r;
      self.size = 2;
      self.exchange = board.of(r);
      self.folder = board.folder();
      PeerOptions options = small_options();
      options.one_shot_bytes += static_cast<size_t>(r);
      const Status s = make_peer(self, options);
      EXPECT_EQ(s.code(), Code::kMismatch);
      EXPECT_NE(s.message().find("options differ"), std::string::npos) << s.message();
      ASSERT_OK(end_peer(self));
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace
}  // namespace pycomm
