// After shrink(): NCCL's communicator of the ranks that are left comes of the one before, where that does.
#include "cuda/device_ranks.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv

namespace pycomm {
namespace {

Status sum(DeviceRank& self, Communicator& comm, OnStream& t, const char* way) {
  Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, t.size() / 4);
  r.call.in = r.call.out = Buffer(t.data(), t.size() / 4);
  PYCOMM_RETURN_IF_ERROR(comm.prepare(&r, way));
  return comm.run(r, nullptr);
}

Bytes filled(float value, size_t n) {
  const std::vector<float> v(n, value);
  const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
  return Bytes(bytes, bytes + 4 * n);
}

#if defined(CUDA_ON_CPU_TSAN)
constexpr double kTimeoutS = 8;  // a call in the new communicator has this time as well
#else
constexpr double kTimeoutS = 1;
#endif

// Rank 3 of 4 stalls; the others go on without it. `other_device`: of rank 0, afterwards.
void shrink_after_a_stall(bool other_device, bool by_shrink) {
  run_device_ranks(
      4,
      [&](DeviceRank& self) {
        OnStream t(self.stream, filled(1, 100));
        PYCOMM_ASSERT_OK(sum(self, *self.comm, t, "nccl"));
        PYCOMM_ASSERT_OK(sum(self, *self.comm, t, "nccl"));
        EXPECT_FALSE(until_failure(self).ok());
        (void)t.get();  // it ends
        if (self.rank == 3) return;
        std::shared_ptr<Communicator> rest;
        PYCOMM_ASSERT_OK(self.comm->shrink({3}, kDeadlineS, nullptr, &rest));
        PYCOMM_ASSERT_OK(self.comm->close(nullptr));
        ASSERT_EQ(rest->size(), 3);
        const bool moves = other_device && self.rank == 0;
        DeviceRank there = self;
        if (moves) {
          there.device = 5;
          ASSERT_CUDA(cudaSetDevice(5));
          ASSERT_CUDA(cudaStreamCreateWithFlags(&there.stream, cudaStreamNonBlocking));
        }
        for (const char* way : {"nccl", "ring"}) {
          OnStream u(there.stream, filled(static_cast<float>(self.rank + 1), 100));
          PYCOMM_ASSERT_OK(sum(there, *rest, u, way));
          EXPECT_TRUE(u.get() == filled(1 + 2 + 3, 100)) << way << ", rank " << self.rank;
        }
        const std::string text = rest->device()->describe();
        EXPECT_EQ(text.find("by ncclCommShrink") != std::string::npos, by_shrink) << text;
        PYCOMM_ASSERT_OK(rest->close(nullptr));
        if (moves) {
          ASSERT_CUDA(cudaStreamDestroy(there.stream));
        }
      },
      kTimeoutS);
}

TEST(DeviceShrink, NcclGoesOn) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=3:1");
  shrink_after_a_stall(false, true);
}

TEST(DeviceShrink, MadeAnewWhereOneRankCannotGoOn) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=3:1");
  shrink_after_a_stall(true, false);
}

void shrink_with_an_old_nccl() {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=3:1");
  const ScopedEnv old("LOOPBACK_NCCL_VERSION", "22703");  // it has no ncclCommRevoke
  shrink_after_a_stall(false, false);
  std::exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(DeviceShrinkDeathTest, MadeAnewWithAnOldNccl) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, which opens NCCL anew
  EXPECT_EXIT(shrink_with_an_old_nccl(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace pycomm
