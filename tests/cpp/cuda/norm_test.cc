// The fused sum of squares: against float64 (long double in the reference), its independence of alignment and
// of how tensors are grouped into launches, and the count of elements that are not finite.
#include <limits>

#include "cuda/memory.h"
#include "kernels/cast.h"
#include "kernels/cuda/kernels.h"

namespace pycomm {
namespace {

class Norm : public testing::TestWithParam<DType> {
 protected:
  size_t parts() const { return GetParam() == DType::kComplex64 || GetParam() == DType::kComplex128 ? 2 : 1; }
  DType part_dtype() const {
    if (GetParam() == DType::kComplex64) return DType::kFloat32;
    if (GetParam() == DType::kComplex128) return DType::kFloat64;
    return GetParam();
  }
  // Values as the dtype holds them, and as doubles.
  Bytes values(size_t n, std::vector<double>* exact) {
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> floats(n * parts());
    for (float& v : floats) v = normal(rng_);
    Bytes bytes(n * dtype_size(GetParam()));
    cast(part_dtype(), bytes.data(), DType::kFloat32, floats.data(), floats.size(), 1.0f);
    std::vector<float> back(floats.size());
    cast(DType::kFloat32, back.data(), part_dtype(), bytes.data(), floats.size(), 1.0f);
    exact->assign(back.begin(), back.end());
    return bytes;
  }
  cuda::NormResult run(const std::vector<ConstBlock>& tensors) {
    cuda::NormResult got{-1, 99};
    const size_t n_bytes = cuda::norm_workspace_bytes(GetParam(), tensors);
    void* workspace = arena_.place(n_bytes, 8);
    void* result = arena_.place(sizeof got, 0);
    const Status s =
        cuda::norm(GetParam(), tensors, workspace, static_cast<cuda::NormResult*>(result), nullptr);
    EXPECT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const Bytes bytes = arena_.read(result, sizeof got);
    std::memcpy(&got, bytes.data(), sizeof got);
    return got;
  }
  DeviceArena arena_;
  std::mt19937_64 rng_{29};
};
INSTANTIATE_TEST_SUITE_P(Cuda, Norm,
                         testing::Values(DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                         DType::kComplex64, DType::kComplex128),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_P(Norm, IsTheSumOfSquaresWhateverTheAlignment) {
  std::vector<ConstBlock> aligned, shifted;
  long double want = 0;
  size_t n_all = 0;
#if defined(CUDA_ON_CPU_TSAN)
  const size_t n_tensors = 9;  // see CMakeLists.txt
#else
  const size_t n_tensors = 180;  // more than fit one launch, and more chunks than it has blocks
#endif
  for (size_t i = 0; i < n_tensors; ++i) {
    const size_t n = i % 20 == 3 ? 9001 : i % 5 == 4 ? 0 : i * 7 % 50;
    std::vector<double> exact;
    const Bytes bytes = values(n, &exact);
    for (const double v : exact) want += static_cast<long double>(v) * v;
    n_all += exact.size();
    aligned.push_back({arena_.place(bytes, 0), n});
    shifted.push_back({arena_.place(bytes, i % 2 == 0 ? dtype_size(GetParam()) % 16 : 1), n});
  }
  const cuda::NormResult a = run(aligned), b = run(shifted);
  EXPECT_EQ(a.sum_squares, b.sum_squares) << "to the bit";
  EXPECT_NEAR(a.sum_squares, static_cast<double>(want),
              static_cast<double>(n_all) * std::ldexp(1.0, -53) * a.sum_squares);
  EXPECT_EQ(a.n_nonfinite, 0u);
  EXPECT_TRUE(arena_.finish());
}

TEST_P(Norm, ExactOnSmallIntegers) {
  std::vector<float> ones(5003 * parts(), 2.0f);
  Bytes bytes(5003 * dtype_size(GetParam()));
  cast(part_dtype(), bytes.data(), DType::kFloat32, ones.data(), ones.size(), 1.0f);
  const cuda::NormResult got = run({{arena_.place(bytes, 0), 5003}});
  EXPECT_EQ(got.sum_squares, 4.0 * static_cast<double>(ones.size()));
  EXPECT_EQ(got.n_nonfinite, 0u);
}

TEST_P(Norm, CountsWhatIsNotFinite) {
  std::vector<float> v(4000 * parts(), 1.0f);
  v[0] = std::numeric_limits<float>::infinity();
  v[v.size() / 2] = std::numeric_limits<float>::quiet_NaN();
  v[v.size() - 1] = -std::numeric_limits<float>::infinity();
  Bytes bytes(4000 * dtype_size(GetParam()));
  cast(part_dtype(), bytes.data(), DType::kFloat32, v.data(), v.size(), 1.0f);
  const cuda::NormResult got = run({{arena_.place(bytes, 0), 4000}, {arena_.place(bytes, 1), 4000}});
  EXPECT_EQ(got.n_nonfinite, 6u);
  EXPECT_FALSE(std::isfinite(got.sum_squares));
}

TEST_P(Norm, OfNothingIsZero) {
  const cuda::NormResult got = run({});
  EXPECT_EQ(got.sum_squares, 0);
  EXPECT_EQ(got.n_nonfinite, 0u);
}

TEST(CudaNorm, RefusesWhatItCannot) {
  EXPECT_FALSE(cuda::norm_supported(DType::kInt8));
  const Status s = cuda::norm(DType::kInt8, {}, nullptr, nullptr, nullptr);
  EXPECT_EQ(s.code(), Code::kValue);
  EXPECT_EQ(cuda::norm(DType::kFloat32, {}, reinterpret_cast<void*>(4), nullptr, nullptr).code(),
            Code::kValue);
}

}  // namespace
}  // namespace pycomm
