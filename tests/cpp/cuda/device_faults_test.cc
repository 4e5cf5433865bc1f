// Calls on device tensors that go wrong: told on every rank, in bounded time, and nothing stays on a stream.
#include <chrono>

#include "cuda/device_ranks.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv

namespace pycomm {
namespace {

// As a caller learns of it: from this call, or from one after it.
Status until_failure(DeviceRank& self, OnStream& t, const char* way) {
  const double end_s = monotonic_s() + 20;
  Status s;
  while (s.ok() && monotonic_s() < end_s) {
    s = sum(self, t, way);
    (void)t.get();
  }
  return s;
}

TEST(DeviceFaults, AnotherDeviceIsRefusedToAll) {
  run_device_ranks(3, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    PYCOMM_ASSERT_OK(sum(self, t, nullptr));
    Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 100);
    r.call.in = r.call.out = Buffer(t.data(), 100);
    if (self.rank == 1) r.call.device = 6;
    Status s = self.comm->prepare(&r, nullptr);
    if (self.rank == 1) {
      EXPECT_EQ(s.code(), Code::kValue);
      EXPECT_NE(
          s.message().find("the tensors are on cuda:6, and this communicator's calls on CUDA are on cuda:1"),
          std::string::npos)
          << s.message();
      Request refusal;
      refusal.refusal = s.message();
      PYCOMM_ASSERT_OK(self.comm->run(refusal, nullptr));
    } else {
      PYCOMM_ASSERT_OK(std::move(s));
      s = self.comm->run(r, nullptr);
      EXPECT_EQ(s.code(), Code::kRefused);
      EXPECT_NE(s.message().find("rank 1 refused its call"), std::string::npos) << s.message();
    }
    PYCOMM_ASSERT_OK(sum(self, t, nullptr));  // it stays usable
    expect_usable(self);
  });
}

// An asynchronous call that gets no turn is refused in its place: behind what is queued, which nobody waits
// for in start().
TEST(DeviceFaults, ADeviceThatIsNotThereIsRefusedInItsPlace) {
  std::atomic<bool> started{false};
  run_device_ranks(2, [&](DeviceRank& self) {
    std::vector<float> x(300000, 1.0f);
    const auto make = [&](int device) {
      auto r = std::make_unique<Request>(
          request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, x.size()));
      r->call.in = r->call.out = Buffer(x.data(), x.size());
      r->call.device = device;
      EXPECT_TRUE(self.comm->prepare(r.get(), nullptr).ok());
      return r;
    };
    const double end_s = monotonic_s() + 20;
    while (self.rank == 0 && !started && monotonic_s() < end_s) std::this_thread::yield();
    ASSERT_TRUE(self.rank == 1 || started) << "start() waits for the call before";
    const auto before = self.comm->start(make(-1));
    const auto refused = self.comm->start(make(self.rank == 0 ? 0 : 99));
    if (self.rank == 1) started = true;
    bool finished = false;
    PYCOMM_ASSERT_OK(before->wait(-1, nullptr, &finished));
    EXPECT_EQ(x[0], 2.0f);
    const Status s = refused->wait(-1, nullptr, &finished);
    EXPECT_EQ(s.code(), self.rank == 1 ? Code::kSystem : Code::kRefused) << s.message();
    EXPECT_NE(s.message().find("99"), std::string::npos) << s.message();
    expect_usable(self);
  });
}

TEST(DeviceFaults, CallsThatDiffer) {
  for (const bool host : {false, true}) {
    run_device_ranks(3, [host](DeviceRank& self) {
      OnStream t(self.stream, Bytes(400));
      PYCOMM_ASSERT_OK(sum(self, t, nullptr));
      Status s;
      if (self.rank == 2 && host) {
        std::vector<float> v(100);
        s = all_reduce(*self.comm, v.data(), 100);
      } else {
        s = sum(self, t, nullptr, self.rank == 2 ? ReduceOp::kMax : ReduceOp::kSum);
      }
      EXPECT_EQ(s.code(), Code::kMismatch) << s.message();
      EXPECT_NE(s.message().find("rank 0 called all_reduce(op sum, float32, count 100, on CUDA"),
                std::string::npos)
          << s.message();
    });
  }
}

// What all ranks see alike is no failure: nothing was launched, and the next call may be a better one.
TEST(DeviceFaults, NoWayToRunIt) {
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    Request r = self.request(CallKind::kAllReduce, DType::kInt16, ReduceOp::kMax, 200);
    r.call.in = r.call.out = Buffer(t.data(), 200);
    const Status s = self.call(&r, "nccl");
    EXPECT_FALSE(s.ok());
    EXPECT_NE(s.message().find("NCCL has no max of int16"), std::string::npos) << s.message();
    PYCOMM_ASSERT_OK(sum(self, t, "nccl"));
  });
}

TEST(DeviceFaults, AnErrorOfNccl) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "error=1:2");
  run_device_ranks(3, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    const Status s = until_failure(self, t, "nccl");
    ASSERT_FALSE(s.ok()) << "rank " << self.rank;
    EXPECT_TRUE(s.code() == Code::kSystem || s.code() == Code::kPeerLost) << s.message();
    EXPECT_FALSE(sum(self, t, "peer").ok());  // it has failed
  });
}

