// How near to a copy's bandwidth is the sum of the squares of many tensors, with the count of what is not
// finite?
//
//   norm_bench [--bytes 256M] [--repeats 20] [--warmups 5] [--json]
//
// --bytes is the size of all tensors together. The kernel only reads, so a share above 100% is possible.
// Words: measure.h.
#include <cmath>
#include <cstring>

#include "kernels/cast.h"
#include "measure.h"

namespace pycomm::gpu_bench {
namespace {

void measure(Bench& bench, DType dtype) {
  const size_t size = dtype_size(dtype), n = bench.n_bytes() / size;
  const Numbers numbers(dtype, 1);
  std::vector<Memory> tensors;
  std::vector<ConstBlock> blocks;
  long double want = 0;
  size_t begin = 0;
  for (const size_t n_elems : tensor_lengths(n)) {
    const Bytes values = numbers.slice(begin, n_elems);
    std::vector<float> exact(n_elems);
    cast(DType::kFloat32, exact.data(), dtype, values.data(), n_elems, 1.0f);
    for (const float v : exact) want += static_cast<long double>(v) * v;
    tensors.emplace_back(values.size());
    tensors.back().set(0, values);
    blocks.push_back({tensors.back().data(), n_elems});
    begin += n_elems;
  }
  const Memory workspace(cuda::norm_workspace_bytes(dtype, blocks)), result(sizeof(cuda::NormResult));
  auto* const at = reinterpret_cast<cuda::NormResult*>(result.data());
  const auto right = [&] {
    cuda::NormResult got;
    std::memcpy(&got, result.get(0, sizeof got).data(), sizeof got);
    // In float64, of n positive summands, in any order.
    const double bound = static_cast<double>(n) * 0x1p-53 * got.sum_squares;
    return got.n_nonfinite == 0 && std::fabs(got.sum_squares - static_cast<double>(want)) <= bound;
  };
  bench.measure({"norm", dtype_name(dtype), n * size,
                 [&](cuda::Stream s) { return cuda::norm(dtype, blocks, workspace.data(), at, s); }, right});
}

}  // namespace
}  // namespace pycomm::gpu_bench

int main(int argc, char** argv) {
  using namespace pycomm;
  gpu_bench::Bench bench("norm", argc, argv);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    gpu_bench::measure(bench, dtype);
  return bench.finish();
}
