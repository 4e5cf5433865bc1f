// Memory that peers reach is handed out again when the streams that use it have passed, and not before.
#include <thread>

#include "cuda/captured_graph.h"
#include "cuda/device_ranks.h"
#include "grid.h"  // the shim's device errors

namespace pycomm {
namespace {

constexpr size_t kArenaBytes = 1 << 20;  // device_ranks.h; in fact half as much again
constexpr size_t kMost = 1'000'000;      // no two of these fit

struct OtherStream {
  OtherStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
  ~OtherStream() {
    (void)cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
  }
  cudaStream_t stream = nullptr;
};

Status allocate(const DeviceRank& self, size_t n_bytes, cudaStream_t stream,
                std::unique_ptr<DeviceBlock>* out) {
  return self.comm->device()->allocate(n_bytes, stream, nullptr, out);
}

std::byte* address(const DeviceBlock& block) { return static_cast<std::byte*>(block.data()); }

// The communicator's device, which its first call makes.
void with_device(int n, const std::function<void(DeviceRank&)>& fn) {
  run_device_ranks(n, [&](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    PYCOMM_ASSERT_OK(sum(self, t, "peer"));
    (void)t.get();
    fn(self);
  });
}

// What lies in [gone, gone + kMost) is not handed out: neither a part of it, nor, with an error, the whole.
// Once `latch` is open it is.
void expect_kept_until(const DeviceRank& self, const std::byte* gone, cudaStream_t stream, Latch& latch) {
  std::unique_ptr<DeviceBlock> block;
  for (const size_t n : {size_t{1000}, size_t{200'000}}) {
    PYCOMM_ASSERT_OK(allocate(self, n, stream, &block));
    EXPECT_TRUE(address(*block) + n <= gone || address(*block) >= gone + kMost);
    block.reset();
  }
  std::atomic<bool> open{false};
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that allocate() has to wait
    open = true;
    latch.open();
  });
  const Status s = allocate(self, kMost, stream, &block);
  const bool was_open = open;
  opens.join();
  PYCOMM_ASSERT_OK(s.clone());
  EXPECT_TRUE(was_open);
  EXPECT_EQ(block->data(), gone);
}

TEST(DeviceArena, AStreamThatUsesABlockKeepsIt) {
  with_device(1, [](DeviceRank& self) {
    const OtherStream other;
    for (const bool is_its_own : {true, false}) {
      std::unique_ptr<DeviceBlock> block;
      PYCOMM_ASSERT_OK(allocate(self, kMost, is_its_own ? self.stream : other.stream, &block));
      if (!is_its_own) block->used_on(self.stream);
      const std::byte* const gone = address(*block);
      Latch latch;
      latch.close(self.stream);
      block.reset();
      expect_kept_until(self, gone, other.stream, latch);
    }
  });
}

// A call whose tensor dies before the device has come to it; no stream that the block knows is busy.
TEST(DeviceArena, ACallThatIsUnderWayKeepsItsTensor) {
  with_device(2, [](DeviceRank& self) {
    const OtherStream other;
    std::unique_ptr<DeviceBlock> block;
    PYCOMM_ASSERT_OK(allocate(self, kMost, other.stream, &block));
    const std::byte* const gone = address(*block);
    ASSERT_CUDA(cudaMemsetAsync(block->data(), 0, kMost, self.stream));
    Latch latch;
    latch.close(self.stream);
    auto r = std::make_unique<Request>(sum_of(self, Buffer(address(*block), kMost / 4)));
    PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), "peer"));
    const std::shared_ptr<Work> work = self.comm->start(std::move(r));
    bool finished = false;
    PYCOMM_ASSERT_OK(work->wait(-1, nullptr, &finished));  // until it is issued
    block.reset();
    expect_kept_until(self, gone, other.stream, latch);
    PYCOMM_ASSERT_OK(work->end()->wait(20, nullptr));
  });
}

// No longer than it says, and not at all for what will never fit. The error tells what is still in use.
TEST(DeviceArena, ItWaitsForAWhileOnly) {
  with_device(1, [](DeviceRank& self) {
    std::unique_ptr<DeviceBlock> block, another;
    PYCOMM_ASSERT_OK(allocate(self, kMost, self.stream, &block));
    Latch latch;
    latch.close(self.stream);
    block.reset();
    double begin_s = monotonic_s();
    const Status large = allocate(self, 4 * kArenaBytes, self.stream, &another);
    EXPECT_EQ(large.code(), Code::kSystem) << large.message();
    EXPECT_LT(monotonic_s() - begin_s, 2);
    begin_s = monotonic_s();
    const Status s = allocate(self, kMost, self.stream, &another);
    EXPECT_GT(monotonic_s() - begin_s, 4);
    EXPECT_LT(monotonic_s() - begin_s, 20);
    EXPECT_EQ(s.code(), Code::kSystem);
    EXPECT_NE(
        s.message().find("1000000 bytes more are of tensors that are gone, and streams have not passed"),
        std::string::npos)
        << s.message();
    latch.open();
    PYCOMM_ASSERT_OK(allocate(self, kMost, self.stream, &another));
  });
}

