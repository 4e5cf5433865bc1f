// Which thread asks a device for what: contexts are made on devices that are used only, events are asked for
// without harm to captures, and an error of the device is nobody's success.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "cuda/device_ranks.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv
#include "grid.h"             // the shim's contexts and errors

namespace pycomm {
namespace {

std::unique_ptr<Request> sum_of(const DeviceRank& self, OnStream& t) {
  auto r = std::make_unique<Request>(
      self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, t.size() / 4));
  r->call.in = r->call.out = Buffer(t.data(), t.size() / 4);
  return r;
}

// Issued; the test looks at the end.
Status start(DeviceRank& self, OnStream& t, const char* way, std::shared_ptr<Work>* work) {
  auto r = sum_of(self, t);
  PYCOMM_RETURN_IF_ERROR(self.comm->prepare(r.get(), way));
  *work = self.comm->start(std::move(r));
  bool finished = false;
  return (*work)->wait(-1, nullptr, &finished);
}

// Hundreds of MB of every rank, on a GPU.
TEST(DeviceThreads, MakeNoContextOnADeviceThatNobodyUses) {
  cuda_on_cpu::forget_context(0);
  run_device_ranks(
      3,
      [](DeviceRank& self) {
        OnStream t(self.stream, Bytes(400));
        for (const char* way : {"peer", "nccl", "ring"}) {
          std::thread([&] {  // that has never set a device, as a thread of Python
            const auto r = sum_of(self, t);
            PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), way));
            PYCOMM_ASSERT_OK(self.comm->run(*r, nullptr));
            std::shared_ptr<Work> work;
            PYCOMM_ASSERT_OK(start(self, t, way, &work));
            PYCOMM_ASSERT_OK(work->end()->wait(20, nullptr));
            EXPECT_TRUE(work->end()->passed());
          })
              .join();
        }
        std::thread([&] { PYCOMM_ASSERT_OK(self.comm->close(nullptr)); }).join();
      },
      kDeadlineS, 1);
  EXPECT_TRUE(cuda_on_cpu::has_context(1));
  EXPECT_FALSE(cuda_on_cpu::has_context(0));
}

// While the first call on CUDA waits for its turn, it is that call's device already.
TEST(DeviceThreads, TheFirstCallsDeviceIsKnownWhileItIsQueued) {
  run_device_ranks(1, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    const auto first = sum_of(self, t);
    auto second = sum_of(self, t);
    second->call.device = 5;
    PYCOMM_ASSERT_OK(self.comm->prepare(first.get(), nullptr));
    PYCOMM_ASSERT_OK(self.comm->prepare(second.get(), nullptr));  // nobody has called so far
    const auto work = self.comm->start(std::make_unique<Request>(*first));
    const Status s = self.comm->run(*second, nullptr);
    EXPECT_EQ(s.code(), Code::kValue) << s.message();
    EXPECT_NE(s.message().find("first call on CUDA is on cuda:0"), std::string::npos) << s.message();
    bool finished = false;
    PYCOMM_ASSERT_OK(work->wait(-1, nullptr, &finished));
    EXPECT_FALSE(self.comm->prepare(second.get(), nullptr).ok());
  });
}

// Two parts of a GPU have its PCI address, and are two devices to NCCL.
TEST(DeviceThreads, PartsOfOneGpuAreSeveralDevices) {
  const ScopedEnv mig("CUDA_ON_CPU_MIG", "1");
  run_device_ranks(2, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    std::shared_ptr<Work> work;
    PYCOMM_ASSERT_OK(start(self, t, "nccl", &work));
  });
}

// A thread that polls a work, or the watch, while another captures.
TEST(DeviceThreads, AskWithoutHarmToACapture) {
  run_device_ranks(1, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    std::shared_ptr<Work> work;
    PYCOMM_ASSERT_OK(start(self, t, nullptr, &work));
    cudaGraph_t graph = nullptr;
    ASSERT_CUDA(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeGlobal));
    std::thread([&] {
      PYCOMM_ASSERT_OK(work->end()->wait(20, nullptr));
      EXPECT_TRUE(work->end()->passed());
    }).join();
    ASSERT_CUDA(cudaStreamEndCapture(self.stream, &graph));
    ASSERT_CUDA(cudaGraphDestroy(graph));
  });
}

