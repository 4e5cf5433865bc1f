// Which thread asks a device for what: contexts are made on devices that are used only, events are asked for
// without harm to captures, and an error of the device is nobody's success.
#include <atomic>
#include <thread>

#include "cuda/device_ranks.h"
#include "grid.h"  // the shim's contexts and errors

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

}  // namespace
}  // namespace pycomm