TEST(DeviceArena, AfterClose) {
  with_device(2, [](DeviceRank& self) {
    const OtherStream other;
    std::unique_ptr<DeviceBlock> idle, busy;
    PYCOMM_ASSERT_OK(allocate(self, 1000, self.stream, &idle));
    PYCOMM_ASSERT_OK(allocate(self, 1000, other.stream, &busy));
    PYCOMM_ASSERT_OK(self.comm->close(nullptr));
    Latch latch;
    latch.close(other.stream);
    ASSERT_CUDA(cudaMemsetAsync(busy->data(), 1, 1000, other.stream));
    std::thread([&] {
      busy.reset();
      idle.reset();
    }).join();
    latch.open();
    ASSERT_CUDA(cudaStreamSynchronize(other.stream));
  });
}

// Each writes its own number, reads it, and lets go, all on a stream of its own, with nothing waited for.
TEST(DeviceArena, SeveralThreads) {
  with_device(1, [](DeviceRank& self) {
    constexpr int kThreads = 4, kTimes = 40;
    constexpr size_t kBytes = 300'000;  // one each, and one more
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; t++) {
      threads.emplace_back([&self, t] {
        ASSERT_CUDA(cudaSetDevice(self.device));
        const OtherStream own;
        std::vector<Bytes> seen(kTimes, Bytes(kBytes));
        for (int i = 0; i < kTimes; i++) {
          std::unique_ptr<DeviceBlock> block;
          PYCOMM_ASSERT_OK(allocate(self, kBytes, own.stream, &block));
          ASSERT_CUDA(cudaMemsetAsync(block->data(), t * kTimes + i, kBytes, own.stream));
          ASSERT_CUDA(cudaMemcpyAsync(seen[static_cast<size_t>(i)].data(), block->data(), kBytes,
                                      cudaMemcpyDeviceToHost, own.stream));
        }
        ASSERT_CUDA(cudaStreamSynchronize(own.stream));
        for (int i = 0; i < kTimes; i++)
          EXPECT_EQ(seen[static_cast<size_t>(i)], Bytes(kBytes, static_cast<uint8_t>(t * kTimes + i)))
              << t << " " << i;
      });
    }
    for (std::thread& t : threads) t.join();
  });
}

// A graph's replays use it at any time: it is not handed out any more.
TEST(DeviceArena, WhatGoesWithinACaptureIsKept) {
  for (const bool by_a_call : {false, true}) {
    with_device(2, [&](DeviceRank& self) {
      const OtherStream other;
      std::unique_ptr<DeviceBlock> block, another;
      PYCOMM_ASSERT_OK(allocate(self, kMost, by_a_call ? other.stream : self.stream, &block));
      CapturedGraph graph;
      PYCOMM_ASSERT_OK(graph.capture(self.stream, [&] {
        if (by_a_call) PYCOMM_RETURN_IF_ERROR(sum(self, Buffer(address(*block), 100), "peer"));
        block.reset();
        const Status s = allocate(self, kMost, other.stream, &another);
        EXPECT_EQ(s.code(), Code::kSystem);
        return Status();
      }));
      PYCOMM_ASSERT_OK(barrier(*self.comm, kDeadlineS));
      graph.reset();
      const double begin_s = monotonic_s();
      const Status s = allocate(self, kMost, other.stream, &another);
      EXPECT_LT(monotonic_s() - begin_s, 2);
      EXPECT_NE(s.message().find("1000000 bytes more are kept until the process ends"), std::string::npos)
          << s.message();
      for (int i = 0; i < 3; i++) {  // others come and go, as before
        PYCOMM_ASSERT_OK(allocate(self, 300'000, self.stream, &another));
        another.reset();
      }
    });
  }
}

TEST(DeviceArena, AFailedDeviceIsNotWaitedFor) {
  with_device(1, [](DeviceRank& self) {
    std::unique_ptr<DeviceBlock> block, another;
    PYCOMM_ASSERT_OK(allocate(self, kMost, self.stream, &block));
    cuda_on_cpu::break_device(0, cudaErrorIllegalAddress);
    block.reset();
    const double begin_s = monotonic_s();
    const Status s = allocate(self, kMost, self.stream, &another);
    cuda_on_cpu::break_device(0, cudaSuccess);
    EXPECT_LT(monotonic_s() - begin_s, 2);
    EXPECT_NE(s.message().find("or the device had failed"), std::string::npos) << s.message();
  });
}

}  // namespace
}  // namespace pycomm
