// Formats: how the elements of a dtype become lanes to compute with, and back.
//
// A Format has Store (what lies in memory), Acc (what is computed with), L lanes per vector of Acc, and
// decode/encode between vectors of the two. Low-precision floats decode to fp32 exactly and encode with
// round-to-nearest-even. fp16 and e5m2 overflow to infinity; e4m3fn has none and saturates at 448, infinity
// included, as torch's cast does; NaN stays NaN and keeps its sign. The integer forms follow F. Giesen,
// "float->half variants" (public domain), for any split of exponent and mantissa: a subnormal result comes
// from adding a constant whose last bit is the format's smallest step, so that the adder does the rounding.
// They need the environment of float_env.h. Hardware conversions are used where they give the same bits.
#pragma once

#include "kernels/vec.h"

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

constexpr int kFloats = kVecBytes / 4;
using F32 = Vec<float, kFloats>;
using I32 = Vec<int32_t, kFloats>;
using U32 = Vec<uint32_t, kFloats>;

PYCOMM_INLINE U32 splat(uint32_t v) { return U32{} + v; }

// Bit patterns below are added and shifted as unsigned lanes (they may wrap); magnitudes, below 2^31, are
// compared as signed lanes, which every instruction set can.
template <int kExpBits, int kManBits, uint32_t kNanCode>
PYCOMM_INLINE F32 decode_small(U32 code) {
  constexpr int kBias = (1 << (kExpBits - 1)) - 1;
  constexpr uint32_t kRebias = (127u - kBias) << 23;
  constexpr uint32_t kMaxExp = (1u << kExpBits) - 1;
  const U32 mag = code & ((1u << (kExpBits + kManBits)) - 1);
  const U32 sign = (code >> (kExpBits + kManBits)) << 31;
  const U32 shifted = mag << (23 - kManBits);
  U32 bits = shifted + kRebias;
  if constexpr (kExpBits == 5) {  // has infinity: the largest exponent maps to 255
    bits = (I32)mag >= (I32)splat(kMaxExp << kManBits) ? bits + ((128u - kMaxExp + kBias) << 23) : bits;
  } else {
    bits = mag == kNanCode ? splat(0x7fc00000) : bits;
  }
  constexpr uint32_t kOne = kRebias + (1u << 23);  // the exponent of subnormals
  const F32 subnormal = (F32)(shifted + kOne) - (F32)splat(kOne);
  bits = (I32)mag < (I32)splat(1u << kManBits) ? (U32)subnormal : bits;
  return (F32)(bits | sign);
}

template <int kExpBits, int kManBits, uint32_t kNanCode>
PYCOMM_INLINE U32 encode_small(F32 value) {
  constexpr int kBias = (1 << (kExpBits - 1)) - 1;
  constexpr int kShift = 23 - kManBits;
  const U32 bits = (U32)value;
  const U32 mag = bits & 0x7fffffffu;
  const U32 sign = (bits >> (31 - kExpBits - kManBits)) & (1u << (kExpBits + kManBits));
  const U32 odd = (mag >> kShift) & 1;
  constexpr uint32_t kRound = (1u << (kShift - 1)) - 1 - ((127u - kBias) << 23);
  const U32 normal = (mag + kRound + odd) >> kShift;
  constexpr uint32_t kMagic = (127u + 24 - kBias - kManBits) << 23;
  const U32 subnormal = (U32)((F32)mag + (F32)splat(kMagic)) - kMagic;
  U32 code = (I32)mag < (I32)splat((128u - kBias) << 23) ? subnormal : normal;
  constexpr uint32_t kLargest = kExpBits == 5 ? 31u << kManBits : kNanCode - 1;  // infinity, or 448
  code = (I32)code < (I32)splat(kLargest) ? code : splat(kLargest);
  code = value != value ? splat(kNanCode) : code;
  return code | sign;
}

// T is a machine type: memory and lanes are the same.
template <class T>
struct Plain {
  using Store = T;
  using Acc = T;
  static constexpr int L = kVecBytes / sizeof(T);
  using V = Vec<Acc, L>;
  using Raw = Vec<Store, L>;
  static PYCOMM_INLINE V decode(Raw r) { return r; }
  static PYCOMM_INLINE Raw encode(V v) { return v; }
};

// Any nonzero byte is true, as in torch; results are 0 or 1.
struct Bool {
  using Store = uint8_t;
  using Acc = uint8_t;
  static constexpr int L = kVecBytes;
  using V = Vec<Acc, L>;
  using Raw = Vec<Store, L>;
  static PYCOMM_INLINE V decode(Raw r) { return (V)(r != 0) & 1; }
  static PYCOMM_INLINE Raw encode(V v) { return v; }
};

template <class StoreT>
struct Small {
  using Store = StoreT;
  using Acc = float;
  static constexpr int L = kFloats;
  using V = F32;
  using Raw = Vec<Store, L>;
};

struct BFloat16 : Small<uint16_t> {
  static PYCOMM_INLINE V decode(Raw r) { return (F32)(widen<Store, L>(r) << 16); }
  static PYCOMM_INLINE Raw encode(V v) {
    const U32 bits = (U32)v;
    const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return narrow<Store, L>(v != v ? ((bits >> 16) | 0x40) : rounded);
  }
};

struct Float16 : Small<uint16_t> {
  static PYCOMM_INLINE V decode(Raw r) {
#if defined(__AVX512BW__)
    return (V)_mm512_maskz_cvtph_ps(0xffff, (__m256i)r);
#elif defined(__F16C__)
    return (V)_mm256_cvtph_ps((__m128i)r);
#elif defined(__aarch64__)
    return (V)vcvt_f32_f16((float16x4_t)r);
#else
    return decode_small<5, 10, 0x7e00>(widen<Store, L>(r));
#endif
  }
  static PYCOMM_INLINE Raw encode(V v) {
#if defined(__AVX512BW__)
    return (Raw)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (Raw)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (Raw)vcvt_f16_f32((float32x4_t)v);
#else
    return narrow<Store, L>(encode_small<5, 10, 0x7e00>(v));
#endif
  }
};

#if defined(__F16C__) || defined(__aarch64__)
constexpr bool kHalfInHardware = true;
#else
constexpr bool kHalfInHardware = false;
#endif

struct Float8E5M2 : Small<uint8_t> {
  static PYCOMM_INLINE V decode(Raw r) {
    if constexpr (kHalfInHardware) {  // e5m2 is the upper byte of fp16
      return Float16::decode(narrow<uint16_t, L>(widen<Store, L>(r) << 8));
    } else {
      return decode_small<5, 2, 0x7f>(widen<Store, L>(r));
    }
  }
  static PYCOMM_INLINE Raw encode(V v) { return narrow<Store, L>(encode_small<5, 2, 0x7f>(v)); }
};

struct Float8E4M3 : Small<uint8_t> {
  static PYCOMM_INLINE V decode(Raw r) { return decode_small<4, 3, 0x7f>(widen<Store, L>(r)); }
  static PYCOMM_INLINE Raw encode(V v) { return narrow<Store, L>(encode_small<4, 3, 0x7f>(v)); }
};

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
