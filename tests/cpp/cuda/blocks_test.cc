// Codes with a scale per block against the CPU's (kernels/blocks.h), bit for bit: every step, lengths,
// misalignments, blocks that vanish or are not finite, feedback; and the bound of the header for the whole
// way.
#include "kernels/blocks.h"

#include <limits>

#include "cuda/memory.h"
#include "kernels/cuda/kernels.h"

namespace pycomm {
namespace {

class Blocks : public testing::TestWithParam<DType> {
 protected:
  // Sizes vary from block to block; the third and fourth block are not finite, the fifth vanishes.
  std::vector<float> values(size_t n) {
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> v(n);
    for (size_t i = 0; i < n; ++i) {
      const size_t block = i / kBlockElems;
      v[i] = normal(rng_) * std::ldexp(1.0f, block == 4 ? -120 : static_cast<int>(block * 7 % 40) - 20);
    }
    if (n > 2 * kBlockElems + 9) v[2 * kBlockElems + 9] = -std::numeric_limits<float>::infinity();
    if (n > 3 * kBlockElems + 3) v[3 * kBlockElems + 3] = std::numeric_limits<float>::quiet_NaN();
    return v;
  }
  static Bytes bytes_of(const std::vector<float>& v) {
    Bytes out(v.size() * 4);
    std::memcpy(out.data(), v.data(), out.size());
    return out;
  }
  size_t code_bytes(size_t n) const { return n * dtype_size(GetParam()); }
  static DeviceArena& arena() {
    static DeviceArena* const all = new DeviceArena;
    return *all;
  }
  DeviceArena& arena_ = arena();
  std::mt19937_64 rng_{37};
};
INSTANTIATE_TEST_SUITE_P(Cuda, Blocks,
                         testing::Values(DType::kInt8, DType::kFloat8E4M3, DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_P(Blocks, EveryStepIsTheCpus) {
  const DType code = GetParam();
  for (size_t n :
       {size_t{1}, size_t{15}, size_t{255}, size_t{256}, size_t{257}, size_t{2000}, size_t{9001}}) {
    for (size_t off : {size_t{0}, size_t{4}, size_t{3}}) {
      std::vector<float> x = values(n), maxima(n_blocks(n));
      void* src = arena_.place(bytes_of(x), off);
      float* device_maxima = static_cast<float*>(arena_.place(maxima.size() * 4, 4));
      void* codes = arena_.place(code_bytes(n), off);
      void* dst = arena_.place(n * 4, off);
      ASSERT_OK(cuda::block_maxima(static_cast<float*>(src), n, device_maxima, nullptr));
      ASSERT_OK(cuda::quantize(code, codes, static_cast<float*>(src), n, device_maxima, true, nullptr));
      ASSERT_OK(cuda::dequantize(code, static_cast<float*>(dst), codes, n, device_maxima, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());

      const std::vector<float> before = x;
      Bytes want(code_bytes(n));
      std::vector<float> decoded(n);
      block_maxima(x.data(), n, maxima.data());
      quantize(code, want.data(), x.data(), n, maxima.data(), true);
      dequantize(code, decoded.data(), want.data(), n, maxima.data());
      ASSERT_TRUE(same(DType::kFloat32, arena_.read(device_maxima, maxima.size() * 4), bytes_of(maxima)))
          << n;
      ASSERT_EQ(arena_.read(codes, code_bytes(n)), want) << n << " " << off;
      ASSERT_TRUE(same(DType::kFloat32, arena_.read(src, n * 4), bytes_of(x))) << n << ": feedback";
      ASSERT_TRUE(same(DType::kFloat32, arena_.read(dst, n * 4), bytes_of(decoded))) << n << ": decoded";

      const double u = code == DType::kInt8         ? 0
                       : code == DType::kFloat8E4M3 ? 0x1p-4
                       : code == DType::kFloat16    ? 0x1p-11
                                                    : 0x1p-8;
      for (size_t i = 0; i < n; ++i) {
        const double m = maxima[i / kBlockElems];
        if (!std::isfinite(m) || m < 0x1p-100) continue;
        const double f = code == DType::kInt8         ? m / 254 + m * 0x1p-23
                         : code == DType::kFloat8E4M3 ? m * 0x1p-17
                                                      : m * 0x1p-38 + 0x1p-133;
        ASSERT_NEAR(decoded[i], before[i], u * std::fabs(before[i]) + f) << i;
      }
      ASSERT_TRUE(arena_.finish());
    }
  }
}

TEST(CudaBlocks, KnowsWhatTheCpuKnowsAndRefusesTheRest) {
  for (int d = 0; d < kNumDTypes; ++d) {
    EXPECT_EQ(cuda::blocks_supported(static_cast<DType>(d)), blocks_supported(static_cast<DType>(d)));
  }
  Status s = cuda::quantize(DType::kInt16, nullptr, nullptr, 1, nullptr, false, nullptr);
  EXPECT_EQ(s.code(), Code::kValue);
  s = cuda::block_maxima(nullptr, 1, reinterpret_cast<float*>(2), nullptr);
  EXPECT_EQ(s.message(), "cuda block_maxima: maxima must be aligned to 4 bytes");
}

}  // namespace
}  // namespace pycomm
