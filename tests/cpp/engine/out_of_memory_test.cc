// A rank that runs out of memory within a call tells its peers why, instead of terminating or leaving them to
// wait. Sizes that no machine has provoke it: 2^62 bytes.
#include <gtest/gtest.h>

#include <atomic>

#include "engine/run_ranks.h"

namespace pycomm {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kNewTerminates = true;  // a sanitizer's operator new ends the process instead of throwing
#else
constexpr bool kNewTerminates = false;
#endif

constexpr size_t kTooMuch = size_t{1} << 62;

class OutOfMemory : public testing::Test {
 protected:
  void SetUp() override {
    if (kNewTerminates) GTEST_SKIP() << "operator new does not throw under this sanitizer";
  }
};

// premul_sum scales a copy of the input; rank 1's claims to be larger than any memory.
TEST_F(OutOfMemory, WithinACollectiveIsToldToThePeers) {
  for (bool queued : {false, true}) {
    for (uint64_t n : {uint64_t{1}, uint64_t{40000}}) {
      run_ranks(3, [n, queued](TestRank& self) {
        std::vector<float> v(n, 1.0f);
        auto request = std::make_unique<Request>(
            request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kPremulSum, n));
        request->call.in = Buffer(v.data(), self.rank == 1 ? kTooMuch / sizeof(float) : n);
        request->call.out = Buffer(v.data(), n);
        PYCOMM_ASSERT_OK(self.comm->prepare(request.get(), nullptr));
        const double start = monotonic_s();
        Status s;
        if (queued) {
          bool finished = false;
          s = self.comm->start(std::move(request))->wait(kDeadlineS, nullptr, &finished);
          ASSERT_TRUE(finished);
        } else {
          s = self.comm->run(*request, nullptr);
        }
        EXPECT_LT(monotonic_s() - start, 5);
        EXPECT_EQ(s.code(), Code::kSystem) << s.message();
        EXPECT_NE(s.message().find("rank 1 ran out of memory in all_reduce"), std::string::npos)
            << s.message();
        EXPECT_TRUE(self.comm->group().failed());
        EXPECT_EQ(barrier(*self.comm).code(), Code::kSystem);
      });
    }
  }
}

// A message that nobody has asked for is kept by the receiver; this one announces more than it can keep. It
// comes before or after the receiver posts a recv, which is for another tag.
TEST_F(OutOfMemory, OfAMessageThatNobodyAskedForEndsAllTransfers) {
  for (bool early : {false, true}) {
    std::atomic<bool> sent{false}, posted{false};
    run_ranks(2, [&](TestRank& self) {
      PointToPoint& p2p = self.comm->p2p();
      const double start = monotonic_s();
      const auto expect_told = [&](const Status& s) {
        EXPECT_LT(monotonic_s() - start, 5);
        EXPECT_EQ(s.code(), Code::kSystem) << s.message();
        EXPECT_NE(s.message().find("rank 1 has no memory for a message"), std::string::npos) << s.message();
      };
      if (self.rank == 0) {
        const std::vector<std::byte> data(kCells * kCellBytes);  // what goes before the receiver drains
        while (!early && !posted.load()) thread_yield();
        const auto work = p2p.send(1, 1, DType::kUInt8, data.data(), kTooMuch, kDeadlineS);
        sent = true;
        expect_told(p2p.finish(work, nullptr));
        return;
      }
      while (early && !sent.load()) thread_yield();
      std::byte x{};
      const auto work = p2p.recv(0, 2, DType::kUInt8, &x, 1, kDeadlineS);
      posted = true;
      expect_told(p2p.finish(work, nullptr));
      const auto later = p2p.recv(0, 3, DType::kUInt8, &x, 1, kDeadlineS);
      ASSERT_TRUE(later->done());
      expect_told(later->result());
    });
  }
}

}  // namespace
}  // namespace pycomm
