// How near to a copy's bandwidth is the reduction of 2, 4 and 8 tensors into one?
//
//   reduce_bench [--bytes 256M] [--repeats 20] [--warmups 5] [--json]
//
// --bytes is the size of each source; a call moves n_sources + 1 times as much. Words: measure.h.
#include "kernels/reduce.h"
#include "measure.h"

namespace pycomm::gpu_bench {
namespace {

void measure(Bench& bench, DType dtype, int n_srcs) {
  const size_t size = dtype_size(dtype), n = bench.n_bytes() / size;
  std::vector<Numbers> numbers;
  std::vector<Memory> srcs;
  std::vector<const void*> pointers;
  for (int k = 0; k < n_srcs; ++k) {
    numbers.emplace_back(dtype, static_cast<unsigned>(k + 1));
    srcs.emplace_back(numbers.back(), n);
    pointers.push_back(srcs.back().data());
  }
  const Memory dst(n * size);
  const cuda::ReduceSegment segment{dst.data(), pointers.data(), n};
  const auto right = [&] {
    for (const auto& [begin, n_elems] : checked_ranges(n)) {
      std::vector<Bytes> parts;
      std::vector<const void*> in;
      for (const Numbers& one : numbers) in.push_back(parts.emplace_back(one.slice(begin, n_elems)).data());
      Bytes want(n_elems * size);
      void* out = want.data();
      find_reduce(dtype, ReduceOp::kSum)(&out, 1, in.data(), n_srcs, n_elems, 1);
      if (dst.get(begin * size, want.size()) != want) return false;
    }
    return true;
  };
  bench.measure({format("reduce of %d", n_srcs), dtype_name(dtype),
                 static_cast<size_t>(n_srcs + 1) * n * size,
                 [&](cuda::Stream s) {
                   return cuda::reduce(dtype, ReduceOp::kSum, {&segment, 1}, n_srcs, 1, s);
                 },
                 right});
}

}  // namespace
}  // namespace pycomm::gpu_bench

int main(int argc, char** argv) {
  using namespace pycomm;
  gpu_bench::Bench bench("reduce", argc, argv);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int n_srcs : {2, 4, 8}) gpu_bench::measure(bench, dtype, n_srcs);
  }
  return bench.finish();
}
