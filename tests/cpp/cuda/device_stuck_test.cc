// Devices that do not come to a call, or do not end it: who is named, and close() returns all the same.
#include <cstdlib>
#include <cstring>

#include "cuda/device_ranks.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv
#include "transport/cuda/peer_memory.h"

namespace pycomm {
namespace {

// Holds a stream up until it is opened.
#if defined(__SANITIZE_THREAD__)  // where a first call takes longer than a second
constexpr double kLimitS = 4;
#else
constexpr double kLimitS = 1;
#endif

struct Gate {
  std::atomic<bool> open{false};

  static void wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void close(cudaStream_t stream) { ASSERT_CUDA(cudaLaunchHostFunc(stream, &Gate::wait, this)); }
};

// Also where the test fails, and its stream is waited for.
struct OpenAtTheEnd {
  Gate* gate;
  ~OpenAtTheEnd() {
    if (gate != nullptr) gate->open = true;
  }
};

void expect_close_in_time(DeviceRank& self) {
  const double begin_s = monotonic_s();
  PYCOMM_ASSERT_OK(self.comm->close(nullptr));
  EXPECT_LT(monotonic_s() - begin_s, 15) << "rank " << self.rank;
}

// Rank 1's second operation of NCCL's never ends, and its abort hangs: the device is stuck for good, and the
// process ends here. `closing` gets stuck, and closes.
void while_abort_hangs(void (*closing)(DeviceRank& self, const OnStream& t)) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=1:1,abort_hangs=1");
  const ScopedEnv old("LOOPBACK_NCCL_VERSION", "22703");  // it has no ncclCommRevoke
  static OnStream* tensors[2];                            // for good: the operation may write them
  run_device_ranks(
      2,
      [closing](DeviceRank& self) {
        OnStream* const t = tensors[self.rank] = new OnStream(self.stream, Bytes(400));
        closing(self, *t);
        ASSERT_CUDA(cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking));  // the old one is stuck
      },
      kLimitS);
  std::exit(testing::Test::HasFailure() ? 1 : 0);
}

void get_stuck(const DeviceRank& self, const OnStream& t) {
  PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
  PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
  const Status s = until_failure(self);
  EXPECT_NE(s.message().find("has not ended in time"), std::string::npos) << s.message();
}

void close_while_abort_hangs() {
  while_abort_hangs([](DeviceRank& self, const OnStream& t) {
    ASSERT_NO_FATAL_FAILURE(get_stuck(self, t));
    expect_close_in_time(self);
  });
}

// Its own calls have passed: what keeps the device's stream is not its affair.
void close_beside_one_that_is_stuck() {
  while_abort_hangs([](DeviceRank& self, const OnStream& t) {
    PYCOMM_ASSERT_OK(sum(self, t, "peer"));
    DeviceRank stuck = self;
    PYCOMM_ASSERT_OK(self.comm->split(0, 0, 0, nullptr, &stuck.comm));
    ASSERT_NO_FATAL_FAILURE(get_stuck(stuck, t));
    expect_close_in_time(self);
    expect_close_in_time(stuck);
  });
}

// In a process of its own, whose device is stuck for good; it can exit.
TEST(DeviceStuckDeathTest, CloseWhenNcclsAbortHangs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const double begin_s = monotonic_s();
  EXPECT_EXIT(close_while_abort_hangs(), testing::ExitedWithCode(0),
              "rank 1 closed a communicator whose calls on CUDA device 1 do not end.*ncclCommAbort.*did not "
              "return");
  EXPECT_LT(monotonic_s() - begin_s, 30);
}

TEST(DeviceStuckDeathTest, CloseBesideOneThatIsStuck) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const double begin_s = monotonic_s();
  EXPECT_EXIT(close_beside_one_that_is_stuck(), testing::ExitedWithCode(0),
              "calls on CUDA device 1 do not end");
  EXPECT_LT(monotonic_s() - begin_s, 40);
}

