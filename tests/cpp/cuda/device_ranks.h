// Ranks as threads with a communicator and an emulated device each: what tests of calls on device tensors
// start with. Each has a stream of its own, the *caller's*: inputs are put there, results are read from
// there, and nothing but the engine's events orders them against the communication stream.
#pragma once

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

}  // namespace pycomm
