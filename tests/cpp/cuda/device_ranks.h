// Ranks as threads with a communicator and an emulated device each: what tests of calls on device tensors
// start with. Each has a stream of its own, the *caller's*: inputs are put there, results are read from
// there, and nothing but the engine's events orders them against the communication stream.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/memory.h"
#include "engine/run_ranks.h"

namespace pycomm {

struct DeviceRank : TestRank {
  int device = 0;
  cudaStream_t stream = nullptr;

  Request request(CallKind kind, DType dtype, ReduceOp op, uint64_t count, int root = 0) const {
    Request r = request_of(kind, dtype, op, count, root);
    r.call.device = device;
    r.call.stream = stream;
    return r;
  }
  Status call(Request* r, const char* way = nullptr) const {
    PYCOMM_RETURN_IF_ERROR(comm->prepare(r, way));
    return comm->run(*r, nullptr);
  }
};

// Rank r has device first_device + r.
inline void run_device_ranks(int n, const std::function<void(DeviceRank&)>& fn, double timeout_s = kDeadlineS,
                             int first_device = 0) {
  setenv("PYCOMM_DEVICE_ARENA", "1048576", 0);
  run_ranks(
      n,
      [&](TestRank& base) {
        DeviceRank self;
        static_cast<TestRank&>(self) = base;
        self.device = first_device + self.rank;
        ASSERT_CUDA(cudaSetDevice(self.device));
        ASSERT_CUDA(cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking));
        fn(self);
        const Status ignored = self.comm->close(nullptr);
        (void)cudaStreamSynchronize(self.stream);
        (void)cudaStreamDestroy(self.stream);
      },
      timeout_s);
}

// Device memory that is written and read through the caller's stream.
class OnStream {
 public:
  OnStream(cudaStream_t stream, size_t n_bytes, size_t off = 0) : stream_(stream), n_(n_bytes) {
    if (cudaMalloc(&all_, n_bytes + 64) != cudaSuccess) std::abort();
    data_ = static_cast<std::byte*>(all_) + off;
  }
  OnStream(cudaStream_t stream, const Bytes& contents, size_t off = 0)
      : OnStream(stream, contents.size(), off) {
    put(contents);
  }
  ~OnStream() {
    (void)cudaStreamSynchronize(stream_);
    if (cudaFree(all_) != cudaSuccess) std::abort();
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

  void put(const Bytes& contents) {
    from_ = contents;
    if (contents.empty()) return;
    const auto error = cudaMemcpyAsync(data_, from_.data(), from_.size(), cudaMemcpyHostToDevice, stream_);
    if (error != cudaSuccess) std::abort();
  }
  Bytes get() const {
    Bytes out(n_);
    if (n_ > 0 && cudaMemcpyAsync(out.data(), data_, n_, cudaMemcpyDeviceToHost, stream_) != cudaSuccess)
      std::abort();
    if (cudaStreamSynchronize(stream_) != cudaSuccess) std::abort();
    return out;
  }
  std::byte* data() const { return data_; }
  size_t size() const { return n_; }

 private:
  cudaStream_t stream_;
  size_t n_;
  Bytes from_;
  void* all_ = nullptr;
  std::byte* data_ = nullptr;
};

// What is put on the stream behind it waits until the test opens it.
class Latch {
 public:
  void close(cudaStream_t stream) {
    if (cudaLaunchHostFunc(
            stream, [](void* self) { static_cast<Latch*>(self)->wait(); }, this) != cudaSuccess)
      std::abort();
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// In place, of float32.
inline Request sum_of(const DeviceRank& self, Buffer b, ReduceOp op = ReduceOp::kSum) {
  Request r = self.request(CallKind::kAllReduce, DType::kFloat32, op, b.n_elems());
  r.call.in = r.call.out = std::move(b);
  return r;
}
inline Status sum(const DeviceRank& self, Buffer b, const char* way, ReduceOp op = ReduceOp::kSum) {
  Request r = sum_of(self, std::move(b), op);
  return self.call(&r, way);
}
inline Status sum(const DeviceRank& self, const OnStream& t, const char* way, ReduceOp op = ReduceOp::kSum) {
  return sum(self, Buffer(t.data(), t.size() / 4), way, op);
}

// Without a look at the stream, which may be stuck for good.
inline Status until_failure(const DeviceRank& self) {
  const double end_s = monotonic_s() + 20;
  Status s;
  while ((s = self.comm->check_usable()).ok() && monotonic_s() < end_s)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return s;
}

}  // namespace pycomm
