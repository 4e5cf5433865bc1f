// Reductions against a scalar, recursive T written from the definition in docs/numerics.md, on every
// instruction set that this processor runs: bits, tails, alignment, aliasing, special values, environment.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "kernels/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycomm {
namespace {

std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> out;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (const KernelTable* t = find_isa(name)) out.push_back(t);
  }
  return out;
}

ReduceFn get(const KernelTable* t, DType dtype, ReduceOp op) {
  return t->reduce[static_cast<int>(dtype)][static_cast<int>(op)];
}

constexpr int kSrcCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 65};
constexpr size_t kSizes[] = {0, 1, 7, 31, 32, 33, 1000, 4099};

// T from its definition: no vectors, no iteration.
template <class T>
T tree(const std::vector<T>& x, int lo, int hi, const std::function<T(T, T)>& combine) {
  const int n = hi - lo;
  if (n == 1) return x[lo];
  int p = 1;
  while (2 * p <= n) p *= 2;
  const int m = std::min(p, n - p / 2);
  return combine(tree(x, lo, lo + m, combine), tree(x, lo + m, hi, combine));
}

// Calls the kernel on copies of the sources at odd addresses, with canaries around each destination.
template <class T>
std::vector<std::vector<T>> run(ReduceFn fn, const std::vector<std::vector<T>>& srcs, int n_dsts,
                                double scalar, size_t misalign) {
  const size_t n = srcs[0].size();
  std::vector<std::vector<char>> in, out;
  std::vector<const void*> src_ptrs;
  std::vector<void*> dst_ptrs;
  for (const auto& s : srcs) {
    in.emplace_back(n * sizeof(T) + 64);
    char* p = in.back().data() + misalign;
    if (n) std::memcpy(p, s.data(), n * sizeof(T));
    src_ptrs.push_back(p);
  }
  for (int d = 0; d < n_dsts; ++d) {
    out.emplace_back(n * sizeof(T) + 192, '\x5a');
    dst_ptrs.push_back(out.back().data() + 64 + misalign);
  }
  fn(dst_ptrs.data(), n_dsts, src_ptrs.data(), static_cast<int>(srcs.size()), n, scalar);
  std::vector<std::vector<T>> result;
  for (int d = 0; d < n_dsts; ++d) {
    const auto& buffer = out[d];
    for (size_t i = 0; i < buffer.size(); ++i) {
      if (i >= 64 + misalign && i < 64 + misalign + n * sizeof(T)) continue;
      EXPECT_EQ(buffer[i], '\x5a') << "a byte outside the destination was written, offset " << i;
    }
    result.emplace_back(n);
    if (n) std::memcpy(result.back().data(), dst_ptrs[d], n * sizeof(T));
  }
  return result;
}

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Every count, size and alignment, on every instruction set.
template <class T>
void sweep(DType dtype, ReduceOp op, const std::function<T(std::mt19937_64&)>& draw,
           const std::function<T(std::vector<T>, double)>& expected, double scalar = 1) {
  std::mt19937_64 rng(42);
  for (const KernelTable* table : tables()) {
    const ReduceFn fn = get(table, dtype, op);
    ASSERT_NE(fn, nullptr) << dtype_name(dtype) << " " << reduce_op_name(op);
    for (int n_srcs : kSrcCounts) {
      for (size_t n : kSizes) {
        if (n_srcs > 9 && n > 1000) continue;  // the sizes that matter, also under a sanitizer
        if (n_srcs > 17 && n > 33) continue;
        std::vector<std::vector<T>> srcs(n_srcs, std::vector<T>(n));
        for (auto& s : srcs) {
          for (auto& v : s) v = draw(rng);
        }
        for (int n_dsts : {1, 2, 3, n_srcs}) {
          const size_t misalign = (n + n_dsts + n_srcs) % 2 ? 0 : 3;
          const auto got = run(fn, srcs, n_dsts, scalar, misalign);
          for (size_t i = 0; i < n; ++i) {
            std::vector<T> column;
            for (const auto& s : srcs) column.push_back(s[i]);
            const T want = expected(column, scalar);
            for (int d = 0; d < n_dsts; ++d) {
              ASSERT_TRUE(same_bits(got[d][i], want))
                  << table->name << " " << dtype_name(dtype) << " " << reduce_op_name(op) << " n_srcs "
                  << n_srcs << " n_dsts " << n_dsts << " n " << n << " i " << i << " d " << d;
            }
          }
        }
      }
    }
  }
}

