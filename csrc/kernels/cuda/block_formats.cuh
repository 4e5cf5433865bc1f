// The formats of kernels/blocks.h on the device: how a block's maximum gives its scale, and codes their
// values.
//
// As formats.cuh; a Block format has scale_of() besides. The same operations as in kernels/blocks_body.h, so
// the same bits.
#pragma once

#include "kernels/cuda/formats.cuh"

namespace pycomm::cuda {

struct Scale {
  float multiplier, inverse;
};

// 2^(kTarget - 1) <= M m < 2^kTarget, m a power of two; m and 1/m stay normal.
template <int kTarget>
PYCOMM_DEVICE Scale power_of_two_scale(float maximum) {
  const int exponent = static_cast<int>(__float_as_uint(maximum) >> 23) - 126;  // M < 2^exponent
  int shift = kTarget - exponent;
  shift = shift > 126 ? 126 : shift < -126 ? -126 : shift;
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

struct BlockInt8 {
  using Store = uint8_t;
  static PYCOMM_DEVICE float decode(Store v) { return static_cast<float>(static_cast<int8_t>(v)); }
  // Rounded to nearest by adding 1.5 * 2^23, whose last bit is 1; codes are in [-127, 127].
  static PYCOMM_DEVICE Store encode(float v) {
    return static_cast<Store>(__float_as_uint(v + 12582912.0f) & 0xff);
  }
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return {127.0f / maximum, maximum / 127.0f}; }
};
struct BlockFloat8 : Float8E4M3 {
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return power_of_two_scale<8>(maximum); }
};
struct BlockFloat16 : Float16 {
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return power_of_two_scale<15>(maximum); }
};
struct BlockBFloat16 : BFloat16 {
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return power_of_two_scale<0>(maximum); }
};

// A multiplier of 0 when the block is not finite (its inverse NaN) or vanishes (0).
template <class F>
PYCOMM_DEVICE Scale block_scale(float maximum) {
  constexpr float kVanishes = 7.888609052210118e-31f;  // 2^-100
  const bool vanishes = maximum < kVanishes;
  constexpr float kOverflows = 1.7014118346046923e38f;  // 2^127
  if (!vanishes && maximum < kOverflows) return F::scale_of(maximum);
  return {0.0f, vanishes ? 0.0f : __uint_as_float(0x7fc00000u)};
}

}  // namespace pycomm::cuda
