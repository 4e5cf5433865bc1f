// Casts with a fused scale: decode, multiply, encode, one vector at a time.
//
// From<Src, Dst> names the two formats; the arithmetic is in float (double when both sides are float64, or
// one is float64 and the other float32). dst may be src exactly when the formats are the same size. A scale
// of 1 multiplies too: x * 1 is x. Cost: one read and one write per element.
#pragma once

#include "kernels/float_env.h"
#include "kernels/reduce_ops.h"

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

// float32 <-> float64: as many lanes as fit the wider one.
constexpr int kDoubles = kVecBytes / 8;
struct Float32AsDouble {
  using Store = float;
  using Acc = double;
  static constexpr int L = kDoubles;
  using V = Vec<double, L>;
  using Raw = Vec<float, L>;
  static PYCOMM_INLINE V decode(Raw r) { return __builtin_convertvector(r, V); }
  static PYCOMM_INLINE Raw encode(V v) { return __builtin_convertvector(v, Raw); }
};

template <class Dst, class Src>
void cast_loop(typename Dst::Store* dst, const typename Src::Store* src, size_t n, typename Src::Acc scale) {
  static_assert(Dst::L == Src::L);
  constexpr size_t L = Src::L;
  constexpr size_t kUnroll = 4;
  using Raw = typename Src::Raw;
  size_t i = 0;
  for (; i + kUnroll * L <= n; i += kUnroll * L) {
    Raw raw[kUnroll];
#pragma GCC unroll 4
    for (size_t u = 0; u < kUnroll; ++u) raw[u] = load<Raw>(src + i + u * L);
#pragma GCC unroll 4
    for (size_t u = 0; u < kUnroll; ++u) store(dst + i + u * L, Dst::encode(Src::decode(raw[u]) * scale));
  }
  for (; i + L <= n; i += L) store(dst + i, Dst::encode(Src::decode(load<Raw>(src + i)) * scale));
  if (i < n) {
    const Raw raw = load_partial<Raw>(src + i, (n - i) * sizeof(typename Src::Store));
    store_partial(dst + i, Dst::encode(Src::decode(raw) * scale), (n - i) * sizeof(typename Dst::Store));
  }
}

template <class Dst, class Src, int kLanes = 1>
void cast_entry(void* dst, const void* src, size_t n_elems, float scale) {
  if (n_elems == 0) return;
  const FloatEnv env;
  const auto loop = cast_loop<Dst, Src>;
  // through a volatile pointer: the loop must not be inlined to before the environment is set
  const auto volatile call = loop;
  call(static_cast<typename Dst::Store*>(dst), static_cast<const typename Src::Store*>(src), n_elems * kLanes,
       scale);
}

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