template <class T>
std::function<T(std::vector<T>, double)> by_tree(std::function<T(T, T)> combine) {
  return [combine](std::vector<T> x, double) { return tree<T>(x, 0, static_cast<int>(x.size()), combine); };
}

// Magnitudes from 0.01 to 100: almost any other association gives other bits.
template <class T>
T wide(std::mt19937_64& rng) {
  std::uniform_real_distribution<double> exponent(-2, 2);
  return static_cast<T>((rng() & 1 ? 1 : -1) * std::pow(10.0, exponent(rng)));
}
template <class T>
T near_one(std::mt19937_64& rng) {
  return static_cast<T>(std::uniform_real_distribution<double>(0.7, 1.4)(rng));
}
template <class T>
T any_int(std::mt19937_64& rng) {
  return static_cast<T>(rng());
}

TEST(ReduceTree, AssociationShowsInTheBits) {
  // The sweep below proves T only if its values can tell T from a left fold.
  std::mt19937_64 rng(1);
  int differ = 0;
  for (int i = 0; i < 100; ++i) {
    std::vector<float> x(7);
    for (auto& v : x) v = wide<float>(rng);
    float left = x[0];
    for (int k = 1; k < 7; ++k) left += x[k];
    differ += !same_bits(left, tree<float>(x, 0, 7, std::plus<float>()));
  }
  EXPECT_GT(differ, 30);
}

template <class T>
class FloatReduce : public testing::Test {
 public:
  static constexpr DType kDType = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
};
using FloatTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(FloatReduce, FloatTypes);

TYPED_TEST(FloatReduce, Sum) {
  using T = TypeParam;
  sweep<T>(this->kDType, ReduceOp::kSum, wide<T>, by_tree<T>(std::plus<T>()));
}
TYPED_TEST(FloatReduce, Product) {
  using T = TypeParam;
  sweep<T>(this->kDType, ReduceOp::kProduct, near_one<T>, by_tree<T>(std::multiplies<T>()));
}
TYPED_TEST(FloatReduce, Min) {
  using T = TypeParam;
  sweep<T>(this->kDType, ReduceOp::kMin, wide<T>, by_tree<T>([](T a, T b) { return std::min(a, b); }));
}
TYPED_TEST(FloatReduce, Max) {
  using T = TypeParam;
  sweep<T>(this->kDType, ReduceOp::kMax, wide<T>, by_tree<T>([](T a, T b) { return std::max(a, b); }));
}
TYPED_TEST(FloatReduce, AvgDividesTheSumOnce) {
  using T = TypeParam;
  for (double scalar : {3.0, 4.0, 7.0}) {
    sweep<T>(
        this->kDType, ReduceOp::kAvg, wide<T>,
        [](std::vector<T> x, double s) {
          return tree<T>(x, 0, static_cast<int>(x.size()), std::plus<T>()) / static_cast<T>(s);
        },
        scalar);
  }
}
TYPED_TEST(FloatReduce, PremulSumScalesEverySource) {
  using T = TypeParam;
  sweep<T>(
      this->kDType, ReduceOp::kPremulSum, wide<T>,
      [](std::vector<T> x, double s) {
        for (auto& v : x) v *= static_cast<T>(s);
        return tree<T>(x, 0, static_cast<int>(x.size()), std::plus<T>());
      },
      0.3);
}

