// What the benchmarks of the CUDA kernels share: device memory with known numbers, timing beside a copy, and
// the table.
//
// Words. The bytes a kernel *moves* are those that it has to read plus those that it has to write. A *copy*
// is cudaMemcpyAsync from device to device that moves as many: of half as many bytes. The *share of copy* is
// the copy's time divided by the kernel's, both medians of calls that alternate (so a clock that changes
// changes both), each between two CUDA events on one stream, after warming up. Nothing is in the cache when a
// call begins, once the operands are larger than it, as at the default size.
//
// Every row's result is compared with that of the CPU's kernels, bit for bit, at its begin and at its end.
// Whatever goes wrong, a wrong result too, ends the program with a message and 1. In the emulated build
// (docs/cuda.md) the programs run likewise, but no time there means anything, which they say.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/cuda/kernels.h"

namespace pycomm::gpu_bench {

using Bytes = std::vector<uint8_t>;

// Ends the program with `what` and the reason, unless all is well.
void check(const Status& status, const std::string& what);
void check(cudaError_t error, const std::string& what);
[[noreturn]] void fail(const std::string& message);

// ---- numbers

// Endless finite numbers, normally distributed and rounded to the dtype: element i of sequence `seed`. They
// repeat after kPeriod, which is prime, so that no two blocks of a tensor are alike.
class Numbers {
 public:
  static constexpr size_t kPeriod = 65521;

  Numbers(DType dtype, unsigned seed);
  DType dtype() const { return dtype_; }
  Bytes slice(size_t begin, size_t n_elems) const;

 private:
  DType dtype_;
  Bytes period_;
};

// Device memory, aligned to 256 bytes.
class Memory {
 public:
  explicit Memory(size_t n_bytes);
  explicit Memory(const Numbers& numbers, size_t n_elems);
  ~Memory();
  Memory(Memory&& other) noexcept : p_(other.p_), n_bytes_(other.n_bytes_) { other.p_ = nullptr; }
  Memory& operator=(Memory&&) = delete;

  char* data() const { return p_; }
  size_t n_bytes() const { return n_bytes_; }
  void set(size_t at, const Bytes& contents) const;
  Bytes get(size_t at, size_t n_bytes) const;

 private:
  char* p_ = nullptr;
  size_t n_bytes_;
};

// The lengths of a model's tensors that have n_elems together: large matrices with small vectors between,
// each a multiple of 8 but the last.
std::vector<size_t> tensor_lengths(size_t n_elems);

// The elements whose results are compared: all of a small tensor, else some at the begin and at the end.
struct Range {
  size_t begin, n_elems;
};
std::vector<Range> checked_ranges(size_t n_elems);

// ---- measuring

struct Row {
  std::string kernel;
  std::string dtype;
  size_t n_bytes_moved;
  std::function<Status(cuda::Stream)> run;
  std::function<bool()> right;  // compares the result, after run
  bool required = true;         // at least 85% of a copy is asked for
};

class Bench {
 public:
  // Flags: --bytes 256M (of the largest operand), --repeats 20, --warmups 5, --json. Ends the program when
  // they are wrong, or when there is no GPU.
  Bench(const std::string& name, int argc, char** argv);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  size_t n_bytes() const { return n_bytes_; }
  cudaStream_t stream() const { return stream_; }
  void measure(const Row& row);
  int finish();  // prints what was measured; the program's exit code

 private:
  struct Result {
    std::string kernel, dtype, verdict;
    size_t n_bytes_moved;
    double us, copy_us;
  };
  void parse(int argc, char** argv);
  void print_table() const;
  void print_json() const;

  std::string name_;
  size_t n_bytes_ = size_t{256} << 20;
  int n_repeats_ = 20, n_warmups_ = 5;
  bool json_ = false;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[3] = {};
  std::vector<Result> results_;
};

}  // namespace pycomm::gpu_bench
