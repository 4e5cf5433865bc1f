// What a communicator leaves on its device when it closes: the next one has its memory.
#include "cuda/device_ranks.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv

namespace pycomm {
namespace {

constexpr int kFirstDevice = 4;  // not one that another test of this process leaves stuck

size_t n_bytes_used() {
  size_t n_free = 0, n_total = 0;
  if (cudaMemGetInfo(&n_free, &n_total) != cudaSuccess) ADD_FAILURE();
  return n_total - n_free;
}

DeviceRank child_of(const DeviceRank& self) {
  DeviceRank child = self;
  const Status s = self.comm->split(0, self.rank, 0, nullptr, &child.comm);
  EXPECT_TRUE(s.ok()) << s.message();
  return child;
}

// A communicator with peers' memory, which is at its size: more than this test's other blocks.
DeviceRank used_child_of(const DeviceRank& self, const OnStream& t) {
  DeviceRank child = child_of(self);
  const Status s = sum(child, t, "peer");
  EXPECT_TRUE(s.ok()) << s.message();
  return child;
}

// Calls `fn` on each rank with a tensor, where nothing is left of tests before, and scratch is as large as it
// gets. n_bytes: of one communicator's memory.
void run_closing(int n, const std::function<void(DeviceRank&, const OnStream&, size_t n_bytes)>& fn) {
  run_device_ranks(
      n,
      [&](DeviceRank& self) {
        const OnStream t(self.stream, Bytes(400));
        PYCOMM_ASSERT_OK(used_child_of(self, t).comm->close(nullptr));
        DeviceRank one = used_child_of(self, t);
        const size_t before = n_bytes_used();
        DeviceRank two = used_child_of(self, t);
        const size_t n_bytes = n_bytes_used() - before;
        ASSERT_GT(n_bytes, size_t{1} << 20);
        PYCOMM_ASSERT_OK(one.comm->close(nullptr));
        PYCOMM_ASSERT_OK(two.comm->close(nullptr));
        fn(self, t, n_bytes);
      },
      kDeadlineS, kFirstDevice);
}

TEST(DeviceClosed, OneAfterAnotherInTheSameMemory) {
  run_closing(3, [](DeviceRank& self, const OnStream& t, size_t) {
    PYCOMM_ASSERT_OK(used_child_of(self, t).comm->close(nullptr));
    const size_t before = n_bytes_used();
    for (int i = 0; i < 8; i++) {
      const DeviceRank child = used_child_of(self, t);
      EXPECT_EQ(n_bytes_used(), before) << i;
      PYCOMM_ASSERT_OK(child.comm->close(nullptr));
    }
  });
}

// Rank 1 closes late, and what it may still write into stays until it has.
TEST(DeviceClosed, WhoClosesLateKeepsItsPeersMemory) {
  run_closing(3, [](DeviceRank& self, const OnStream& t, size_t n_bytes) {
    const DeviceRank first = used_child_of(self, t);
    const size_t before = n_bytes_used();
    if (self.rank != 1) PYCOMM_ASSERT_OK(first.comm->close(nullptr));
    const DeviceRank second = used_child_of(self, t);
    EXPECT_EQ(n_bytes_used(), before + n_bytes);
    if (self.rank == 1) PYCOMM_ASSERT_OK(first.comm->close(nullptr));
    const DeviceRank third = used_child_of(self, t);
    EXPECT_EQ(n_bytes_used(), before + n_bytes) << "of the second, and of the third in the first's place";
    PYCOMM_ASSERT_OK(second.comm->close(nullptr));
    PYCOMM_ASSERT_OK(third.comm->close(nullptr));
  });
}

TEST(DeviceClosed, TensorsOutliveTheirCommunicator) {
  run_closing(2, [](DeviceRank& self, const OnStream& t, size_t n_bytes) {
    const DeviceRank first = used_child_of(self, t);
    const size_t before = n_bytes_used();
    std::unique_ptr<DeviceBlock> tensor;
    if (self.rank == 0) PYCOMM_ASSERT_OK(first.comm->device()->allocate(4000, self.stream, nullptr, &tensor));
    PYCOMM_ASSERT_OK(first.comm->close(nullptr));
    const DeviceRank second = used_child_of(self, t);
    EXPECT_EQ(n_bytes_used(), before + (self.rank == 0 ? n_bytes : 0));
    if (self.rank == 0) {  // as ordinary memory of the others' calls
      ASSERT_CUDA(cudaMemsetAsync(tensor->data(), 0, 400, self.stream));
      PYCOMM_ASSERT_OK(sum(second, Buffer(tensor->data(), 100), "peer"));
      ASSERT_CUDA(cudaStreamSynchronize(self.stream));
    } else {
      PYCOMM_ASSERT_OK(sum(second, t, "peer"));
    }
    tensor.reset();
    PYCOMM_ASSERT_OK(second.comm->close(nullptr));
    const DeviceRank third = used_child_of(self, t);
    EXPECT_EQ(n_bytes_used(), before);
    PYCOMM_ASSERT_OK(third.comm->close(nullptr));
  });
}

// Neither the block that lists are packed in nor tensors that went before keep the memory.
TEST(DeviceClosed, ListsAndTensorsThatAreGoneKeepNothing) {
  run_closing(2, [](DeviceRank& self, const OnStream& t, size_t) {
    const OnStream other(self.stream, Bytes(400));
    size_t before = 0;
    for (int i = 0; i < 3; i++) {
      const DeviceRank child = used_child_of(self, t);
      if (i == 0) before = n_bytes_used();
      EXPECT_EQ(n_bytes_used(), before) << i;
      const std::vector<Segment> list = {{t.data(), 50}, {other.data(), 50}};
      PYCOMM_ASSERT_OK(sum(child, Buffer(list, sizeof(float)), "peer"));
      std::unique_ptr<DeviceBlock> tensor;
      PYCOMM_ASSERT_OK(child.comm->device()->allocate(4000, self.stream, nullptr, &tensor));
      ASSERT_CUDA(cudaMemsetAsync(tensor->data(), 0, 400, self.stream));
      tensor.reset();
      PYCOMM_ASSERT_OK(child.comm->close(nullptr));
    }
  });
}

// Graphs should be destroyed before, but a replay must not touch what is somebody else's by then.
TEST(DeviceClosed, WhatWasCapturedIsKept) {
  run_closing(2, [](DeviceRank& self, const OnStream& t, size_t n_bytes) {
    const DeviceRank first = used_child_of(self, t);
    const size_t before = n_bytes_used();
    cudaGraph_t graph = nullptr;
    ASSERT_CUDA(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal));
    PYCOMM_ASSERT_OK(sum(first, t, "peer"));
    ASSERT_CUDA(cudaStreamEndCapture(self.stream, &graph));
    ASSERT_CUDA(cudaGraphDestroy(graph));
    PYCOMM_ASSERT_OK(first.comm->close(nullptr));
    for (int i = 0; i < 2; i++) {
      const DeviceRank next = used_child_of(self, t);
      EXPECT_EQ(n_bytes_used(), before + n_bytes) << i;
      PYCOMM_ASSERT_OK(next.comm->close(nullptr));
    }
  });
}

// A rank that fails closes as others do, and its streams have passed everything.
TEST(DeviceClosed, AfterAFailure) {
  run_closing(2, [](DeviceRank& self, const OnStream& t, size_t) {
    for (int i = 0; i < 3; i++) {
      const DeviceRank child = used_child_of(self, t);
      const size_t before = n_bytes_used();
      PYCOMM_ASSERT_OK(barrier(*self.comm));
      if (self.rank == 1) child.comm->abort("the test says so");
      EXPECT_FALSE(until_failure(child).ok());
      PYCOMM_ASSERT_OK(child.comm->close(nullptr));
      const DeviceRank next = used_child_of(self, t);
      EXPECT_EQ(n_bytes_used(), before);
      PYCOMM_ASSERT_OK(next.comm->close(nullptr));
    }
  });
}

// Scratch that has no room beside it.
TEST(DeviceClosed, IsFreedBeforeACallIsRefused) {
  run_closing(1, [](DeviceRank& self, const OnStream& t, size_t n_bytes) {
    const DeviceRank first = used_child_of(self, t), second = used_child_of(self, t);
    const OnStream large(self.stream, Bytes(900'000));
    const auto in_pieces = [&](int times) {  // packed into scratch
      std::vector<Segment> segments;
      for (int i = 0; i < times; i++)
        for (int k = 0; k < 2; k++) segments.push_back({large.data() + k * 400'004, 100'000});
      return sum(first, Buffer(std::move(segments), 4), "peer");
    };
    PYCOMM_ASSERT_OK(in_pieces(1));  // of 0.8 MB
    ASSERT_EQ(n_bytes, size_t{2} << 20);
    const ScopedEnv all("CUDA_ON_CPU_MEMORY", std::to_string(n_bytes_used() + n_bytes / 2));
    const Status s = in_pieces(2);
    EXPECT_NE(s.message().find("cudaMalloc of 1600000 bytes of scratch"), std::string::npos) << s.message();
    PYCOMM_ASSERT_OK(second.comm->close(nullptr));
    PYCOMM_ASSERT_OK(in_pieces(2));
    PYCOMM_ASSERT_OK(first.comm->close(nullptr));
  });
}

}  // namespace
}  // namespace pycomm