TYPED_TEST(FloatReduce, AvgByPowersOfTwoKeepsDenormals) {
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

TYPED_TEST(FloatReduce, MinAndMaxOrderZerosAndPropagateNan) {
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

template <class T>
class ComplexReduce : public testing::Test {
 public:
  using Complex = std::complex<T>;
  static constexpr DType kDType = sizeof(T) == 4 ? DType::kComplex64 : DType::kComplex128;
};
TYPED_TEST_SUITE(ComplexReduce, FloatTypes);

TYPED_TEST(ComplexReduce, SumAvgPremul) {
  using C = typename TestFixture::Complex;
  const auto draw = [](std::mt19937_64& rng) {
    const TypeParam re = wide<TypeParam>(rng);
    return C(re, wide<TypeParam>(rng));
  };
  const auto add = [](C a, C b) { return C(a.real() + b.real(), a.imag() + b.imag()); };
  sweep<C>(this->kDType, ReduceOp::kSum, draw, by_tree<C>(add));
  sweep<C>(
      this->kDType, ReduceOp::kAvg, draw,
      [&](std::vector<C> x, double s) {
        const C sum = tree<C>(x, 0, static_cast<int>(x.size()), add);
        return C(sum.real() / static_cast<TypeParam>(s), sum.imag() / static_cast<TypeParam>(s));
      },
      3.0);
  sweep<C>(
      this->kDType, ReduceOp::kPremulSum, draw,
      [&](std::vector<C> x, double s) {
        for (auto& v : x) v = C(v.real() * static_cast<TypeParam>(s), v.imag() * static_cast<TypeParam>(s));
        return tree<C>(x, 0, static_cast<int>(x.size()), add);
      },
      0.7);
}
TYPED_TEST(ComplexReduce, Product) {
  using C = typename TestFixture::Complex;
  sweep<C>(
      this->kDType, ReduceOp::kProduct,
      [](std::mt19937_64& rng) {
        const TypeParam angle = static_cast<TypeParam>(std::uniform_real_distribution<double>(0, 6.28)(rng));
        return C(std::cos(angle), std::sin(angle));
      },
      by_tree<C>([](C a, C b) {
        const TypeParam re = a.real() * b.real() - a.imag() * b.imag();
        return C(re, a.imag() * b.real() + a.real() * b.imag());
      }));
}

template <class T>
class IntegerReduce : public testing::Test {};
using IntegerTypes = testing::Types<int8_t, int16_t, int32_t, int64_t, uint8_t>;
TYPED_TEST_SUITE(IntegerReduce, IntegerTypes);

template <class T>
constexpr DType int_dtype() {
  if (std::is_same_v<T, uint8_t>) return DType::kUInt8;
  return sizeof(T) == 1   ? DType::kInt8
         : sizeof(T) == 2 ? DType::kInt16
         : sizeof(T) == 4 ? DType::kInt32
                          : DType::kInt64;
}

TYPED_TEST(IntegerReduce, EveryOperationWithWraparound) {
  using T = TypeParam;
  constexpr DType d = int_dtype<T>();
  const auto wrap = [](uint64_t v) { return static_cast<T>(v); };
  sweep<T>(d, ReduceOp::kSum, any_int<T>,
           by_tree<T>([&](T a, T b) { return wrap(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }));
  sweep<T>(d, ReduceOp::kProduct, any_int<T>,
           by_tree<T>([&](T a, T b) { return wrap(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }));
  sweep<T>(d, ReduceOp::kMin, any_int<T>, by_tree<T>([](T a, T b) { return std::min(a, b); }));
  sweep<T>(d, ReduceOp::kMax, any_int<T>, by_tree<T>([](T a, T b) { return std::max(a, b); }));
  sweep<T>(d, ReduceOp::kBand, any_int<T>, by_tree<T>([](T a, T b) { return static_cast<T>(a & b); }));
  sweep<T>(d, ReduceOp::kBor, any_int<T>, by_tree<T>([](T a, T b) { return static_cast<T>(a | b); }));
  sweep<T>(d, ReduceOp::kBxor, any_int<T>, by_tree<T>([](T a, T b) { return static_cast<T>(a ^ b); }));
}

TEST(BoolReduce, AnyNonzeroByteIsTrue) {
  const auto draw = [](std::mt19937_64& rng) {
    const uint64_t r = rng();
    return static_cast<uint8_t>(r % 3 == 0 ? 0 : r % 3 == 1 ? 1 : 1 + (r >> 8) % 255);
  };
  const auto logic = [](std::function<bool(bool, bool)> f) {
    return [f](std::vector<uint8_t> x, double) {
      std::vector<uint8_t> bits;
      for (uint8_t v : x) bits.push_back(v != 0);
      return tree<uint8_t>(bits, 0, static_cast<int>(bits.size()),
                           [f](uint8_t a, uint8_t b) { return f(a, b); });
    };
  };
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    sweep<uint8_t>(DType::kBool, op, draw, logic([](bool a, bool b) { return a || b; }));
  }
  for (ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    sweep<uint8_t>(DType::kBool, op, draw, logic([](bool a, bool b) { return a && b; }));
  }
  sweep<uint8_t>(DType::kBool, ReduceOp::kBxor, draw, logic([](bool a, bool b) { return a != b; }));
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
