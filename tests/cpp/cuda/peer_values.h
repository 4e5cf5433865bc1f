// The inputs of every rank, which every rank can compute, and the results that the CPU's kernels give for
// them.
#pragma once

#include "cuda/peer_ranks.h"
#include "kernels/reduce.h"

namespace pycomm {

struct Case {
  DType dtype;
  ReduceOp op;
};

inline Bytes input_of(int rank, size_t n_bytes, uint64_t seed) {
  std::mt19937_64 rng(seed * 1000 + static_cast<uint64_t>(rank));
  return random_bytes(n_bytes, rng);
}

// T over the ranks' elements, by the CPU's kernels.
inline Bytes reduced(const Case& c, const std::vector<Bytes>& inputs, double scalar) {
  Bytes out(inputs[0].size());
  std::vector<const void*> in;
  for (const Bytes& s : inputs) in.push_back(s.data());
  void* dst = out.data();
  find_reduce(c.dtype, c.op)(&dst, 1, in.data(), static_cast<int>(in.size()),
                             out.size() / dtype_size(c.dtype), scalar);
  return out;
}

// Device memory of one rank, ordinary or in its PeerMemory, `off` bytes behind an aligned address, with bytes
// around it that must stay as they are.
class Tensor {
 public:
  Tensor(PeerRank& self, size_t n_bytes, size_t off, bool symmetric)
      : self_(self), n_(n_bytes), symmetric_(symmetric) {
    const size_t n_all = n_bytes + off + 2 * kGuard;
    if (symmetric) {
      const Status s = self.memory->allocate(n_all, &all_);
      if (!s.ok()) ADD_FAILURE() << s.message();
    } else if (cudaMalloc(&all_, n_all) != cudaSuccess) {
      std::abort();
    }
    data_ = static_cast<char*>(all_) + kGuard + off;
    set(Bytes(n_all, kUnused), static_cast<char*>(all_));
    n_all_ = n_all;
  }
  Tensor(PeerRank& self, const Bytes& contents, size_t off, bool symmetric)
      : Tensor(self, contents.size(), off, symmetric) {
    set(contents, data_);
  }
  ~Tensor() {
    Bytes all = get(static_cast<char*>(all_), n_all_);
    const auto begin = all.begin() + (data_ - static_cast<char*>(all_));
    std::fill(begin, begin + static_cast<std::ptrdiff_t>(n_), kUnused);
    EXPECT_EQ(all, Bytes(n_all_, kUnused)) << "rank " << self_.rank << ": written outside of a tensor";
    if (symmetric_) {
      EXPECT_TRUE(self_.memory->release(all_).ok());
    } else {
#if defined(PYCOMM_CUDA_EMULATED)
      EXPECT_EQ(cudaFree(all_), cudaSuccess);
#else
      // cudaFree may wait for devices that can reach the memory, and so for peers that wait for this rank's
      // next call.
      self_.freed_last.push_back(all_);
#endif
    }
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  char* data() const { return data_; }
  Bytes get() const { return get(data_, n_); }
  void set(const Bytes& contents) const { set(contents, data_); }

 private:
  static constexpr size_t kGuard = 32;
  static constexpr uint8_t kUnused = 0xee;

  // On this rank's stream, so that nothing else orders the copies with a call.
  void set(const Bytes& contents, char* at) const {
    if (contents.empty()) return;
    if (cudaMemcpyAsync(at, contents.data(), contents.size(), cudaMemcpyHostToDevice, self_.stream) !=
            cudaSuccess ||
        cudaStreamSynchronize(self_.stream) != cudaSuccess) {
      std::abort();
    }
  }
  Bytes get(const char* at, size_t n) const {
    Bytes out(n);
    if (n > 0 && (cudaMemcpyAsync(out.data(), at, n, cudaMemcpyDeviceToHost, self_.stream) != cudaSuccess ||
                  cudaStreamSynchronize(self_.stream) != cudaSuccess)) {
      std::abort();
    }
    return out;
  }

  PeerRank& self_;
  const size_t n_;
  const bool symmetric_;
  void* all_ = nullptr;
  size_t n_all_ = 0;
  char* data_ = nullptr;
};

}  // namespace pycomm
