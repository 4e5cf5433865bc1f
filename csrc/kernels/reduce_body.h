// The reduction itself: one loop over vectors, one tree over sources, for every format and operation.
//
// body<Op, N, D> reads N sources (N known at compile time, so T unrolls into registers) and stores to D
// destinations (0: as many as are given; kToAcc: one, in the accumulation type, unfinished). All sources of a
// vector are loaded before it is stored, so a destination may be a source. More than Op::kMaxDirect sources
// go through blocked(): in the words of docs/numerics.md T is a perfect tree over p = 2^k leaves of which the
// first n - p are pairs, so it is cut into groups of kMaxDirect/2 leaves (that many to twice that many
// sources, each group's tree being T again), and the groups are combined, in cache, with a stack that works
// like a binary counter. Cost: n_srcs reads and n_dsts writes per element.
#pragma once

#include "kernels/float_env.h"
#include "kernels/reduce_ops.h"

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

constexpr int kToAcc = -1;
constexpr int kBlockBytes = 2048;  // of one temporary: a few of them, and the sources beside, stay in L1

template <class Op>
using ParamOf = Param<typename Op::Format::Acc>;

template <class Op>
using BodyFn = void (*)(void* const* dsts, int n_dsts, const void* const* srcs, size_t n_lanes,
                        ParamOf<Op> param);

constexpr int floor_pow2(int n) { return 1 << (31 - __builtin_clz(static_cast<unsigned>(n))); }

// T over v[0..N): the left part has min(p, N - p/2) sources, p the largest power of two <= N.
template <class Op, int N, class V>
PYCOMM_INLINE V tree(const V* v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    constexpr int p = floor_pow2(N);
    constexpr int m = p < N - p / 2 ? p : N - p / 2;
    return Op::combine(tree<Op, m, V>(v), tree<Op, N - m, V>(v + m));
  }
}

// Where loads and stores can be masked, a hot body does its own tail; elsewhere tail() pads it.
template <class Op>
constexpr bool kMaskedTail = Op::kHot&& kVecBytes == 64;

template <class Op, int N, bool kPartial, class S>
PYCOMM_INLINE auto reduce_vector(const S* const* src, size_t i, size_t n_rest, ParamOf<Op> param) {
  using F = typename Op::Format;
  typename F::V v[N];
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) {
    typename F::Raw raw;
    if constexpr (kPartial) {
      raw = load_partial<typename F::Raw>(src[k] + i, n_rest * sizeof(S));
    } else {
      raw = load<typename F::Raw>(src[k] + i);
    }
    v[k] = Op::prepare(F::decode(raw), param);
  }
  return tree<Op, N, typename F::V>(v);
}

template <class Op, int N, int D>
void body(void* const* dsts, int n_dsts, const void* const* srcs, size_t n, ParamOf<Op> param) {
  using F = typename Op::Format;
  using S = typename F::Store;
  constexpr size_t L = F::L;
  constexpr size_t kUnroll = !Op::kHot || N > 4 ? 1 : N > 2 ? 2 : 4;
  const S* src[N];
  for (int k = 0; k < N; ++k) src[k] = static_cast<const S*>(srcs[k]);
  S* dst[D > 0 ? D : 1];
  for (int k = 0; k < D; ++k) dst[k] = static_cast<S*>(dsts[k]);

  const auto emit = [&]<bool kPartial>(size_t i, typename F::V v) __attribute__((always_inline)) {
    if constexpr (D == kToAcc) {  // temporaries are padded to whole vectors
      store(static_cast<typename F::Acc*>(dsts[0]) + i, v);
      return;
    }
    const auto raw = F::encode(Op::finish(v, param));
    const auto put = [&](S * p) __attribute__((always_inline)) {
      if constexpr (kPartial) {
        store_partial(p + i, raw, (n - i) * sizeof(S));
      } else {
        store(p + i, raw);
      }
    };
    if constexpr (D > 0) {
#pragma GCC unroll 4
      for (int k = 0; k < D; ++k) put(dst[k]);
    } else if constexpr (D == 0) {
      for (int k = 0; k < n_dsts; ++k) put(static_cast<S*>(dsts[k]));
    }
  };
  size_t i = 0;
  if constexpr (kUnroll > 1) {
    for (; i + kUnroll * L <= n; i += kUnroll * L) {
      typename F::V v[kUnroll];
#pragma GCC unroll 4
      for (size_t u = 0; u < kUnroll; ++u) v[u] = reduce_vector<Op, N, false>(src, i + u * L, 0, param);
#pragma GCC unroll 4
      for (size_t u = 0; u < kUnroll; ++u) emit.template operator()<false>(i + u * L, v[u]);
    }
  }
  for (; i + L <= n; i += L) {
    emit.template operator()<false>(i, reduce_vector<Op, N, false>(src, i, 0, param));
  }
  if constexpr (kMaskedTail<Op>) {
    if (i < n) emit.template operator()<true>(i, reduce_vector<Op, N, true>(src, i, n - i, param));
  }
}

