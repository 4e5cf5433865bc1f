// Graphs: what is captured runs at each replay and only then, in the order that streams and events gave it
// and in no other; and what CUDA does not allow within a capture returns CUDA's error and invalidates it.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_on_cpu/device_buffer.h"
#include "cuda_runtime.h"

namespace {

using cuda_on_cpu::launch;
using cuda_on_cpu::settings;
using Ints = std::vector<int>;

__global__ void add(int* p, int n) { p[threadIdx.x] += n; }
__global__ void copy_to(int* to, const int* from) { to[threadIdx.x] = from[threadIdx.x]; }

// Over seeds: with one, branches begin late now and then.
class Graphs : public testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override {
    settings().seed = GetParam();
    for (auto* s : {&a_, &b_}) ASSERT_EQ(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), cudaSuccess);
    for (auto* e : {&fork_, &join_}) {
      ASSERT_EQ(cudaEventCreateWithFlags(e, cudaEventDisableTiming), cudaSuccess);
    }
  }
  void TearDown() override {
    for (auto s : {a_, b_}) {
      EXPECT_EQ(cudaStreamSynchronize(s), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(s), cudaSuccess);
    }
    for (auto e : {fork_, join_}) EXPECT_EQ(cudaEventDestroy(e), cudaSuccess);
    settings().seed = 0;
    (void)cudaGetLastError();
  }
  cudaError_t begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    return cudaStreamBeginCapture(a_, mode);
  }
  // Ends the capture and makes it executable.
  cudaGraphExec_t end() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(a_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess) << "the executable graph needs it no longer";
    return exec;
  }
  cudaError_t end_fails() {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(a_, &graph);
    EXPECT_EQ(graph, nullptr);
    return error;
  }
  cudaError_t order(cudaStream_t first, cudaStream_t second, cudaEvent_t event) {
    const cudaError_t error = cudaEventRecord(event, first);
    return error == cudaSuccess ? cudaStreamWaitEvent(second, event, 0) : error;
  }
  cudaStreamCaptureStatus status(cudaStream_t stream) {
    cudaStreamCaptureStatus now;
    EXPECT_EQ(cudaStreamIsCapturing(stream, &now), cudaSuccess);
    return now;
  }
  cudaError_t add_on(cudaStream_t stream, DeviceBuffer<int>& p, int n = 1) {
    return launch(false, add, dim3(1), dim3(static_cast<unsigned>(p.size())), 0, stream, p.data(), n);
  }

  cudaStream_t a_ = nullptr, b_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Seeds, Graphs, testing::Values(0, 1, 2));

