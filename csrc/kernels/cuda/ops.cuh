// The operations, on one lane: prepare() every source, Combine at every node of T (left operand first),
// finish() the root. As kernels/reduce_ops.h; the same operations on the same operands, so the same bits.
//
// ScaledSum serves sum, avg and premul_sum: a factor before (1 changes no number) and a division after. The
// other Ops of a format are one, which looks at call time which it is: a kernel for each takes twice as long
// to compile, and one switch for 16 bytes is nothing beside loading them. Signed sums and products are done
// on unsigned lanes, where overflow wraps.
#pragma once

#include <type_traits>

#include "base/dtype.h"
#include "kernels/cuda/formats.cuh"

namespace pycomm::cuda {

enum class Finish : int { kNone, kMultiply, kDivide };

template <class A>
struct Param {
  A before;
  A after;
  Finish finish;
};
struct Which {
  ReduceOp op;
};

PYCOMM_DEVICE uint32_t to_bits(float v) { return __float_as_uint(v); }
PYCOMM_DEVICE uint64_t to_bits(double v) {
  uint64_t bits;
  memcpy(&bits, &v, sizeof v);
  return bits;
}
PYCOMM_DEVICE float from_bits(uint32_t bits) { return __uint_as_float(bits); }
PYCOMM_DEVICE double from_bits(uint64_t bits) {
  double v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

// ---- what makes one value of two

struct Add {
  template <class A>
  PYCOMM_DEVICE A operator()(A a, A b) const {
    return a + b;
  }
};

struct Multiply {
  template <class A>
  PYCOMM_DEVICE A operator()(A a, A b) const {
    return a * b;
  }
  // re = a.re b.re - a.im b.im, im = a.re b.im + a.im b.re, each product and sum rounded.
  template <class T>
  PYCOMM_DEVICE Complex<T> operator()(const Complex<T>& a, const Complex<T>& b) const {
    return {a.re * b.re - a.im * b.im, a.im * b.re + a.re * b.im};
  }
};

template <class A>
constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;
template <>
inline constexpr bool kIsFloat<double> = true;

// NaN wins, and -0 is below +0: equal operands differ at most in the sign, so or-ing the bits picks -0.
struct Lower {
  template <class A>
  PYCOMM_DEVICE A operator()(A a, A b) const {
    if constexpr (kIsFloat<A>) {
      const A rest = a == b ? from_bits(to_bits(a) | to_bits(b)) : b;
      return a < b || a != a ? a : rest;
    } else {
      return a < b ? a : b;
    }
  }
};

struct Higher {
  template <class A>
  PYCOMM_DEVICE A operator()(A a, A b) const {
    if constexpr (kIsFloat<A>) {
      const A rest = a == b ? from_bits(to_bits(a) & to_bits(b)) : b;
      return a > b || a != a ? a : rest;
    } else {
      return a > b ? a : b;
    }
  }
};

struct BitAnd {
  PYCOMM_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a & b; }
};
struct BitOr {
  PYCOMM_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};
struct BitXor {
  PYCOMM_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a ^ b; }
};

// ---- Ops. combine(): the one function of it; or choose(), which gives `use` one of those above. kIsExact:
// results are numbers of the format.

template <class F>
struct ScaledSum {
  using Format = F;
  using A = typename F::Acc;
  using P = Param<A>;
  static constexpr bool kIsExact = false;
  static PYCOMM_DEVICE A prepare(A v, const P& p) { return v * p.before; }
  static PYCOMM_DEVICE A combine(A a, A b) { return a + b; }
  static PYCOMM_DEVICE A finish(A v, const P& p) {
    if (p.finish == Finish::kMultiply) return v * p.after;
    if (p.finish == Finish::kDivide) return v / p.after;
    return v;
  }
};

template <class F, bool is_exact>
struct Op {
  using Format = F;
  using A = typename F::Acc;
  using P = Which;
  static constexpr bool kIsExact = is_exact;
  static PYCOMM_DEVICE A prepare(A v, P) { return v; }
  static PYCOMM_DEVICE A finish(A v, P) { return v; }
};

template <class F>
struct Product : Op<F, false> {
  using A = typename F::Acc;
  static PYCOMM_DEVICE A combine(A a, A b) { return Multiply()(a, b); }
};

template <class F>
struct SumProduct : Op<F, true> {  // of integers
  template <class Use>
  static PYCOMM_DEVICE void choose(Which which, const Use& use) {
    if (which.op == ReduceOp::kSum) return use(Add());
    use(Multiply());
  }
};

template <class F>
struct MinMax : Op<F, true> {
  template <class Use>
  static PYCOMM_DEVICE void choose(Which which, const Use& use) {
    if (which.op == ReduceOp::kMin) return use(Lower());
    use(Higher());
  }
};

template <class F>
struct ProductMinMax : Op<F, false> {
  template <class Use>
  static PYCOMM_DEVICE void choose(Which which, const Use& use) {
    if (which.op == ReduceOp::kProduct) return use(Multiply());
    MinMax<F>::choose(which, use);
  }
};

// Of truth values sum and max are or; product and min are and.
template <class F>
struct Bitwise : Op<F, true> {
  template <class Use>
  static PYCOMM_DEVICE void choose(Which which, const Use& use) {
    switch (which.op) {
      case ReduceOp::kBand:
      case ReduceOp::kProduct:
      case ReduceOp::kMin: return use(BitAnd());
      case ReduceOp::kBxor: return use(BitXor());
      case ReduceOp::kBor:
      case ReduceOp::kSum:
      case ReduceOp::kMax:
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum: break;
    }
    use(BitOr());
  }
};

