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

// What `call` says while the rank's stream is captured; what was captured is let go.
Status captured(const DeviceRank& self, const std::function<Status()>& call) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamSynchronize(self.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  Status s = call();
  EXPECT_EQ(cudaStreamEndCapture(self.stream, &graph), cudaSuccess);
  if (graph != nullptr) {
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  return s;
}

void expect_refused(const Status& s, const char* why) {
  EXPECT_EQ(s.code(), Code::kValue);
  EXPECT_NE(s.message().find(why), std::string::npos) << s.message();
}

// What a first call makes is made before; the refusal is the same on all ranks, and harms nothing.
TEST(DeviceGraph, WhatCannotBeCaptured) {
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, filled(1));
    const auto refused = [&](const char* way, const char* why) {
      expect_refused(captured(self, [&] { return sum(self, t, way); }), why);
    };
    refused("peer", "the first call of a communicator on CUDA");
    PYCOMM_ASSERT_OK(sum(self, t, "peer"));
    refused("nccl", "its NCCL communicator is not there yet");
    PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
    expect_filled(t, 4, "after all");
  });
}

// It would have to wait for what is captured, which runs at replays only.
TEST(DeviceGraph, ACallBesideACaptureIsRefused) {
  run_device_ranks(2, [](DeviceRank& self) {
    DeviceRank beside = self;  // another thread's stream, or torch's default one
    ASSERT_CUDA(cudaStreamCreateWithFlags(&beside.stream, cudaStreamNonBlocking));
    for (const char* way : {"peer", "nccl"}) {
      OnStream t(self.stream, filled(1)), other(beside.stream, filled(1));
      PYCOMM_ASSERT_OK(sum(self, t, way));
      PYCOMM_ASSERT_OK(captured(self, [&] {
        PYCOMM_RETURN_IF_ERROR(sum(self, t, way));
        expect_refused(sum(beside, other, way), "are captured into a CUDA graph from another stream");
        return sum(self, t, way);  // the capture has not suffered
      }));
      PYCOMM_ASSERT_OK(sum(beside, other, way));
      expect_filled(other, 2, way);
    }
    ASSERT_CUDA(cudaStreamDestroy(beside.stream));
  });
}

// Each rank sends to one other: that it has exchanged messages with the third is not enough.
TEST(DeviceGraph, AnAllToAllIsRefusedUntilItsRanksHaveMet) {
  run_device_ranks(3, [](DeviceRank& self) {
    OnStream in(self.stream, filled(static_cast<float>(self.rank))), out(self.stream, filled(-1));
    const auto exchange = [&](int to, int from) {
      Request r = self.request(CallKind::kAllToAll, DType::kFloat32, ReduceOp::kSum, 0);
      r.send_counts.assign(3, 0), r.recv_counts.assign(3, 0);
      r.send_counts[static_cast<size_t>(to)] = r.recv_counts[static_cast<size_t>(from)] = kElems;
      r.call.in = Buffer(in.data(), kElems), r.call.out = Buffer(out.data(), kElems);
      return self.call(&r, "");
    };
    const int right = (self.rank + 1) % 3, left = (self.rank + 2) % 3;
    const auto refused = [&](int to, int from) {
      expect_refused(captured(self, [&] { return exchange(to, from); }),
                     "all_to_all over NCCL cannot be captured: rank 0 has not received from rank 1");
    };
    PYCOMM_ASSERT_OK(exchange(right, left));
    refused(left, right);
    PYCOMM_ASSERT_OK(exchange(left, right));
    PYCOMM_ASSERT_OK(captured(self, [&] { return exchange(left, right); }));
    PYCOMM_ASSERT_OK(captured(self, [&] { return exchange(self.rank, self.rank); }));  // needs no connection
    expect_filled(out, static_cast<float>(right), "by the call before");
  });
}

// Neither do a gather or a scatter of one root make the connections of another's.
TEST(DeviceGraph, AGatherOrScatterIsRefusedUntilItsRootHasMetAll) {
  for (const CallKind kind : {CallKind::kGather, CallKind::kScatter}) {
    run_device_ranks(3, [kind](DeviceRank& self) {
      const bool gathers = kind == CallKind::kGather;
      OnStream part(self.stream, filled(static_cast<float>(self.rank))),
          all(self.stream, size_t{3} * 4 * kElems);
      const auto call = [&](int root) {
        Request r = self.request(kind, DType::kFloat32, ReduceOp::kSum, 3 * kElems, root);
        (gathers ? r.call.in : r.call.out) = Buffer(part.data(), kElems);
        if (self.rank == root) (gathers ? r.call.out : r.call.in) = Buffer(all.data(), 3 * kElems);
        return self.call(&r, "nccl");
      };
      PYCOMM_ASSERT_OK(call(0));
      expect_refused(captured(self, [&] { return call(2); }),
                     gathers
                         ? "gather over NCCL cannot be captured: rank 0 has not sent to rank 2 yet"
                         : "scatter over NCCL cannot be captured: rank 0 has not received from rank 2 yet");
      PYCOMM_ASSERT_OK(call(2));
      PYCOMM_ASSERT_OK(captured(self, [&] { return call(2); }));
    });
  }
}

}  // namespace
}  // namespace pycomm
