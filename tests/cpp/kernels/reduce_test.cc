// Every reduction of every type against a scalar, recursive T, on every instruction set: counts of sources
// and destinations, sizes with tails, alignments. The reference is kernels/reference.h.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <functional>
#include <random>
#include <vector>

#include "kernels/reference.h"

namespace pycomm {
namespace {

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

}  // namespace
}  // namespace pycomm
