// The operations: how two lanes combine, and what happens to a lane before and after the tree.
//
// prepare() is applied to every source, combine() at every node of the tree (left operand first), finish()
// once to the root, before rounding to the element type. kHot operations get more unrolled variants (more
// code): those that training uses, on wide enough CPUs. Unsigned lanes serve signed sums and products, so
// that overflow wraps.
#pragma once

#include "kernels/convert.h"

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

template <class A>
constexpr bool is_float = false;
template <>
constexpr bool is_float<float> = true;
template <>
constexpr bool is_float<double> = true;

// x86-64 without AVX2 is old or small: its kernels take half the time to compile without the variants.
#if defined(__x86_64__)
constexpr bool kHotIsa = kVecBytes > 16;
#else
constexpr bool kHotIsa = true;
#endif

template <class Format>
constexpr bool kHotFormat = false;
template <>
constexpr bool kHotFormat<Plain<float>> = true;
template <>
constexpr bool kHotFormat<Plain<double>> = true;
template <>
constexpr bool kHotFormat<Float16> = true;
template <>
constexpr bool kHotFormat<BFloat16> = true;

template <class A>
struct Param {
  A scalar;
  bool multiply;  // avg only: the division is by a power of two, and multiplying by its inverse is the same
};

template <class F, bool kIsHot = false>
struct OpBase {
  using Format = F;
  using V = typename F::V;
  using P = Param<typename F::Acc>;
  static constexpr bool kHot = kIsHot && kHotFormat<F> && kHotIsa;
  static constexpr int kMaxDirect = kHot ? 8 : 4;
  static P param(double scalar) { return {static_cast<typename F::Acc>(scalar), false}; }
  static PYCOMM_INLINE V prepare(V v, P) { return v; }
  static PYCOMM_INLINE V finish(V v, P) { return v; }
};

template <class F>
struct Sum : OpBase<F, true> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) { return a + b; }
};

template <class F>
struct Product : OpBase<F> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) { return a * b; }
};

// x / 2^k and x * 2^-k are the same real number rounded once, as long as 2^-k is a normal number.
inline bool has_exact_inverse(double s) {
  uint64_t bits;
  __builtin_memcpy(&bits, &s, 8);
  const uint64_t exponent = (bits >> 52) & 0x7ff;
  return (bits << 12) == 0 && exponent > 1023 - 126 && exponent < 1023 + 126;
}

template <class F>
struct Avg : Sum<F> {
  using V = typename F::V;
  using A = typename F::Acc;
  using P = Param<A>;
  static P param(double scalar) {
    if (has_exact_inverse(scalar)) return {static_cast<A>(1.0 / scalar), true};
    return {static_cast<A>(scalar), false};
  }
  static PYCOMM_INLINE V finish(V v, P p) { return p.multiply ? v * p.scalar : v / p.scalar; }
};

template <class F>
struct PremulSum : Sum<F> {
  using V = typename F::V;
  using P = Param<typename F::Acc>;
  static PYCOMM_INLINE V prepare(V v, P p) { return v * p.scalar; }
};

// Lanes are (re, im) pairs: re = a.re b.re - a.im b.im, im = a.im b.re + a.re b.im, each product rounded.
template <class F>
struct ComplexProduct : OpBase<F> {
  using V = typename F::V;
  static constexpr int L = F::L;
  static PYCOMM_INLINE V combine(V a, V b) {
    V sign;
    decltype(a < b) even, odd, swapped;
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 2) {
      even[i] = even[i + 1] = i;
      odd[i] = odd[i + 1] = i + 1;
      swapped[i] = i + 1;
      swapped[i + 1] = i;
      sign[i] = -1;
      sign[i + 1] = 1;
    }
    return a * permute(b, even) + permute(a, swapped) * permute(b, odd) * sign;
  }

 private:
  template <class I>
  static PYCOMM_INLINE V permute(V v, I index) {
#if defined(__clang__)
    V out;
#pragma clang loop unroll(full)
    for (int i = 0; i < L; ++i) out[i] = v[index[i]];
    return out;
#else
    return __builtin_shuffle(v, index);
#endif
  }
};

template <class F>
struct Min : OpBase<F> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) {
    if constexpr (is_float<typename F::Acc>) {
      // equal operands differ at most in the sign of zero: or-ing the bits picks -0
      const auto bits = (decltype(a < b))a | (decltype(a < b))b;
      const V rest = a == b ? (V)bits : b;
      return (a < b) | (a != a) ? a : rest;
    } else {
      return a < b ? a : b;
    }
  }
};

template <class F>
struct Max : OpBase<F> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) {
    if constexpr (is_float<typename F::Acc>) {
      const auto bits = (decltype(a < b))a & (decltype(a < b))b;
      const V rest = a == b ? (V)bits : b;
      return (a > b) | (a != a) ? a : rest;
    } else {
      return a > b ? a : b;
    }
  }
};

template <class F>
struct And : OpBase<F> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) { return a & b; }
};

template <class F>
struct Or : OpBase<F> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) { return a | b; }
};

template <class F>
struct Xor : OpBase<F> {
  using V = typename F::V;
  static PYCOMM_INLINE V combine(V a, V b) { return a ^ b; }
};

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