// NCCL tells that somebody is gone; who it is, the host's ways tell a little later.
TEST(DeviceFaults, WhoIsGoneIsNamedThoughNcclIsFirst) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "error=1:2");
  run_device_ranks(3, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    if (self.rank == 2) {
      for (int i = 0; i < 3; i++) (void)sum(self, t, "nccl");
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      self.comm->abort("the test ends rank 2");
      return;
    }
    const Status s = until_failure(self, t, "nccl");
    EXPECT_NE(s.message().find("the test ends rank 2"), std::string::npos)
        << "rank " << self.rank << ": " << s.message();
  });
}

TEST(DeviceFaults, AnOperationThatNeverEnds) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=1:2");
  const double begin_s = monotonic_s();
  run_device_ranks(
      3,
      [](DeviceRank& self) {
        OnStream t(self.stream, Bytes(400));
        const Status s = until_failure(self, t, "nccl");
        ASSERT_FALSE(s.ok()) << "rank " << self.rank;
        EXPECT_NE(s.message().find("has not ended in time"), std::string::npos) << s.message();
      },
      2);
  EXPECT_LT(monotonic_s() - begin_s, 30);
}

TEST(DeviceFaults, AbortEndsWhatIsUnderWay) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=0:1");
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    auto r =
        std::make_unique<Request>(self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 100));
    r->call.in = r->call.out = Buffer(t.data(), 100);
    PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), "nccl"));
    const auto work = self.comm->start(std::move(r));
    bool finished = false;
    const Status issued = work->wait(-1, nullptr, &finished);  // a peer's abort may come first
    if (self.rank == 0) self.comm->abort("the test says so");
    Status s = issued.clone();
    if (s.ok()) s = work->end()->wait(20, nullptr);
    if (self.rank == 1 && s.ok()) s = barrier(*self.comm);  // it may have had all that it needed
    ASSERT_FALSE(s.ok()) << "rank " << self.rank;
    EXPECT_NE(s.message().find("the test says so"), std::string::npos) << s.message();
  });
}

int n_asked = 0;  // for memory that torch would keep

// A rank that has no memory for a call refuses it: the others learn why, and all go on.
TEST(DeviceFaults, NoMemoryForScratchIsRefused) {
  setenv("CUDA_ON_CPU_LARGEST", "1:4000000", 1);
  DeviceEngine::set_free_cached([] { n_asked++; });
  run_device_ranks(3, [](DeviceRank& self) {
    OnStream small(self.stream, Bytes(400)), large(self.stream, 900'000);
    PYCOMM_ASSERT_OK(sum(self, small, "peer"));
    PYCOMM_ASSERT_OK(sum(self, small, "ring"));  // makes NCCL's communicator
    const auto in_pieces = [&](int times) {      // as a bucket is: packed into scratch
      Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum,
                               static_cast<uint64_t>(times) * 2 * 100'000);
      std::vector<Segment> segments;
      for (int i = 0; i < times; i++)
        for (int k = 0; k < 2; k++) segments.push_back({large.data() + k * 400'004, 100'000});
      r.call.in = r.call.out = Buffer(std::move(segments), 4);
      return self.call(&r, "peer");
    };
    for (int i = 0; i < 2; i++) {
      const Status s = in_pieces(8);  // 6.4 MB
      EXPECT_EQ(s.code(), self.rank == 1 ? Code::kSystem : Code::kRefused) << s.message();
      for (const char* part : {"cudaMalloc of 64", "bytes of scratch on CUDA device 1"})
        EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
      PYCOMM_ASSERT_OK(sum(self, small, "ring"));
    }
    PYCOMM_ASSERT_OK(in_pieces(1));
  });
  DeviceEngine::set_free_cached(nullptr);
  unsetenv("CUDA_ON_CPU_LARGEST");
  EXPECT_EQ(n_asked, 2);
}

TEST(DeviceFaults, AbortBesideClose) {
  for (int i = 0; i < 5; i++) {
    run_device_ranks(2, [](DeviceRank& self) {
      OnStream t(self.stream, Bytes(400));
      const Status called = sum(self, t, "peer");  // the abort of a peer may come first
      std::thread other([&] { self.comm->abort("the test says so"); });
      const Status ignored = self.comm->close(nullptr);
      other.join();
      EXPECT_EQ(self.comm->device(), nullptr);
    });
  }
}

// Where there is no NCCL, peers' memory serves all but all_to_all.
TEST(DeviceFaults, WithoutNccl) {
  const ScopedEnv none("PYCOMM_NCCL_LIB", "/nonexistent/libnccl.so.2");
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    PYCOMM_ASSERT_OK(sum(self, t, nullptr));
    const std::string why = self.comm->device()->describe();
    if (why.find("NCCL is not usable") == std::string::npos)
      return;  // an earlier test of this process has it
    const Status s = sum(self, t, "ring");
    EXPECT_EQ(s.code(), Code::kValue);
    EXPECT_NE(s.message().find("PYCOMM_NCCL_LIB"), std::string::npos) << s.message();
  });
}

// Nobody waits for the calls; close() does.
TEST(DeviceFaults, DroppedWorksEnd) {
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    for (int i = 0; i < 20; i++) {
      auto r =
          std::make_unique<Request>(self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 100));
      r->call.in = r->call.out = Buffer(t.data(), 100);
      PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), "peer"));
      (void)self.comm->start(std::move(r));
    }
    PYCOMM_ASSERT_OK(barrier(*self.comm));
    PYCOMM_ASSERT_OK(self.comm->close(nullptr));  // with calls on the stream
  });
}

}  // namespace
}  // namespace pycomm