// bodies[n_srcs - 1][column]; the column is chosen from n_dsts.
template <class Op>
struct Bodies {
  static constexpr int kMax = Op::kMaxDirect;
  BodyFn<Op> fn[kMax][4];
  BodyFn<Op> to_acc[kMax];

  template <int N>
  constexpr void fill() {
    constexpr bool kHot = Op::kHot;
    fn[N - 1][0] = body<Op, N, 0>;
    fn[N - 1][1] = body<Op, N, (kHot ? 1 : 0)>;
    fn[N - 1][2] = body<Op, N, (kHot ? 2 : 0)>;
    fn[N - 1][3] = body<Op, N, (kHot && (N == 3 || N == 4) ? N : 0)>;
    if constexpr (2 * N >= kMax) to_acc[N - 1] = body<Op, N, kToAcc>;
    if constexpr (N < kMax) fill<N + 1>();
  }
  constexpr Bodies() : fn{}, to_acc{} { fill<1>(); }

  static constexpr int column(int n_dsts, int n_srcs) {
    if (n_dsts <= 2) return n_dsts;
    return n_dsts == n_srcs ? 3 : 0;
  }
};
template <class Op>
constexpr Bodies<Op> kBodies;

// The last n - i lanes, fewer than a vector: the sources are padded with zeros, fn (one destination) runs on
// them, and what belongs to the destinations is copied there.
template <class Op>
void tail(BodyFn<Op> fn, void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t i,
          size_t n, ParamOf<Op> param) {
  using F = typename Op::Format;
  using S = typename F::Store;
  constexpr size_t kRawBytes = sizeof(typename F::Raw);
  const size_t n_bytes = (n - i) * sizeof(S);
  alignas(64) char in[Op::kMaxDirect][kRawBytes];
  alignas(64) char out[kRawBytes];
  const void* src[Op::kMaxDirect];
  for (int k = 0; k < n_srcs; ++k) {
    store(in[k], load_partial<typename F::Raw>(static_cast<const S*>(srcs[k]) + i, n_bytes));
    src[k] = in[k];
  }
  void* dst = out;
  fn(&dst, 1, src, F::L, param);
  for (int k = 0; k < n_dsts; ++k)
    copy_bytes<kRawBytes>(reinterpret_cast<char*>(static_cast<S*>(dsts[k]) + i), out, n_bytes);
}

// n_srcs <= Op::kMaxDirect
template <class Op>
PYCOMM_INLINE void direct(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t n,
                          ParamOf<Op> param) {
  const auto& row = kBodies<Op>.fn[n_srcs - 1];
  const BodyFn<Op> fn = row[Bodies<Op>::column(n_dsts, n_srcs)];
  if constexpr (kMaskedTail<Op>) {
    fn(dsts, n_dsts, srcs, n, param);
  } else {
    const size_t whole = n - n % Op::Format::L;
    if (whole > 0) fn(dsts, n_dsts, srcs, whole, param);
    if (whole < n) tail<Op>(row[1], dsts, n_dsts, srcs, n_srcs, whole, n, param);
  }
}

