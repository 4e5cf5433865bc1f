// NcclComm over the loopback NCCL: making and ending communicators by a deadline, what a group is, and
// faults. Ranks are threads, each on a device of its own.
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

#include "cuda/nccl_ranks.h"
#include "cuda_on_cpu/device_buffer.h"

namespace pycomm {
namespace {

using nccl::NcclComm;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

Status expect(bool ok, const std::string& what) {
  return ok ? Status() : Status::error(Code::kSystem, "not true: " + what);
}
#define REQUIRE(condition) PYCOMM_RETURN_IF_ERROR(expect(condition, #condition))
#define REQUIRE_OK(expr) PYCOMM_RETURN_IF_ERROR(expr)

std::vector<int> numbers(int rank, size_t n) {
  std::vector<int> v(n);
  std::iota(v.begin(), v.end(), rank * 1000);
  return v;
}

// Sends to the right, receives from the left, in one group.
Status shift(NcclRank& me, const DeviceBuffer<int>& from, const DeviceBuffer<int>& to) {
  NcclComm& c = me.comm;
  REQUIRE_OK(c.start_group());
  REQUIRE_OK(c.in_group(
      c.api().send(from.data(), from.size(), nccl::kInt32, (me.rank + 1) % me.n, c.raw(), me.stream),
      "ncclSend"));
  REQUIRE_OK(c.in_group(
      c.api().recv(to.data(), to.size(), nccl::kInt32, (me.rank + me.n - 1) % me.n, c.raw(), me.stream),
      "ncclRecv"));
  return c.end_group(me.patience);
}

TEST(NcclComm, RanksMeetShiftAndPart) {
  for (int n : {1, 2, 3, 5, 8}) {
    run_nccl_ranks(n, [](NcclRank& me) -> Status {
      for (size_t size : {size_t{1}, size_t{7}, size_t{40'000}}) {  // the last is more than a channel holds
        const DeviceBuffer<int> from(numbers(me.rank, size)), to(size, -1);
        REQUIRE_OK(shift(me, from, to));
        REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
        REQUIRE(to.get() == numbers((me.rank + me.n - 1) % me.n, size));
      }
      return Status();
    });
  }
}

TEST(NcclComm, AGroupReturnsWhenItsWorkIsOnTheStream) {
  // A non-blocking communicator connects behind the caller's back; what is put on the stream afterwards must
  // come after the group all the same.
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    const DeviceBuffer<int> from(numbers(me.rank, 5)), to(5, -1), copy(5, -1);
    REQUIRE_OK(shift(me, from, to));
    REQUIRE(cudaMemcpyAsync(copy.data(), to.data(), 20, cudaMemcpyDeviceToDevice, me.stream) == cudaSuccess);
    REQUIRE(ends(me.stream));
    const std::vector<int> got = copy.get();
    // Whatever came of it, the group ends before the buffers go.
    REQUIRE_OK(me.comm.settle(nccl::kInProgress, "the group", me.patience));
    REQUIRE(ends(me.stream));
    REQUIRE(got == numbers(1 - me.rank, 5));
    return Status();
  });
}

TEST(NcclComm, GroupsNest) {
  run_nccl_ranks(3, [](NcclRank& me) -> Status {
    const DeviceBuffer<int> from(numbers(me.rank, 9)), to(9, -1), again(9, -1);
    REQUIRE_OK(me.comm.start_group());
    REQUIRE_OK(shift(me, from, to));
    REQUIRE_OK(shift(me, from, again));
    REQUIRE_OK(me.comm.end_group(me.patience));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    REQUIRE(again.get() == to.get());
    return Status();
  });
}

// Buffers wait for the device when they go, so what hangs is aborted before anything is judged.

TEST(NcclComm, WhatIsNotGroupedWaitsForItself) {
  // Both ranks send first: NCCL's order, and a deadlock, which abort ends.
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    NcclComm& c = me.comm;
    const DeviceBuffer<int> from(numbers(me.rank, 100)), to(100, -1);
    const int peer = 1 - me.rank;
    Status s = c.settle(c.api().send(from.data(), 100, nccl::kInt32, peer, c.raw(), me.stream), "ncclSend",
                        me.patience);
    if (s.ok()) {
      s = c.settle(c.api().recv(to.data(), 100, nccl::kInt32, peer, c.raw(), me.stream), "ncclRecv",
                   me.patience);
    }
    const bool hangs = cudaStreamQuery(me.stream) == cudaErrorNotReady;
    REQUIRE_OK(c.abort());
    REQUIRE_OK(std::move(s));
    REQUIRE(hangs);
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    REQUIRE(to.get() == std::vector<int>(100, -1));
    return Status();
  });
}