TEST_P(Graphs, WhatIsCapturedRunsAtEveryReplayAndOnlyThen) {
  DeviceBuffer<int> p(4, 0), q(4, -1);
  int from_host = 10, to_host = 0, n_called = 0;
  ASSERT_EQ(begin(), cudaSuccess);
  EXPECT_EQ(status(a_), cudaStreamCaptureStatusActive);
  int n = 1;
  ASSERT_EQ(add_on(a_, p, n), cudaSuccess);
  n = 100;  // arguments were copied
  ASSERT_EQ(cudaMemsetAsync(q.data(), 0, 2 * sizeof(int), a_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(q.data() + 2, &from_host, sizeof(int), cudaMemcpyHostToDevice, a_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(&to_host, p.data(), sizeof(int), cudaMemcpyDeviceToHost, a_), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(
                a_, [](void* count) { ++*static_cast<int*>(count); }, &n_called),
            cudaSuccess);
  const cudaGraphExec_t exec = end();
  EXPECT_EQ(status(a_), cudaStreamCaptureStatusNone);
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  EXPECT_EQ(p.get(), Ints(4, 0));
  EXPECT_EQ(n_called, 0);
  for (int replay = 1; replay <= 5; ++replay) {
    from_host = 10 * replay;  // read when the copy runs
    ASSERT_EQ(cudaGraphLaunch(exec, a_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
    EXPECT_EQ(p.get(), Ints(4, replay));
    EXPECT_EQ(q.get(), (Ints{0, 0, 10 * replay, -1}));
    EXPECT_EQ(to_host, replay);
    EXPECT_EQ(n_called, replay);
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_P(Graphs, ReplaysLieInTheOrderOfTheirStream) {
  DeviceBuffer<int> p(1, 1), seen(20, -1);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(add_on(a_, p), cudaSuccess);
  const cudaGraphExec_t exec = end();
  for (size_t i = 0; i < seen.size(); ++i) {
    ASSERT_EQ(cudaGraphLaunch(exec, a_), cudaSuccess);
    ASSERT_EQ(launch(false, copy_to, dim3(1), dim3(1), 0, a_, seen.data() + i, p.data()), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(p.data(), static_cast<int>(i), 1, a_), cudaSuccess);  // the lowest byte
  }
  ASSERT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  const Ints got = seen.get();
  EXPECT_EQ(got[0], 2);
  for (int i = 1; i < 20; ++i) EXPECT_EQ(got[static_cast<size_t>(i)], i);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_P(Graphs, ReplaysOfOneGraphFollowEachOtherOnAllStreams) {
  DeviceBuffer<int> p(8, 0);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(add_on(a_, p), cudaSuccess);
  const cudaGraphExec_t exec = end();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(cudaGraphLaunch(exec, i % 2 ? a_ : b_), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess) << "what was launched still runs";
  EXPECT_EQ(p.get(), Ints(8, 20));
}

// a -> b -> a, twice: each copy needs the one before it.
TEST_P(Graphs, EventsOrderNodesAcrossStreams) {
  DeviceBuffer<int> x(2, 0), y(2, 0), z(2, 0), u(2, 0);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(add_on(a_, x), cudaSuccess);
  ASSERT_EQ(order(a_, b_, fork_), cudaSuccess);
  EXPECT_EQ(status(b_), cudaStreamCaptureStatusActive) << "it has joined the capture";
  ASSERT_EQ(launch(false, copy_to, dim3(1), dim3(2), 0, b_, y.data(), x.data()), cudaSuccess);
  ASSERT_EQ(order(b_, a_, join_), cudaSuccess);
  ASSERT_EQ(launch(false, copy_to, dim3(1), dim3(2), 0, a_, z.data(), y.data()), cudaSuccess);
  ASSERT_EQ(order(a_, b_, fork_), cudaSuccess) << "an event may be recorded again";
  ASSERT_EQ(launch(false, copy_to, dim3(1), dim3(2), 0, b_, u.data(), z.data()), cudaSuccess);
  ASSERT_EQ(order(b_, a_, join_), cudaSuccess);
  const cudaGraphExec_t exec = end();
  EXPECT_EQ(status(b_), cudaStreamCaptureStatusNone);
  for (int i = 1; i <= 20; ++i) {
    ASSERT_EQ(cudaGraphLaunch(exec, a_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
    EXPECT_EQ(u.get(), Ints(2, i));
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

// Two that wait for each other.
class Meeting {
 public:
  static void come(void* meeting) { static_cast<Meeting*>(meeting)->come(); }

 private:
  void come() {
    std::unique_lock lock(mutex_);
    const int round = n_came_++ / 2;
    changed_.notify_all();
    changed_.wait(lock, [&] { return n_came_ >= 2 * (round + 1); });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  int n_came_ = 0;
};

TEST_P(Graphs, BranchesRunSideBySide) {
  Meeting meeting;
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(order(a_, b_, fork_), cudaSuccess) << "a fork before the first node";
  ASSERT_EQ(cudaLaunchHostFunc(a_, Meeting::come, &meeting), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(b_, Meeting::come, &meeting), cudaSuccess);  // would hang after a's
  ASSERT_EQ(order(b_, a_, join_), cudaSuccess);
  const cudaGraphExec_t exec = end();
  for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(exec, b_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_P(Graphs, AGraphInACapturedStreamIsANode) {
  DeviceBuffer<int> p(3, 0);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(add_on(a_, p), cudaSuccess);
  const cudaGraphExec_t inner = end();
  ASSERT_EQ(begin(), cudaSuccess);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(inner, a_), cudaSuccess);
  ASSERT_EQ(add_on(a_, p, 10), cudaSuccess);
  const cudaGraphExec_t outer = end();
  EXPECT_EQ(cudaGraphExecDestroy(inner), cudaSuccess);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(outer, a_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  EXPECT_EQ(p.get(), Ints(3, 24));
  EXPECT_EQ(cudaGraphExecDestroy(outer), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(outer, a_), cudaErrorInvalidValue);
}

// External events order replays and other streams, in both directions, though neither is captured with the
// other.
TEST_P(Graphs, ExternalEventsOrderReplaysAndOtherStreams) {
  DeviceBuffer<int> p(1, 0), seen(1, -1);
  cudaEvent_t before = fork_, after = join_;
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(a_, before, cudaEventWaitExternal), cudaSuccess);
  ASSERT_EQ(launch(false, copy_to, dim3(1), dim3(1), 0, a_, seen.data(), p.data()), cudaSuccess);
  ASSERT_EQ(cudaEventRecordWithFlags(after, a_, cudaEventRecordExternal), cudaSuccess);
  const cudaGraphExec_t exec = end();
  for (int i = 1; i <= 10; ++i) {
    Meeting meeting;
    ASSERT_EQ(cudaLaunchHostFunc(b_, Meeting::come, &meeting), cudaSuccess);  // holds b up
    ASSERT_EQ(add_on(b_, p), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(before, b_), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, a_), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(after), cudaErrorNotReady) << "launched, so recorded, and waiting for b";
    ASSERT_EQ(cudaStreamWaitEvent(b_, after, 0), cudaSuccess);
    ASSERT_EQ(add_on(b_, seen, 100), cudaSuccess);
    Meeting::come(&meeting);
    ASSERT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
    EXPECT_EQ(seen.get(), Ints(1, 100 + i));
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(a_, before, cudaEventWaitExternal), cudaErrorInvalidValue) << "not captured";
  EXPECT_EQ(cudaEventRecordWithFlags(after, a_, cudaEventRecordExternal), cudaErrorInvalidValue);
}

// ---- what is not allowed

TEST_P(Graphs, AForkThatIsNotJoined) {
  DeviceBuffer<int> p(1, 0);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(order(a_, b_, fork_), cudaSuccess);
  ASSERT_EQ(add_on(b_, p), cudaSuccess);
  EXPECT_EQ(end_fails(), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(status(b_), cudaStreamCaptureStatusNone);
  ASSERT_EQ(add_on(b_, p), cudaSuccess);
  EXPECT_EQ(p.get(), Ints(1, 1));
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(order(a_, b_, fork_), cudaSuccess) << "without work there is nothing to join";
  EXPECT_EQ(cudaGraphExecDestroy(end()), cudaSuccess);
}

TEST_P(Graphs, WaitingForWhatIsNotCaptured) {
  ASSERT_EQ(cudaEventRecord(fork_, b_), cudaSuccess);
  ASSERT_EQ(begin(), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(a_, fork_, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(status(a_), cudaStreamCaptureStatusInvalidated);
  EXPECT_EQ(cudaEventRecord(fork_, a_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, a_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaEventSynchronize(fork_), cudaSuccess) << "what was recorded before";
}

TEST_P(Graphs, TwoCapturesDoNotMerge) {
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(b_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(order(a_, b_, fork_), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamEndCapture(b_, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_P(Graphs, TheHostCannotWaitForWhatIsCaptured) {
  const auto invalidates = [&](const auto& call, cudaError_t error) {
    ASSERT_EQ(begin(cudaStreamCaptureModeRelaxed), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(fork_, a_), cudaSuccess);
    EXPECT_EQ(call(), error);
    EXPECT_EQ(cudaGetLastError(), error);
    EXPECT_EQ(status(a_), cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);
  };
  invalidates([&] { return cudaStreamSynchronize(a_); }, cudaErrorStreamCaptureUnsupported);
  invalidates([&] { return cudaStreamQuery(a_); }, cudaErrorStreamCaptureUnsupported);
  invalidates([&] { return cudaDeviceSynchronize(); }, cudaErrorStreamCaptureUnsupported);
  invalidates([&] { return cudaEventSynchronize(fork_); }, cudaErrorCapturedEvent);
  invalidates([&] { return cudaEventQuery(fork_); }, cudaErrorCapturedEvent);
  EXPECT_EQ(cudaEventQuery(fork_), cudaErrorCapturedEvent) << "the capture has ended, the event is the same";
  EXPECT_EQ(cudaStreamWaitEvent(b_, fork_, 0), cudaErrorCapturedEvent);
  ASSERT_EQ(cudaEventRecord(fork_, b_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(fork_), cudaSuccess) << "now it is another one";
}

TEST_P(Graphs, UnsafeCallsDependOnTheModes) {
  void* p = nullptr;
  const auto allocate = [&] {
    const cudaError_t error = cudaMalloc(&p, 8);
    return error != cudaSuccess ? error : cudaFree(p);
  };
  const auto on_another_thread = [](const auto& fn) {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = fn(); }).join();
    return error;
  };
  const auto relaxed = [&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
    const cudaError_t error = allocate();
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    return error;
  };
  ASSERT_EQ(begin(cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(allocate(), cudaSuccess);
  EXPECT_EQ(on_another_thread(allocate), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(end()), cudaSuccess);

  ASSERT_EQ(begin(cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(on_another_thread(allocate), cudaSuccess);
  EXPECT_EQ(relaxed(), cudaSuccess);
  EXPECT_EQ(allocate(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);

  ASSERT_EQ(begin(cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(on_another_thread(relaxed), cudaSuccess);
  EXPECT_EQ(status(a_), cudaStreamCaptureStatusActive);
  EXPECT_EQ(on_another_thread(allocate), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);

  DeviceBuffer<int> q(1, 0);
  int host = 0;
  for (const auto& call : std::vector<std::function<cudaError_t()>>{
           [&] { return cudaMemcpy(&host, q.data(), 4, cudaMemcpyDeviceToHost); },
           [&] { return cudaMemset(q.data(), 0, 4); }, [&] { return cudaFree(q.data()); },
           [&] { return cudaHostAlloc(&p, 8, 0); }, [&] { return cudaHostRegister(&host, 4, 0); },
           [&] { return cudaStreamQuery(b_); }}) {
    ASSERT_EQ(begin(), cudaSuccess);
    EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);
  }
}

TEST_P(Graphs, TheLegacyStreamWaitsForBlockingStreamsOnly) {
  DeviceBuffer<int> p(1, 0);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(add_on(nullptr, p), cudaSuccess) << "a_ is not blocking";
  EXPECT_EQ(cudaGraphExecDestroy(end()), cudaSuccess);
  cudaStream_t blocking;
  cudaGraph_t graph = nullptr;
  cudaStreamCaptureStatus now;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &now), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(status(blocking), cudaStreamCaptureStatusActive);
  EXPECT_EQ(add_on(nullptr, p), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(p.get(), Ints(1, 1));
}

TEST_P(Graphs, ACaptureEndsWhereAndByWhomItWasBegun) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(end_fails(), cudaErrorIllegalState) << "it was not begun";
  ASSERT_EQ(begin(), cudaSuccess);
  EXPECT_EQ(begin(), cudaErrorIllegalState) << "it was";
  ASSERT_EQ(order(a_, b_, fork_), cudaSuccess);
  EXPECT_EQ(cudaStreamEndCapture(b_, &graph), cudaErrorStreamCaptureUnmatched);
  std::thread([&] { EXPECT_EQ(end_fails(), cudaErrorStreamCaptureWrongThread); }).join();
  EXPECT_EQ(cudaGraphExecDestroy(end()), cudaSuccess);
  ASSERT_EQ(begin(cudaStreamCaptureModeRelaxed), cudaSuccess);
  std::thread([&] { EXPECT_EQ(cudaGraphExecDestroy(end()), cudaSuccess); }).join();
}

TEST_P(Graphs, AStreamThatIsDestroyedWhileItIsCaptured) {
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(begin(), cudaSuccess);
  ASSERT_EQ(order(a_, other, fork_), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(end_fails(), cudaErrorStreamCaptureInvalidated);
}

}  // namespace