// T of `count` sources (kMaxDirect/2 to kMaxDirect) from lane `at` on, unfinished, into a temporary.
template <class Op>
void group_to_acc(typename Op::Format::Acc* temporary, const void* const* srcs, int count, size_t at,
                  size_t n, ParamOf<Op> param) {
  using F = typename Op::Format;
  using S = typename F::Store;
  constexpr size_t kRawBytes = sizeof(typename F::Raw);
  const BodyFn<Op> fn = kBodies<Op>.to_acc[count - 1];
  const void* src[Op::kMaxDirect];
  for (int k = 0; k < count; ++k) src[k] = static_cast<const S*>(srcs[k]) + at;
  const size_t whole = n - n % F::L;
  void* dst = temporary;
  fn(&dst, 1, src, whole, param);
  if (whole == n) return;
  alignas(64) char in[Op::kMaxDirect][kRawBytes];
  for (int k = 0; k < count; ++k) {
    store(in[k],
          load_partial<typename F::Raw>(static_cast<const S*>(src[k]) + whole, (n - whole) * sizeof(S)));
    src[k] = in[k];
  }
  dst = temporary + whole;
  fn(&dst, 1, src, F::L, param);
}

template <class Op>
void blocked(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t n,
             ParamOf<Op> param) {
  using F = typename Op::Format;
  using S = typename F::Store;
  using A = typename F::Acc;
  using V = typename F::V;
  constexpr int kLeaves = Op::kMaxDirect / 2;
  constexpr size_t kBlock = kBlockBytes / sizeof(A);
  alignas(64) A stack[31][kBlock];
  const int p = floor_pow2(n_srcs);
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t len = n - at < kBlock ? n - at : kBlock;
    int next = 0, top = 0;
    for (int group = 0; group < p / kLeaves; ++group) {
      const int pairs_left = n_srcs - p - group * kLeaves;
      const int count = kLeaves + (pairs_left < 0 ? 0 : pairs_left < kLeaves ? pairs_left : kLeaves);
      group_to_acc<Op>(stack[top], srcs + next, count, at, len, param);
      next += count;
      ++top;
      for (int carry = group; carry & 1; carry >>= 1) {
        --top;
        A* left = stack[top - 1];
        for (size_t i = 0; i < len; i += F::L) {
          store(left + i, Op::combine(load<V>(left + i), load<V>(left + kBlock + i)));
        }
      }
    }
    for (size_t i = 0; i < len; i += F::L) {
      const auto raw = F::encode(Op::finish(load<V>(stack[0] + i), param));
      const size_t n_bytes = len - i < F::L ? (len - i) * sizeof(S) : sizeof(raw);
      for (int k = 0; k < n_dsts; ++k) {
        S* dst = static_cast<S*>(dsts[k]) + at + i;
        if (n_bytes == sizeof(raw)) {
          store(dst, raw);
        } else {
          store_partial(dst, raw, n_bytes);
        }
      }
    }
  }
}

// kLanes: lanes per element (2 for complex; the element size where any lane will do).
template <class Op, int kLanes = 1>
void reduce_entry(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t n_elems,
                  double scalar) {
  if (n_elems == 0) return;
  const auto go = [&](ParamOf<Op> param) __attribute__((always_inline)) {
    if (n_srcs <= Op::kMaxDirect) [[likely]] {
      direct<Op>(dsts, n_dsts, srcs, n_srcs, n_elems * kLanes, param);
    } else {
      blocked<Op>(dsts, n_dsts, srcs, n_srcs, n_elems * kLanes, param);
    }
  };
  if constexpr (is_float<typename Op::Format::Acc>) {
    const FloatEnv env;
    go(Op::param(opaque(scalar)));
  } else {
    go({});
  }
}

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