// On the host. scalar is what avg divides by, or what premul_sum multiplies with.
template <class A>
Param<A> make_param(ReduceOp op, double scalar) {
  Param<A> p{A{1}, A{1}, Finish::kNone};
  if (op == ReduceOp::kPremulSum) p.before = static_cast<A>(scalar);
  if (op != ReduceOp::kAvg) return p;
  // x / 2^k and x * 2^-k are the same number rounded once, as long as 2^-k is a normal number.
  uint64_t bits;
  std::memcpy(&bits, &scalar, sizeof bits);
  const uint64_t exponent = (bits >> 52) & 0x7ff;
  const bool has_exact_inverse = (bits << 12) == 0 && exponent > 1023 - 126 && exponent < 1023 + 126;
  p.after = static_cast<A>(has_exact_inverse ? 1.0 / scalar : scalar);
  p.finish = has_exact_inverse ? Finish::kMultiply : Finish::kDivide;
  return p;
}

// ---- lanes of one Op

template <class O>
using LanesOf = Lanes<typename O::Format>;

// What a tree keeps of a pack between two nodes: its lanes, or the pack, which is a quarter of the registers
// where elements are bytes.
template <class O>
using Kept = std::conditional_t<O::kIsExact, Pack, LanesOf<O>>;

template <class O>
PYCOMM_DEVICE LanesOf<O> lanes_of(const Pack& pack) {
  return decode_pack<typename O::Format>(pack);
}
template <class O>
PYCOMM_DEVICE LanesOf<O> lanes_of(const LanesOf<O>& lanes) {
  return lanes;
}

// Every source of a tree.
template <class O>
PYCOMM_DEVICE Kept<O> prepared(const Pack& pack, const typename O::P& param) {
  if constexpr (O::kIsExact) {
    return pack;
  } else {
    LanesOf<O> lanes = decode_pack<typename O::Format>(pack);
    PYCOMM_UNROLL
    for (auto& v : lanes.v) v = O::prepare(v, param);
    return lanes;
  }
}

template <class O>
PYCOMM_DEVICE Pack finished(const Kept<O>& kept, const typename O::P& param) {
  LanesOf<O> lanes = lanes_of<O>(kept);
  PYCOMM_UNROLL
  for (auto& v : lanes.v) v = O::finish(v, param);
  return encode_pack<typename O::Format>(lanes);
}

// Of two values, of all lanes of two packs, or of two packs.
template <class O>
struct Combine {
  using A = typename O::A;
  const typename O::P& param;

  PYCOMM_DEVICE A operator()(const A& a, const A& b) const {
    if constexpr (requires { O::combine(a, b); }) {
      return O::combine(a, b);
    } else {
      A out;
      O::choose(param, [&](const auto& f) { out = f(a, b); });
      return out;
    }
  }
  PYCOMM_DEVICE LanesOf<O> operator()(const LanesOf<O>& a, const LanesOf<O>& b) const {
    constexpr int n = kLanes<typename O::Format>;
    LanesOf<O> out = a;  // fewer registers than to begin without values
    if constexpr (requires { O::combine(a.v[0], b.v[0]); }) {
      PYCOMM_UNROLL
      for (int i = 0; i < n; ++i) out.v[i] = O::combine(out.v[i], b.v[i]);
    } else {
      O::choose(param, [&](const auto& f) {
        PYCOMM_UNROLL
        for (int i = 0; i < n; ++i) out.v[i] = f(out.v[i], b.v[i]);
      });
    }
    return out;
  }
  PYCOMM_DEVICE Pack operator()(const Pack& a, const Pack& b) const {
    return encode_pack<typename O::Format>((*this)(lanes_of<O>(a), lanes_of<O>(b)));
  }
};

constexpr PYCOMM_DEVICE int floor_pow2(int n) {
  int p = 1;
  while (p * 2 <= n) p *= 2;
  return p;
}

// T over v[0..N), unrolled: the left part has min(p, N - p/2) sources, p the largest power of two <= N.
template <int N, class V, class Combine>
PYCOMM_DEVICE V tree(const V* v, const Combine& combine) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    constexpr int p = floor_pow2(N);
    constexpr int m = p < N - p / 2 ? p : N - p / 2;
    return combine(tree<m>(v, combine), tree<N - m>(v + m, combine));
  }
}

// T over n values that load(k) gives, n <= 2^(kLevels + 1) - 1: a stack that works like a binary counter over
// the leaves, of which the first n - p are pairs. Levels are unrolled, so the stack stays in registers.
template <int kLevels, class V, class Load, class Combine>
PYCOMM_DEVICE V tree_of(int n, const Load& load, const Combine& combine) {
  const int p = floor_pow2(n);
  V stack[kLevels]{};
  V v{};
  int next = 0;
  PYCOMM_NO_UNROLL
  for (int leaf = 0; leaf < p; ++leaf) {
    v = load(next++);
    if (leaf < n - p) v = combine(v, load(next++));
    bool carry = true;
    PYCOMM_UNROLL
    for (int level = 0; level < kLevels; ++level) {
      if (!carry) continue;
      if (leaf >> level & 1) {
        v = combine(stack[level], v);
      } else {
        stack[level] = v;
        carry = false;
      }
    }
  }
  return v;
}

}  // namespace pycomm::cuda