// Of a rank alone, which could be freed, but for the device, for which cudaFree would wait.
std::shared_ptr<PeerMemory> memory_alone(int device) {
  std::shared_ptr<PeerMemory> out;
  const Status s = PeerMemory::create(
      {device, 0, 1, 0, 0, 1 << 20, nullptr, {}},
      [](const void* mine, size_t n_bytes, void* all) {
        std::memcpy(all, mine, n_bytes);
        return Status();
      },
      &out);
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

TEST(DeviceStuck, CloseWhenTheCallersStreamIsStuck) {
  for (const char* way : {"peer", "nccl"}) {
    Gate gate;
    run_device_ranks(
        2,
        [&](DeviceRank& self) {
          OnStream t(self.stream, Bytes(400));
          std::shared_ptr<PeerMemory> alone = self.rank == 1 ? memory_alone(1) : nullptr;
          PYCOMM_ASSERT_OK(sum(self, t, way));
          (void)t.get();
          if (self.rank == 1) gate.close(self.stream);
          PYCOMM_ASSERT_OK(sum(self, t, way));
          EXPECT_FALSE(until_failure(self).ok());
          expect_close_in_time(self);
          PeerMemory::retire(std::move(alone));
          if (self.rank == 1) PeerMemory::free_retired(1);  // as a call does that finds no memory
          if (self.rank == 1) gate.open = true;             // what was left behind runs now, and harms nobody
        },
        kLimitS);
  }
}

// A rank whose stream is held up before the call keeps all others: it is named on all of them, by kernels
// that wait for it or by how far each device is, and by nobody's own limit but the call's.
TEST(DeviceStuck, WhoDoesNotComeIsNamed) {
  for (const char* way : {"peer_one_shot", "peer_two_shot", "nccl", "ring"}) {
    Gate gate;
    const double begin_s = monotonic_s();
    run_device_ranks(
        3,
        [&](DeviceRank& self) {
          OnStream t(self.stream, Bytes(400));
          const OpenAtTheEnd open{self.rank == 1 ? &gate : nullptr};
          PYCOMM_ASSERT_OK(sum(self, t, way));
          (void)t.get();
          if (self.rank == 1) gate.close(self.stream);
          PYCOMM_ASSERT_OK(sum(self, t, way));
          const Status s = until_failure(self);
          EXPECT_EQ(s.code(), Code::kTimeout) << s.message();
          const std::string who = self.comm->describe(1).substr(0, 13);  // the state may be another one then
          EXPECT_EQ(who, "rank 1 (host ");
          const bool named = s.message().find("has not come to it on " + who) != std::string::npos ||
                             s.message().find(": " + who) != std::string::npos;
          EXPECT_TRUE(named) << way << ", rank " << self.rank << ": " << s.message();
          for (const int other : {0, 2}) {
            EXPECT_EQ(s.message().find(format("come to it on rank %d", other)), std::string::npos)
                << s.message();
          }
        },
        kLimitS);
    EXPECT_LT(monotonic_s() - begin_s, 20) << way;
  }
}

// The root waits for rank 1, whose operation stalls; rank 2 has sent all that it had to.
TEST(DeviceStuck, WhoHasNotEndedIsNamed) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=1:1");
  run_device_ranks(
      3,
      [&](DeviceRank& self) {
        OnStream t(self.stream, Bytes(400));
        for (int i = 0; i < 2; i++) {
          Request r = self.request(CallKind::kReduce, DType::kFloat32, ReduceOp::kSum, 100, 0);
          r.call.in = Buffer(t.data(), 100);
          if (self.rank == 0) r.call.out = r.call.in;
          PYCOMM_ASSERT_OK(self.call(&r, "nccl"));
          if (i == 0) (void)t.get();
        }
        if (self.rank == 2) (void)t.get();
        const Status s = self.rank == 2 ? barrier(*self.comm, 20) : until_failure(self);
        EXPECT_FALSE(s.ok());
        const size_t at = s.message().find("it has ended on other ranks, but not on rank 0 (host ");
        ASSERT_NE(at, std::string::npos) << s.message();
        EXPECT_NE(s.message().find("(1 of 2 calls passed), rank 1 (host ", at), std::string::npos)
            << s.message();
        EXPECT_EQ(s.message().find("rank 2 (host ", at), std::string::npos) << s.message();
      },
      kLimitS);
}

// Nobody can tell: all devices are in it.
TEST(DeviceStuck, WhenAllAreInIt) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=1:1");
  run_device_ranks(
      3,
      [&](DeviceRank& self) {
        OnStream t(self.stream, Bytes(400));
        PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
        PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
        const Status s = until_failure(self);
        EXPECT_NE(s.message().find("the devices of all ranks are in it"), std::string::npos) << s.message();
      },
      kLimitS);
}

}  // namespace
}  // namespace pycomm
