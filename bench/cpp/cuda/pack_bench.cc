// How near to a copy's bandwidth are pack + cast + scale of many tensors into one buffer, and the way back?
//
//   pack_bench [--bytes 256M] [--repeats 20] [--warmups 5] [--json]
//
// --bytes is the size of all tensors together, in the wider of the two dtypes. Rows "after 1" have a tensor
// of one element in front, so that in the buffer nothing lies as it does in the tensors: what an odd bias
// costs. Words: measure.h.
#include "kernels/cast.h"
#include "measure.h"

namespace pycomm::gpu_bench {
namespace {

constexpr float kScale = 0.125f;  // an average over 8

struct Shape {
  std::vector<size_t> lengths, begins;  // in elements
  size_t n_elems = 0;
};
Shape shape_of(size_t n_elems, bool odd) {
  Shape shape;
  if (odd) shape.lengths.push_back(1);
  for (const size_t n : tensor_lengths(n_elems - shape.lengths.size())) shape.lengths.push_back(n);
  for (const size_t n : shape.lengths) {
    shape.begins.push_back(shape.n_elems);
    shape.n_elems += n;
  }
  return shape;
}

// Tensor t of the list holds elements begins[t] … of the sequence, and lies in memory of its own.
void measure_pack(Bench& bench, DType dst, DType src, bool odd) {
  const size_t wide = std::max(dtype_size(dst), dtype_size(src));
  const Shape shape = shape_of(bench.n_bytes() / wide, odd);
  std::vector<Memory> tensors;
  std::vector<ConstBlock> blocks;
  const Numbers numbers(src, 1);
  for (size_t t = 0; t < shape.lengths.size(); ++t) {
    tensors.emplace_back(shape.lengths[t] * dtype_size(src));
    tensors.back().set(0, numbers.slice(shape.begins[t], shape.lengths[t]));
    blocks.push_back({tensors.back().data(), shape.lengths[t]});
  }
  const Memory flat(shape.n_elems * dtype_size(dst));
  const auto right = [&] {
    for (const auto& [begin, n] : checked_ranges(shape.n_elems)) {
      Bytes want(n * dtype_size(dst));
      cast(dst, want.data(), src, numbers.slice(begin, n).data(), n, kScale);
      if (flat.get(begin * dtype_size(dst), want.size()) != want) return false;
    }
    return true;
  };
  bench.measure({odd ? "pack after 1" : "pack", format("%s to %s", dtype_name(src), dtype_name(dst)),
                 shape.n_elems * (dtype_size(src) + dtype_size(dst)),
                 [&](cuda::Stream s) { return cuda::pack(dst, flat.data(), src, blocks, kScale, s); }, right,
                 !odd});
}

void measure_unpack(Bench& bench, DType dst, DType src, bool odd) {
  const size_t wide = std::max(dtype_size(dst), dtype_size(src));
  const Shape shape = shape_of(bench.n_bytes() / wide, odd);
  const Numbers numbers(src, 2);
  const Memory flat(numbers, shape.n_elems);
  std::vector<Memory> tensors;
  std::vector<Block> blocks;
  for (const size_t n : shape.lengths) {
    tensors.emplace_back(n * dtype_size(dst));
    blocks.push_back({tensors.back().data(), n});
  }
  const auto right = [&] {
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (const auto& [begin, n] : checked_ranges(shape.lengths[t])) {
        Bytes want(n * dtype_size(dst));
        cast(dst, want.data(), src, numbers.slice(shape.begins[t] + begin, n).data(), n, kScale);
        if (tensors[t].get(begin * dtype_size(dst), want.size()) != want) return false;
      }
    }
    return true;
  };
  bench.measure({odd ? "unpack after 1" : "unpack", format("%s to %s", dtype_name(src), dtype_name(dst)),
                 shape.n_elems * (dtype_size(src) + dtype_size(dst)),
                 [&](cuda::Stream s) { return cuda::unpack(dst, blocks, src, flat.data(), kScale, s); },
                 right, !odd});
}

}  // namespace
}  // namespace pycomm::gpu_bench

int main(int argc, char** argv) {
  using namespace pycomm;
  gpu_bench::Bench bench("pack", argc, argv);
  constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
  for (const DType wire : {kF32, kF16, kBF16}) gpu_bench::measure_pack(bench, wire, kF32, false);
  gpu_bench::measure_pack(bench, kBF16, kBF16, false);
  gpu_bench::measure_pack(bench, kBF16, kF32, true);
  for (const DType wire : {kF32, kF16, kBF16}) gpu_bench::measure_unpack(bench, kF32, wire, false);
  gpu_bench::measure_unpack(bench, kBF16, kBF16, false);
  gpu_bench::measure_unpack(bench, kF32, kBF16, true);
  return bench.finish();
}