TEST(NcclComm, TwoCommunicatorsInDifferentOrdersHang) {
  const nccl::UniqueId ids[2] = {new_id(), new_id()};
  run_threads(2, [&](int r) -> Status {
    NcclRank one[2];
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    for (int i = 0; i < 2; i++) {
      one[i].rank = r;
      one[i].n = 2;
      one[i].stream = stream;
      REQUIRE_OK(NcclComm::init(ids[i], 2, r, r, one[i].patience, &one[i].comm));
    }
    const DeviceBuffer<int> from(numbers(r, 10)), to(10, -1);
    Status s = shift(one[0], from, to);
    if (s.ok()) s = shift(one[1], from, to);
    const bool same_order_ends = s.ok() && cudaStreamSynchronize(stream) == cudaSuccess;
    if (s.ok()) s = shift(one[r], from, to);
    if (s.ok()) s = shift(one[1 - r], from, to);
    const bool hangs = cudaStreamQuery(stream) == cudaErrorNotReady;
    // What is first on this rank's stream first: the other is behind it, and NCCL waits for its end.
    for (const int i : {r, 1 - r}) REQUIRE_OK(one[i].comm.abort());
    REQUIRE_OK(std::move(s));
    REQUIRE(same_order_ends && hangs);
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
    return Status();
  });
}

TEST(NcclComm, ARankThatDoesNotComeIsTimedOut) {
  const nccl::UniqueId id = new_id();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  NcclComm comm;
  const auto began = Clock::now();
  const Status s = NcclComm::init(id, 2, 0, 0, {0.3, {}}, &comm);
  EXPECT_EQ(s.code(), Code::kTimeout);
  EXPECT_EQ(s.message(),
            "ncclCommInitRankConfig, rank 0 of 2 on device 0: not done after 0.3 s; some rank has not made "
            "the same call, "
            "or is gone");
  EXPECT_LT(seconds_since(began), 10);
  EXPECT_FALSE(comm.valid());
}

TEST(NcclComm, WhoWaitsCanBeInterrupted) {
  const nccl::UniqueId id = new_id();
  NcclComm comm;
  const auto interrupt = [] { return Status::error(Code::kInterrupt, "Ctrl-C"); };
  const Status s = NcclComm::init(id, 2, 0, 0, {60, interrupt}, &comm);
  EXPECT_EQ(s.code(), Code::kInterrupt);
}

TEST(NcclComm, ADeviceOfTwoRanksIsRefused) {
  const nccl::UniqueId id = new_id();
  run_threads(2, [&](int r) -> Status {
    REQUIRE(cudaSetDevice(3) == cudaSuccess);
    NcclComm comm;
    const Status s = NcclComm::init(id, 2, r, 3, {20, {}}, &comm);
    REQUIRE(!s.ok() && s.message().find("Duplicate GPU detected: rank") != std::string::npos);
    return Status();
  });
}

TEST(NcclComm, RanksMayShareADeviceWhenAskedTo) {
  const ScopedEnv shared("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  const nccl::UniqueId id = new_id();
  run_threads(2, [&](int r) -> Status {
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    NcclRank me;
    me.rank = r;
    me.n = 2;
    REQUIRE_OK(NcclComm::init(id, 2, r, 0, me.patience, &me.comm));
    REQUIRE(cudaStreamCreate(&me.stream) == cudaSuccess);
    const DeviceBuffer<int> from(numbers(r, 10)), to(10, -1);
    REQUIRE_OK(shift(me, from, to));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    REQUIRE(cudaStreamDestroy(me.stream) == cudaSuccess);
    return me.comm.finalize(me.patience);
  });
}

TEST(NcclComm, ShrinkGoesOnWithoutARank) {
  run_nccl_ranks(4, [](NcclRank& me) -> Status {
    const DeviceBuffer<int> from(numbers(me.rank, 10)), to(10, -1);
    REQUIRE(me.comm.can_shrink());
    if (me.rank == 2) return Status();  // it is "lost": the others hang in a shift, and end it
    REQUIRE_OK(shift(me, from, to));
    const int lost[] = {2};
    NcclRank rest;
    REQUIRE_OK(me.comm.shrink(lost, true, me.patience, &rest.comm));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    REQUIRE(rest.comm.n_ranks() == 3 && rest.comm.rank() == (me.rank == 3 ? 2 : me.rank));
    rest.rank = rest.comm.rank();
    rest.n = 3;
    rest.stream = me.stream;
    REQUIRE_OK(shift(rest, from, to));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    REQUIRE(to.get()[0] == std::vector<int>({3000, 0, -1, 1000})[static_cast<size_t>(me.rank)]);
    REQUIRE_OK(rest.comm.finalize(me.patience));
    return me.comm.abort();
  });
}

TEST(NcclComm, RevokeEndsWhatIsUnderWay) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    REQUIRE(me.comm.can_revoke());
    const DeviceBuffer<int> from(numbers(me.rank, 10)), to(10, -1);
    if (me.rank == 1) return Status();
    REQUIRE_OK(shift(me, from, to));
    REQUIRE_OK(me.comm.revoke(me.patience));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    const Status s = shift(me, from, to);
    REQUIRE(!s.ok() && s.message().find("the communicator was revoked") != std::string::npos);
    return me.comm.abort();
  });
}

