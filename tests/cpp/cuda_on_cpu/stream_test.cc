// Streams run beside the host and beside each other; only their own order, events and synchronisation order
// them. A Gate is a task that keeps a stream busy until the test opens it, so nothing here depends on time.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "cuda_on_cpu/device_buffer.h"
#include "cuda_runtime.h"

namespace {

class Gate {
 public:
  ~Gate() { open(); }
  void close(cudaStream_t stream) {
    ASSERT_EQ(cudaLaunchHostFunc(
                  stream, [](void* gate) { static_cast<Gate*>(gate)->pass(); }, this),
              cudaSuccess);
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return open_; });
  }
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

class Streams : public testing::Test {
 protected:
  void SetUp() override {
    for (auto* s : {&a_, &b_}) ASSERT_EQ(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
  }
  void TearDown() override {
    gate_.open();
    for (auto s : {a_, b_}) {
      EXPECT_EQ(cudaStreamSynchronize(s), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(s), cudaSuccess);
    }
    EXPECT_EQ(cudaEventDestroy(event_), cudaSuccess);
  }
  cudaStream_t a_ = nullptr, b_ = nullptr;
  cudaEvent_t event_ = nullptr;
  Gate gate_;
};

__global__ void add_one(int* p) { p[threadIdx.x] += 1; }
__global__ void copy_to(int* to, const int* from) { to[threadIdx.x] = from[threadIdx.x]; }

TEST_F(Streams, OverlapWithTheHostAndEachOther) {
  gate_.close(a_);
  EXPECT_EQ(cudaStreamQuery(a_), cudaErrorNotReady);
  DeviceBuffer<int> p(8, 0);  // uses the null stream, which waits for nobody
  ASSERT_EQ(cuda_on_cpu::launch(false, add_one, dim3(1), dim3(8), 0, b_, p.data()), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);  // would hang if b waited for a
  EXPECT_EQ(cudaStreamQuery(b_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(a_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  EXPECT_EQ(p.get(), std::vector<int>(8, 1));
}

TEST_F(Streams, OneStreamKeepsItsOrder) {
  DeviceBuffer<int> p(4, 0);
  gate_.close(a_);
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(cudaMemsetAsync(p.data(), 0, 4 * sizeof(int), a_), cudaSuccess);
    ASSERT_EQ(cuda_on_cpu::launch(false, add_one, dim3(1), dim3(4), 0, a_, p.data()), cudaSuccess);
  }
  gate_.open();
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  EXPECT_EQ(p.get(), std::vector<int>(4, 1));
}

TEST_F(Streams, AnEventOrdersOneStreamAfterAnother) {
  DeviceBuffer<int> from(4, 0), to(4, -1);
  gate_.close(a_);
  ASSERT_EQ(cuda_on_cpu::launch(false, add_one, dim3(1), dim3(4), 0, a_, from.data()), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, a_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b_, event_, 0), cudaSuccess);
  ASSERT_EQ(cuda_on_cpu::launch(false, copy_to, dim3(1), dim3(4), 0, b_, to.data(), from.data()),
            cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(b_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_EQ(to.get(), std::vector<int>(4, 1));
}

#if !defined(CUDA_ON_CPU_TSAN)  // it would report the planted race
TEST_F(Streams, WithoutTheEventTheOtherStreamDoesNotWait) {
  DeviceBuffer<int> from(4, 0), to(4, -1);
  gate_.close(a_);
  ASSERT_EQ(cuda_on_cpu::launch(false, add_one, dim3(1), dim3(4), 0, a_, from.data()), cudaSuccess);
  ASSERT_EQ(cuda_on_cpu::launch(false, copy_to, dim3(1), dim3(4), 0, b_, to.data(), from.data()),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  gate_.open();
  EXPECT_EQ(to.get(), std::vector<int>(4, 0));
}
#endif

TEST_F(Streams, AWaitMeansTheRecordBeforeIt) {
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess) << "never recorded: nothing to wait for";
  ASSERT_EQ(cudaStreamWaitEvent(b_, event_, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);

  ASSERT_EQ(cudaEventRecord(event_, b_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b_, event_, 0), cudaSuccess);
  gate_.close(a_);
  ASSERT_EQ(cudaEventRecord(event_, a_), cudaSuccess);  // later than b's wait, which it must not delay
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
}

// The event is recorded again, on a stream that gets there first: the wait is for the record before it.
TEST_F(Streams, AWaitMeansItsRecordWhateverIsReachedFirst) {
  cudaStream_t waits = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&waits, cudaStreamNonBlocking), cudaSuccess);
  gate_.close(a_);
  ASSERT_EQ(cudaEventRecord(event_, a_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(waits, event_, 0), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, b_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  while (std::chrono::steady_clock::now() < end) ASSERT_EQ(cudaStreamQuery(waits), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaStreamSynchronize(waits), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(waits), cudaSuccess);
}

TEST_F(Streams, DestroyingLetsTheWorkEnd) {
  DeviceBuffer<int> p(4, 0);
  cudaStream_t s;
  cudaEvent_t e;
  ASSERT_EQ(cudaStreamCreate(&s), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&e), cudaSuccess);
  ASSERT_EQ(cuda_on_cpu::launch(false, add_one, dim3(1), dim3(4), 0, s, p.data()), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(e, s), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(e), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(s), cudaSuccess);
  EXPECT_EQ(p.get(), std::vector<int>(4, 1));
}

TEST_F(Streams, ElapsedTimeIsNotNegative) {
  cudaEvent_t from, to;
  ASSERT_EQ(cudaEventCreate(&from), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&to), cudaSuccess);
  float ms = -1;
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaEventRecord(from, a_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(to, a_), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(to), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaSuccess);
  EXPECT_GE(ms, 0);
  EXPECT_EQ(cudaEventDestroy(from), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(to), cudaSuccess);
}

TEST(StreamsDeathTest, ADestroyedStreamIsNotUsed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  cudaStream_t s;
  ASSERT_EQ(cudaStreamCreate(&s), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(s), cudaSuccess);
  EXPECT_DEATH(cudaStreamSynchronize(s), "a stream is used that does not exist");
}

}  // namespace
