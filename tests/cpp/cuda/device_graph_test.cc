// Calls of a communicator that are captured into CUDA graphs, and replayed between others.
#include "cuda/device_ranks.h"

namespace pycomm {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kElems = 301;
constexpr int kReplays = 3;
#else
constexpr uint64_t kElems = 3001;
constexpr int kReplays = 8;
#endif

Status sum(DeviceRank& self, OnStream& t, const char* way) {
  Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, kElems);
  r.call.in = r.call.out = Buffer(t.data(), kElems);
  return self.call(&r, way);
}

Bytes filled(float value) {
  const std::vector<float> v(kElems, value);
  const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
  return Bytes(bytes, bytes + 4 * kElems);
}

void expect_filled(const OnStream& t, float want, const std::string& where) {
  EXPECT_TRUE(t.get() == filled(want)) << where << ": expected " << want;
}

TEST(DeviceGraph, ReplayedBetweenOtherCalls) {
  for (const int n : {1, 2, 3}) {
    run_device_ranks(n, [n](DeviceRank& self) {
      const auto all = static_cast<float>(n * (n + 1) / 2);
      for (const char* way : {"peer_one_shot", "peer_two_shot", "nccl", "ring"}) {
        OnStream t(self.stream, filled(1)), other(self.stream, filled(1));
        PYCOMM_ASSERT_OK(sum(self, t, way));  // makes what a capture cannot
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t replayed = nullptr;
        // Global: of the whole process, where other ranks allocate.
        ASSERT_CUDA(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal));
        PYCOMM_ASSERT_OK(sum(self, t, way));
        PYCOMM_ASSERT_OK(sum(self, t, way));  // n times the sum
        ASSERT_CUDA(cudaStreamEndCapture(self.stream, &graph));
        ASSERT_CUDA(cudaGraphInstantiate(&replayed, graph, 0));
        for (int i = 1; i <= kReplays; i++) {
          const float mine = static_cast<float>(i * (self.rank + 1));
          t.put(filled(mine));
          ASSERT_CUDA(cudaGraphLaunch(replayed, self.stream));
          expect_filled(t, all * static_cast<float>(i * n), std::string(way) + " replayed");
          other.put(filled(mine));
          PYCOMM_ASSERT_OK(sum(self, other, i % 2 == 0 ? way : "peer"));
          expect_filled(other, all * static_cast<float>(i), std::string(way) + " between");
        }
        ASSERT_CUDA(cudaGraphExecDestroy(replayed));
        ASSERT_CUDA(cudaGraphDestroy(graph));
      }
    });
  }
}

// What a first call makes is made before; the refusal is the same on all ranks, and harms nothing.
TEST(DeviceGraph, WhatCannotBeCaptured) {
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, filled(1));
    const auto refused = [&](const char* way, const char* why) {
      cudaGraph_t graph = nullptr;
      ASSERT_CUDA(cudaStreamSynchronize(self.stream));
      ASSERT_CUDA(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal));
      const Status s = sum(self, t, way);
      EXPECT_EQ(s.code(), Code::kValue);
      EXPECT_NE(s.message().find(why), std::string::npos) << s.message();
      ASSERT_CUDA(cudaStreamEndCapture(self.stream, &graph));
      if (graph != nullptr) {
        ASSERT_CUDA(cudaGraphDestroy(graph));
      }
    };
    refused("peer", "the first call of a communicator on CUDA");
    PYCOMM_ASSERT_OK(sum(self, t, "peer"));
    refused("nccl", "its NCCL communicator is not there yet");
    PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
    expect_filled(t, 4, "after all");
  });
}

}  // namespace
}  // namespace pycomm
