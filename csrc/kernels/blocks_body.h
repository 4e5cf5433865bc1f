// The loops of blocks.h, for one instruction set: a vector at a time, a multiplier for each block.
//
// A format's BlockCode gives the multiplier of a block and its inverse, exact powers of two but for int8.
// All finite blocks multiply, so no loop branches per element; blocks that are not finite, or vanish, have
// the multiplier 0 and are rare.
#pragma once

#include "kernels/blocks.h"
#include "kernels/cast_body.h"

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

struct Scale {
  float multiplier, inverse;
};

constexpr float kVanishes = 0x1p-100f, kOverflows = 0x1p127f;

// 2^(Target - 1) <= M m < 2^Target, m a power of two.
template <int kTarget>
PYCOMM_INLINE Scale power_of_two_scale(float maximum) {
  uint32_t bits;
  __builtin_memcpy(&bits, &maximum, 4);
  const int exponent = static_cast<int>(bits >> 23) - 126;  // M < 2^exponent
  int shift = kTarget - exponent;
  if (shift > 126) shift = 126;  // m and 1/m stay normal
  if (shift < -126) shift = -126;
  const uint32_t up = static_cast<uint32_t>(127 + shift) << 23, down = static_cast<uint32_t>(127 - shift)
                                                                       << 23;
  Scale s;
  __builtin_memcpy(&s.multiplier, &up, 4);
  __builtin_memcpy(&s.inverse, &down, 4);
  return s;
}

// Rounded to nearest by adding 1.5 * 2^23, whose last bit is 1; codes are in [-127, 127].
struct Int8 : Small<uint8_t> {
  static PYCOMM_INLINE V decode(Raw r) {
    const I32 wide = (I32)(widen<Store, L>(r) << 24) >> 24;
    return __builtin_convertvector(wide, V);
  }
  static PYCOMM_INLINE Raw encode(V v) { return narrow<Store, L>((U32)(v + 0x1.8p23f) & 0xff); }
  static PYCOMM_INLINE Scale scale_of(float maximum) { return {127.0f / maximum, maximum / 127.0f}; }
};
struct BlockFloat8 : Float8E4M3 {
  static PYCOMM_INLINE Scale scale_of(float maximum) { return power_of_two_scale<8>(maximum); }
};
struct BlockFloat16 : Float16 {
  static PYCOMM_INLINE Scale scale_of(float maximum) { return power_of_two_scale<15>(maximum); }
};
struct BlockBFloat16 : BFloat16 {
  static PYCOMM_INLINE Scale scale_of(float maximum) { return power_of_two_scale<0>(maximum); }
};

// The scale of a block; a multiplier of 0 when it is not finite (its inverse NaN) or vanishes (0).
template <class F>
PYCOMM_INLINE Scale block_scale(float maximum) {
  if (maximum >= kVanishes && maximum < kOverflows) [[likely]]
    return F::scale_of(maximum);
  return {0.0f, maximum < kVanishes ? 0.0f : __builtin_nanf("")};
}

void block_maxima(const float* src, size_t n, float* maxima) {
  constexpr size_t L = kFloats;
  for (size_t begin = 0; begin < n; begin += kBlockElems) {
    const size_t end = begin + kBlockElems < n ? begin + kBlockElems : n;
    I32 largest = {};
    size_t i = begin;
    for (; i + L <= end; i += L) {
      const I32 magnitude = (I32)(load<U32>(src + i) & 0x7fffffffu);
      largest = magnitude > largest ? magnitude : largest;
    }
    if (i < end) {
      const I32 magnitude = (I32)(load_partial<U32>(src + i, (end - i) * 4) & 0x7fffffffu);
      largest = magnitude > largest ? magnitude : largest;
    }
    int32_t most = 0;
    for (size_t lane = 0; lane < L; ++lane) most = largest[lane] > most ? largest[lane] : most;
    if (most > 0x7f800000) most = 0x7f800000;  // NaN counts as infinity
    __builtin_memcpy(maxima + begin / kBlockElems, &most, 4);
  }
}

template <class F, bool kFeedback>
PYCOMM_INLINE void quantize_vector(typename F::Store* codes, float* src, size_t n, Scale s) {
  const bool whole = n == F::L;
  const F32 x = whole ? load<F32>(src) : load_partial<F32>(src, 4 * n);
  const typename F::Raw code = F::encode(x * s.multiplier);
  if (whole) {
    store(codes, code);
  } else {
    store_partial(codes, code, n * sizeof(typename F::Store));
  }
  if constexpr (kFeedback) {
    const F32 lost = x - F::decode(code) * s.inverse;
    if (whole) {
      store(src, lost);
    } else {
      store_partial(src, lost, 4 * n);
    }
  }
}