TEST(DeviceThreads, AnErrorOfTheDeviceFailsTheCommunicator) {
  std::atomic<int> n_issued{0};
  run_device_ranks(2, [&](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    PYCOMM_ASSERT_OK(start(self, t, "nccl", std::make_unique<std::shared_ptr<Work>>().get()));
    n_issued++;
    while (n_issued < 2) std::this_thread::yield();
    std::shared_ptr<Work> work;
    Status s;
    if (self.rank == 1) {
      cuda_on_cpu::break_device(1, cudaErrorIllegalAddress);
      s = start(self, t, "nccl", &work);
      if (s.ok()) s = work->end()->wait(20, nullptr);
      EXPECT_TRUE(work->done());
      EXPECT_FALSE(work->result().ok());
    }
    const double end_s = monotonic_s() + 20;  // as a caller learns of it: from this call, or one after it
    while (s.ok() && monotonic_s() < end_s) s = start(self, t, "nccl", &work);
    if (self.rank == 1) cuda_on_cpu::break_device(1, cudaSuccess);
    ASSERT_FALSE(s.ok()) << "rank " << self.rank;
    EXPECT_NE(s.message().find("CUDA device 1 has failed (cudaEventQuery): cudaErrorIllegalAddress"),
              std::string::npos)
        << "rank " << self.rank << ": " << s.message();
  });
}

bool comes_true(const std::function<bool()>& what) {
  const double end_s = monotonic_s() + 20;
  while (!what() && monotonic_s() < end_s) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return what();
}

// The caller may free the tensors when its stream has passed the call, or the work is over.
void expect_held_until(Latch& latch, const DeviceEnd& end, const char* why) {
  cudaStream_t other = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const Status s = end.order(other);
  EXPECT_NE(s.message().find(why), std::string::npos) << s.message();
  EXPECT_TRUE(end.passed());
  EXPECT_FALSE(end.over());
  EXPECT_EQ(cudaStreamQuery(other), cudaErrorNotReady);
  latch.open();
  EXPECT_TRUE(comes_true([&] { return end.over(); }));
  EXPECT_TRUE(comes_true([&] { return cudaStreamQuery(other) == cudaSuccess; }));
  ASSERT_CUDA(cudaStreamDestroy(other));
}

TEST(DeviceThreads, AFailedCallHoldsItsTensorsUntilTheDeviceHasLetGo) {
  run_device_ranks(1, [](DeviceRank& self) {
    OnStream t(self.stream, Bytes(400));
    std::shared_ptr<Work> work;
    PYCOMM_ASSERT_OK(start(self, t, nullptr, &work));
    Latch latch;
    latch.close(self.stream);
    PYCOMM_ASSERT_OK(start(self, t, nullptr, &work));
    self.comm->abort("the test says so");
    EXPECT_TRUE(work->done());
    EXPECT_FALSE(work->over());
    expect_held_until(latch, *work->end(), "the test says so");
    EXPECT_TRUE(work->over());
  });
}

TEST(DeviceThreads, ACallThatFailedHalfWayHasAnEnd) {
  run_device_ranks(1, [](DeviceRank& self) {
    OnStream a(self.stream, Bytes(400)), b(self.stream, Bytes(400));
    std::shared_ptr<Work> work;
    PYCOMM_ASSERT_OK(start(self, a, nullptr, &work));
    Latch latch;
    latch.close(self.stream);
    Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kPremulSum, 200);
    r.call.scalar = 2;
    r.call.in = r.call.out = Buffer(std::vector<Segment>{{a.data(), 100}, {b.data(), 100}}, 4);
    cuda_on_cpu::refuse_launch(2);  // packed, and not multiplied
    const Status s = self.call(&r);
    EXPECT_NE(s.message().find("cudaErrorInvalidConfiguration"), std::string::npos) << s.message();
    ASSERT_NE(r.end, nullptr);
    expect_held_until(latch, *r.end, "cudaErrorInvalidConfiguration");
  });
}

// A launch keeps the issuing thread, since the stream is full of calls that wait for one that never ends.
TEST(DeviceThreads, AbortFreesAnIssuerThatALaunchKeeps) {
  const ScopedEnv fault("LOOPBACK_NCCL_FAULT", "stall=0:1");
  for (const bool by_deadline : {false, true}) {
    const double begin_s = monotonic_s();
    run_device_ranks(
        2,
        [&](DeviceRank& self) {
          OnStream t(self.stream, Bytes(400));
          std::vector<std::shared_ptr<Work>> works;
          for (int i = 0; i < 1200; i++) {
            auto r = sum_of(self, t);
            if (!self.comm->prepare(r.get(), "nccl").ok()) break;
            works.push_back(self.comm->start(std::move(r)));
          }
          if (!by_deadline && self.rank == 0) {
            EXPECT_TRUE(comes_true([] { return cuda_on_cpu::n_kept() > 0; }));
            self.comm->abort("the test says so");
          }
          for (const auto& work : works) EXPECT_TRUE(comes_true([&] { return work->done(); }));
          const Status s = works.back()->result();
          ASSERT_FALSE(s.ok()) << "rank " << self.rank;
          EXPECT_NE(s.message().find(by_deadline ? "has not ended in time" : "the test says so"),
                    std::string::npos)
              << s.message();
        },
        by_deadline ? 3 : kDeadlineS);
    EXPECT_LT(monotonic_s() - begin_s, 25);
  }
}

}  // namespace
}  // namespace pycomm