TEST(NcclComm, AnAsynchronousErrorIsSeenAndNamed) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "error=1:2");
  run_nccl_ranks(3, [](NcclRank& me) -> Status {
    const DeviceBuffer<int> from(numbers(me.rank, 10)), to(10, -1);
    for (int i = 0; i < 2; i++) REQUIRE_OK(shift(me, from, to));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    Status issued = shift(me, from, to);
    Status s, next;
    if (me.rank == 1) {
      const auto began = Clock::now();
      while (s.ok() && seconds_since(began) < 20) s = me.comm.async_error();
      next = shift(me, from, to);
    }
    REQUIRE_OK(me.comm.abort());
    REQUIRE(issued.ok() || me.rank == 1);  // from 2.24 on the group may end with it
    if (me.rank == 1) {
      REQUIRE(s.code() == Code::kPeerLost);
      REQUIRE(s.message() ==
              "an operation that was under way failed, rank 1 of 3 on device 1: NCCL 2.32.3: remote process "
              "exited or there "
              "was a network error (planted by LOOPBACK_NCCL_FAULT)");
      REQUIRE(!next.ok());  // it stays
    }
    return Status();
  });
}

TEST(NcclComm, AStalledOperationIsEndedByAbort) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=0:1");
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    const DeviceBuffer<int> from(numbers(me.rank, 10)), to(10, -1);
    REQUIRE_OK(shift(me, from, to));
    REQUIRE(cudaStreamSynchronize(me.stream) == cudaSuccess);
    Status issued = shift(me, from, to);
    const Status seen = me.comm.async_error();
    const bool hangs = cudaStreamQuery(me.stream) == cudaErrorNotReady;
    const Status s = me.comm.finalize({0.2, {}});
    REQUIRE_OK(me.comm.abort());
    REQUIRE_OK(std::move(issued));
    REQUIRE(seen.ok() && hangs && s.code() == Code::kTimeout);
    return Status();
  });
}

TEST(NcclComm, AnAbortThatHangsIsLeftBehind) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "abort_hangs=0");
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    const auto began = Clock::now();
    const Status s = me.comm.abort(0.3);
    REQUIRE(seconds_since(began) < 10);
    REQUIRE(!me.comm.valid());
    if (me.rank == 1) return s.clone();
    REQUIRE(s.code() == Code::kTimeout);
    REQUIRE(
        s.message().find("ncclCommAbort, rank 0 of 2 on device 0: did not return within 0.3 s; left are the "
                         "communicator's memory and connections") == 0);
    return Status();
  });
}

TEST(NcclComm, DifferentCallsAreFoundOutByTheLoopback) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    NcclComm& c = me.comm;
    const DeviceBuffer<float> x(100, 1.0f);
    const size_t count = me.rank == 0 ? 100 : 99;
    Status s = c.settle(
        c.api().all_reduce(x.data(), x.data(), count, nccl::kFloat32, nccl::kSum, c.raw(), me.stream),
        "ncclAllReduce", me.patience);
    const auto began = Clock::now();
    while (s.ok() && seconds_since(began) < 20) s = c.async_error();
    REQUIRE_OK(c.abort());  // before x goes, which waits for the device
    return expect(!s.ok(), "the difference was found out");
  });
}

TEST(NcclComm, WrongArgumentsAreNamed) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    NcclComm& c = me.comm;
    const DeviceBuffer<int> x(3, 1);
    REQUIRE_OK(c.start_group());
    const Status s =
        c.in_group(c.api().send(x.data(), 3, nccl::kInt32, 2, c.raw(), me.stream), "ncclSend to rank 2");
    REQUIRE(s.code() == Code::kValue);
    REQUIRE(s.message().find("ncclSend to rank 2, rank ") == 0 &&
            s.message().find("(no such rank)") != std::string::npos);
    const DeviceBuffer<int> from(numbers(me.rank, 4)), to(4, -1);
    return shift(me, from, to);  // the group was closed
  });
}

TEST(NcclComm, MovingLeavesNothingBehind) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    NcclComm other = std::move(me.comm);
    REQUIRE(!me.comm.valid() && other.valid() && other.rank() == me.rank && other.n_ranks() == 2);
    me.comm = std::move(other);
    REQUIRE(me.comm.valid() && !other.valid());
    REQUIRE_OK(other.finalize(me.patience));
    return Status();
  });
}

}  // namespace
}  // namespace pycomm