template <class F, bool kFeedback>
void quantize_loop(typename F::Store* codes, float* src, size_t n, const float* maxima) {
  for (size_t begin = 0; begin < n; begin += kBlockElems) {
    const size_t end = begin + kBlockElems < n ? begin + kBlockElems : n;
    const Scale s = block_scale<F>(maxima[begin / kBlockElems]);
    if (s.multiplier == 0.0f) {
      __builtin_memset(codes + begin, 0, (end - begin) * sizeof(typename F::Store));
      if (kFeedback && s.inverse != s.inverse) __builtin_memset(src + begin, 0, (end - begin) * 4);
      continue;
    }
    size_t i = begin;
    for (; i + F::L <= end; i += F::L) quantize_vector<F, kFeedback>(codes + i, src + i, F::L, s);
    if (i < end) quantize_vector<F, kFeedback>(codes + i, src + i, end - i, s);
  }
}

template <class F>
PYCOMM_INLINE void combine_vector(typename F::Store* codes, const void* const* srcs, size_t n_srcs, size_t at,
                                  size_t n, float* lost, float inverse) {
  using Raw = typename F::Raw;
  constexpr size_t kSize = sizeof(typename F::Store);
  const bool whole = n == F::L;
  F32 sum = {};
  for (size_t r = 0; r < n_srcs; ++r) {
    const auto* src = static_cast<const typename F::Store*>(srcs[r]) + at;
    const F32 value = F::decode(whole ? load<Raw>(src) : load_partial<Raw>(src, n * kSize));
    sum = r == 0 ? value : sum + value;
  }
  const F32 mean = sum / (F32{} + static_cast<float>(n_srcs));
  const Raw code = F::encode(mean);
  if (whole) {
    store(codes + at, code);
  } else {
    store_partial(codes + at, code, n * kSize);
  }
  if (lost != nullptr) {
    const F32 old = whole ? load<F32>(lost + at) : load_partial<F32>(lost + at, 4 * n);
    const F32 now = old + (mean - F::decode(code)) * static_cast<float>(n_srcs) * inverse;
    if (whole) {
      store(lost + at, now);
    } else {
      store_partial(lost + at, now, 4 * n);
    }
  }
}

template <class F>
void combine_loop(typename F::Store* codes, const void* const* srcs, size_t n_srcs, size_t n,
                  const float* maxima, float* lost) {
  for (size_t begin = 0; begin < n; begin += kBlockElems) {
    const size_t end = begin + kBlockElems < n ? begin + kBlockElems : n;
    const Scale s = block_scale<F>(maxima[begin / kBlockElems]);
    const bool is_sent = s.multiplier != 0.0f;
    const float inverse = is_sent ? s.inverse : 0.0f;
    size_t i = begin;
    for (; i + F::L <= end; i += F::L) combine_vector<F>(codes, srcs, n_srcs, i, F::L, lost, inverse);
    if (i < end) combine_vector<F>(codes, srcs, n_srcs, i, end - i, lost, inverse);
  }
}

template <class F>
void dequantize_loop(float* dst, const typename F::Store* codes, size_t n, const float* maxima) {
  using Raw = typename F::Raw;
  for (size_t begin = 0; begin < n; begin += kBlockElems) {
    const size_t end = begin + kBlockElems < n ? begin + kBlockElems : n;
    const float inverse = block_scale<F>(maxima[begin / kBlockElems]).inverse;
    size_t i = begin;
    for (; i + F::L <= end; i += F::L) store(dst + i, F::decode(load<Raw>(codes + i)) * inverse);
    if (i < end) {
      const Raw raw = load_partial<Raw>(codes + i, (end - i) * sizeof(typename F::Store));
      store_partial(dst + i, F::decode(raw) * inverse, 4 * (end - i));
    }
  }
}

// Entries: the loops behind a volatile pointer, so that none is inlined to before the environment is set.

template <class F>
void quantize_entry(void* codes, float* src, size_t n, const float* maxima, bool feedback) {
  const FloatEnv env;
  const auto loop = feedback ? quantize_loop<F, true> : quantize_loop<F, false>;
  const auto volatile call = loop;
  call(static_cast<typename F::Store*>(codes), src, n, maxima);
}

template <class F>
void combine_entry(void* codes, const void* const* srcs, size_t n_srcs, size_t n, const float* maxima,
                   float* lost) {
  const FloatEnv env;
  const auto loop = combine_loop<F>;
  const auto volatile call = loop;
  call(static_cast<typename F::Store*>(codes), srcs, n_srcs, n, maxima, lost);
}

template <class F>
void dequantize_entry(float* dst, const void* codes, size_t n, const float* maxima) {
  const FloatEnv env;
  const auto loop = dequantize_loop<F>;
  const auto volatile call = loop;
  call(dst, static_cast<const typename F::Store*>(codes), n, maxima);
}

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
