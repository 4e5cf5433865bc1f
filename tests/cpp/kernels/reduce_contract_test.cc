// What a reduction promises beside its sum: special values, results written over sources, the same bits on
// every instruction set, the caller's floating-point environment, and which operations exist.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycomm {
namespace {

template <class T>
class SpecialValues : public testing::Test {
 public:
  static constexpr DType kDType = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
};
using FloatTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(SpecialValues, FloatTypes);

TYPED_TEST(SpecialValues, AvgByPowersOfTwoKeepsDenormals) {
  using T = TypeParam;
  const T tiny = std::numeric_limits<T>::denorm_min();
  for (const KernelTable* table : tables()) {
    for (double scalar : {2.0, 4.0, std::ldexp(1.0, 100), std::ldexp(1.0, 127), 0.5}) {
      const auto got =
          run<T>(get(table, this->kDType, ReduceOp::kAvg), {{tiny, 3 * tiny, 1e30f}}, 1, scalar, 0);
      EXPECT_EQ(got[0][0], tiny / static_cast<T>(scalar));
      EXPECT_EQ(got[0][1], 3 * tiny / static_cast<T>(scalar));
      EXPECT_EQ(got[0][2], static_cast<T>(1e30f) / static_cast<T>(scalar));
    }
  }
}

TYPED_TEST(SpecialValues, MinAndMaxOrderZerosAndPropagateNan) {
  using T = TypeParam;
  const T nan = std::numeric_limits<T>::quiet_NaN(), inf = std::numeric_limits<T>::infinity();
  for (const KernelTable* table : tables()) {
    const std::vector<std::vector<T>> srcs = {{T(-0.0), T(0.0), nan, T(1), -inf, nan},
                                              {T(0.0), T(-0.0), T(1), nan, inf, nan}};
    const auto lo = run<T>(get(table, this->kDType, ReduceOp::kMin), srcs, 1, 1, 0)[0];
    const auto hi = run<T>(get(table, this->kDType, ReduceOp::kMax), srcs, 1, 1, 0)[0];
    EXPECT_TRUE(std::signbit(lo[0]) && std::signbit(lo[1])) << table->name;
    EXPECT_FALSE(std::signbit(hi[0]) || std::signbit(hi[1])) << table->name;
    for (int i : {2, 3, 5}) EXPECT_TRUE(std::isnan(lo[i]) && std::isnan(hi[i])) << table->name << " " << i;
    EXPECT_EQ(lo[4], -inf);
    EXPECT_EQ(hi[4], inf);
    const auto sum = run<T>(get(table, this->kDType, ReduceOp::kSum), srcs, 1, 1, 0)[0];
    EXPECT_TRUE(std::isnan(sum[4])) << "inf + -inf";
  }
}

TEST(Reduce, InPlaceOnAnySource) {
  std::mt19937_64 rng(3);
  for (const KernelTable* table : tables()) {
    for (int n_srcs : kSrcCounts) {
      for (size_t n : {size_t{5}, size_t{100}, size_t{4099}}) {
        std::vector<std::vector<float>> srcs(n_srcs, std::vector<float>(n));
        for (auto& s : srcs) {
          for (auto& v : s) v = wide<float>(rng);
        }
        const ReduceFn fn = get(table, DType::kFloat32, ReduceOp::kSum);
        const auto want = run(fn, srcs, 1, 1, 0)[0];
        for (int n_dsts : {1, n_srcs}) {  // the last source, or every source, is overwritten
          auto copy = srcs;
          std::vector<const void*> in;
          std::vector<void*> out;
          for (auto& s : copy) in.push_back(s.data());
          for (int d = 0; d < n_dsts; ++d) out.push_back(copy[n_dsts == 1 ? n_srcs - 1 : d].data());
          fn(out.data(), n_dsts, in.data(), n_srcs, n, 1);
          for (void* p : out)
            EXPECT_EQ(std::memcmp(p, want.data(), n * sizeof(float)), 0) << n_srcs << " " << n;
        }
      }
    }
  }
}

TEST(Reduce, SameBitsOnEveryIsa) {
  std::mt19937_64 rng(5);
  const KernelTable* baseline = find_isa("baseline");
  for (int d = 0; d < kNumDTypes; ++d) {
    const DType dtype = static_cast<DType>(d);
    for (int o = 0; o < kNumReduceOps; ++o) {
      const ReduceOp op = static_cast<ReduceOp>(o);
      for (const KernelTable* table : tables()) {
        ASSERT_EQ(get(table, dtype, op) == nullptr, get(baseline, dtype, op) == nullptr);
        if (table == baseline || get(table, dtype, op) == nullptr) continue;
        for (int n_srcs : {1, 3, 4, 9}) {
          const size_t n = 1000, n_bytes = n * dtype_size(dtype);
          std::vector<std::vector<uint8_t>> srcs(n_srcs, std::vector<uint8_t>(n_bytes));
          for (auto& s : srcs) {
            for (auto& v : s) v = static_cast<uint8_t>(rng() & (rng() & 1 ? 0xff : 0x3f));
          }
          std::vector<const void*> in;
          for (auto& s : srcs) in.push_back(s.data());
          std::vector<uint8_t> a(n_bytes), b(n_bytes);
          void *pa = a.data(), *pb = b.data();
          get(baseline, dtype, op)(&pa, 1, in.data(), n_srcs, n, 3.0);
          get(table, dtype, op)(&pb, 1, in.data(), n_srcs, n, 3.0);
          // NaN payloads may differ: compare as doubles what float() can see, else bytes.
          for (size_t i = 0; i < n_bytes; ++i) {
            if (a[i] == b[i]) continue;
            const auto is_nan = [&](const std::vector<uint8_t>& v) {
              switch (dtype) {
                case DType::kFloat64:
                case DType::kComplex128: {
                  double x;
                  std::memcpy(&x, &v[i / 8 * 8], 8);
                  return std::isnan(x);
                }
                case DType::kFloat32:
                case DType::kComplex64: {
                  float x;
                  std::memcpy(&x, &v[i / 4 * 4], 4);
                  return std::isnan(x);
                }
                case DType::kFloat16: return (v[i / 2 * 2 + 1] & 0x7c) == 0x7c;
                case DType::kBFloat16: return (v[i / 2 * 2 + 1] & 0x7f) == 0x7f && (v[i / 2 * 2] & 0x80);
                case DType::kFloat8E4M3: return (v[i] & 0x7f) == 0x7f;
                case DType::kFloat8E5M2: return (v[i] & 0x7f) > 0x7c;
                case DType::kInt8:
                case DType::kInt16:
                case DType::kInt32:
                case DType::kInt64:
                case DType::kUInt8:
                case DType::kBool: return false;
              }
              return false;
            };
            ASSERT_TRUE(is_nan(a) && is_nan(b))
                << table->name << " " << dtype_name(dtype) << " " << reduce_op_name(op) << " n_srcs "
                << n_srcs << " byte " << i;
          }
        }
      }
    }
  }
}

#if defined(__x86_64__)
unsigned long float_control() { return _mm_getcsr() & 0xffc0u; }
void set_float_control(unsigned long v) { _mm_setcsr(static_cast<unsigned>(v)); }
constexpr unsigned long kNormal = 0x1f80, kFlush = 0x1f80 | 0x8040, kToZero = 0x1f80 | 0x6000,
                        kDown = 0x1f80 | 0x2000;
#elif defined(__aarch64__)
unsigned long float_control() {
  unsigned long v;
  asm volatile("mrs %0, fpcr" : "=r"(v));
  return v;
}
void set_float_control(unsigned long v) { asm volatile("msr fpcr, %0" : : "r"(v) : "memory"); }
constexpr unsigned long kNormal = 0, kFlush = 1ul << 24, kToZero = 3ul << 22, kDown = 2ul << 22;
#endif

#if defined(__x86_64__) || defined(__aarch64__)
TEST(Reduce, IgnoresAndRestoresTheCallersEnvironment) {
  const float denormal = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> srcs = {{denormal, 1.0f}, {denormal, std::ldexp(1.0f, -24) * 1.5f}};
  const void* in[2] = {srcs[0].data(), srcs[1].data()};
  for (const KernelTable* table : tables()) {
    for (unsigned long changed : {kFlush, kToZero, kDown}) {
      uint32_t bits[2];
      void* out[1] = {bits};
      const ReduceFn fn = get(table, DType::kFloat32, ReduceOp::kSum);
      set_float_control(changed);
      fn(out, 1, in, 2, 2, 1);
      const unsigned long after = float_control();
      set_float_control(kNormal);
      EXPECT_EQ(after, changed) << "not restored";
      EXPECT_EQ(bits[0], 2u) << table->name << ": a denormal sum was flushed";
      EXPECT_EQ(bits[1], 0x3f800001u) << table->name << ": not rounded to nearest";
    }
  }
}
#endif

TEST(Reduce, UndefinedOperationsAreNull) {
  const ReduceOp bitwise[] = {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor};
  for (DType d : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                  DType::kFloat8E5M2, DType::kComplex64, DType::kComplex128}) {
    for (ReduceOp op : bitwise) EXPECT_EQ(find_reduce(d, op), nullptr) << dtype_name(d);
  }
  for (DType d : {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt8, DType::kBool}) {
    EXPECT_EQ(find_reduce(d, ReduceOp::kAvg), nullptr) << dtype_name(d);
    EXPECT_EQ(find_reduce(d, ReduceOp::kPremulSum), nullptr) << dtype_name(d);
  }
  EXPECT_EQ(defined_ops(DType::kComplex64), "sum, product, avg, premul_sum");
  EXPECT_EQ(defined_ops(DType::kInt32), "sum, product, min, max, band, bor, bxor");
  EXPECT_EQ(defined_ops(DType::kFloat32), "sum, product, min, max, avg, premul_sum");
}

}  // namespace
}  // namespace pycomm
