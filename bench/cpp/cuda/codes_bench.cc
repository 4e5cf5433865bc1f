// How near to a copy's bandwidth are the steps of an all-reduce whose numbers travel as codes of 8 bits?
//
//   codes_bench [--bytes 256M] [--repeats 20] [--warmups 5] [--json]
//
// --bytes is the size of the float32 vector. The steps are those of kernels/blocks.h: the maximum of every
// block, quantize (with and without feedback), dequantize. Words: measure.h.
#include <cstring>

#include "kernels/blocks.h"
#include "measure.h"

namespace pycomm::gpu_bench {
namespace {

std::vector<float> floats(const Bytes& bytes) {
  std::vector<float> out(bytes.size() / 4);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}
Bytes bytes_of(const std::vector<float>& values) {
  Bytes out(values.size() * 4);
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

// What every row begins with: a vector on the device, with its maxima.
struct Vector {
  Vector(size_t n, unsigned seed, cuda::Stream stream)
      : n_elems(n), numbers(DType::kFloat32, seed), data(numbers, n), maxima(n_blocks(n) * 4) {
    check(cuda::block_maxima(in(), n, most(), stream), "block_maxima");
  }
  float* in() const { return reinterpret_cast<float*>(data.data()); }
  float* most() const { return reinterpret_cast<float*>(maxima.data()); }
  // Of a range, which begins with a block.
  std::vector<float> values(const Range& r) const { return floats(numbers.slice(r.begin, r.n_elems)); }
  std::vector<float> most_of(const Range& r) const {
    std::vector<float> out(n_blocks(r.n_elems));
    const std::vector<float> v = values(r);
    block_maxima(v.data(), v.size(), out.data());
    return out;
  }

  const size_t n_elems;
  const Numbers numbers;
  const Memory data, maxima;
};

// `want` gives the bytes that a range of the result must have; the result has `size` bytes an element.
bool right(const Memory& result, size_t n_elems, size_t size,
           const std::function<Bytes(const Range&)>& want) {
  for (const Range& r : checked_ranges(n_elems)) {
    if (result.get(r.begin * size, r.n_elems * size) != want(r)) return false;
  }
  return true;
}

Bytes codes_of(DType code, const Vector& v, const Range& r) {
  std::vector<float> values = v.values(r);
  Bytes out(r.n_elems * dtype_size(code));
  quantize(code, out.data(), values.data(), r.n_elems, v.most_of(r).data(), false);
  return out;
}

void measure_maxima(Bench& bench, size_t n) {
  const Vector v(n, 1, bench.stream());
  bench.measure({"block_maxima", "float32", n * 4 + n_blocks(n) * 4,
                 [&](cuda::Stream s) { return cuda::block_maxima(v.in(), n, v.most(), s); },
                 [&] {
                   for (const Range& r : checked_ranges(n)) {
                     const Bytes want = bytes_of(v.most_of(r));
                     if (v.maxima.get(r.begin / kBlockElems * 4, want.size()) != want) return false;
                   }
                   return true;
                 }});
}

void measure_quantize(Bench& bench, DType code, size_t n, bool feedback) {
  const Vector v(n, 2, bench.stream());
  const size_t size = dtype_size(code);
  const Memory codes(n * size);
  // With feedback each call changes the vector, and the next one gets what is left of it: the first call's
  // codes are compared, here, and the later ones move as many bytes.
  const auto run = [&](cuda::Stream s) {
    return cuda::quantize(code, codes.data(), v.in(), n, v.most(), feedback, s);
  };
  const auto is_right = [&] {
    return right(codes, n, size, [&](const Range& r) { return codes_of(code, v, r); });
  };
  bool first_right = true;
  if (feedback) {
    check(run(bench.stream()), "quantize");
    check(cudaStreamSynchronize(bench.stream()), "quantize");
    first_right = is_right();
  }
  bench.measure({feedback ? "quantize, feedback" : "quantize", dtype_name(code),
                 n * (feedback ? 8 : 4) + n * size + n_blocks(n) * 4, run,
                 [&] { return feedback ? first_right : is_right(); }});
}

void measure_dequantize(Bench& bench, DType code, size_t n) {
  const size_t size = dtype_size(code);
  const Vector v(n, 4, bench.stream());
  const Memory codes(n * size), out(n * 4);
  check(cuda::quantize(code, codes.data(), v.in(), n, v.most(), false, bench.stream()), "quantize");
  const auto want = [&](const Range& r) {
    std::vector<float> values(r.n_elems);
    dequantize(code, values.data(), codes_of(code, v, r).data(), r.n_elems, v.most_of(r).data());
    return bytes_of(values);
  };
  bench.measure({"dequantize", dtype_name(code), n * size + n * 4 + n_blocks(n) * 4,
                 [&](cuda::Stream s) {
                   return cuda::dequantize(code, reinterpret_cast<float*>(out.data()), codes.data(), n,
                                           v.most(), s);
                 },
                 [&] { return right(out, n, 4, want); }});
}

}  // namespace
}  // namespace pycomm::gpu_bench

int main(int argc, char** argv) {
  using namespace pycomm;
  gpu_bench::Bench bench("codes", argc, argv);
  const size_t n = bench.n_bytes() / 4;
  gpu_bench::measure_maxima(bench, n);
  for (const DType code : {DType::kInt8, DType::kFloat8E4M3}) {
    gpu_bench::measure_quantize(bench, code, n, false);
    gpu_bench::measure_quantize(bench, code, n, true);
    gpu_bench::measure_dequantize(bench, code, n);
  }
  return bench.finish();
}
