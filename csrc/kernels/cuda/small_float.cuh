// Small floats by integer arithmetic: float32 to and from formats of at most 16 bits, one element at a time.
//
// The same forms as kernels/convert.h has for vectors (after F. Giesen, "float->half variants", public
// domain): exact on the way up; on the way down round to nearest even, denormals included: a subnormal result
// comes from adding a constant whose last bit is the format's smallest step, so that the adder rounds. With
// five exponent bits overflow gives infinity; with four (e4m3fn) there is none and the largest finite number,
// 448, is given instead. NaN stays NaN with its sign. Serves where the processor has no conversion of its
// own; needs denormals and round-to-nearest, which GPUs have by default (no -ftz, no fast-math).
#pragma once

#include "kernels/cuda/platform_base.cuh"

namespace pycomm::cuda {

template <int kExpBits, int kManBits, uint32_t kNanCode>
PYCOMM_DEVICE float decode_small(uint32_t code) {
  constexpr uint32_t kBias = (1u << (kExpBits - 1)) - 1;
  constexpr uint32_t kRebias = (127u - kBias) << 23;
  constexpr uint32_t kMaxExp = (1u << kExpBits) - 1;
  const uint32_t mag = code & ((1u << (kExpBits + kManBits)) - 1);
  const uint32_t sign = (code >> (kExpBits + kManBits)) << 31;
  const uint32_t shifted = mag << (23 - kManBits);
  uint32_t bits = shifted + kRebias;
  if constexpr (kExpBits == 5) {
    if (mag >= kMaxExp << kManBits) bits += (128u - kMaxExp + kBias) << 23;
  } else {
    if (mag == kNanCode) bits = 0x7fc00000;
  }
  constexpr uint32_t kOne = kRebias + (1u << 23);  // the exponent of subnormals
  if (mag < 1u << kManBits) bits = __float_as_uint(__uint_as_float(shifted + kOne) - __uint_as_float(kOne));
  return __uint_as_float(bits | sign);
}

template <int kExpBits, int kManBits, uint32_t kNanCode>
PYCOMM_DEVICE uint32_t encode_small(float value) {
  constexpr uint32_t kBias = (1u << (kExpBits - 1)) - 1;
  constexpr int kShift = 23 - kManBits;
  const uint32_t bits = __float_as_uint(value);
  const uint32_t mag = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> (31 - kExpBits - kManBits)) & (1u << (kExpBits + kManBits));
  constexpr uint32_t kRound = (1u << (kShift - 1)) - 1 - ((127u - kBias) << 23);
  constexpr uint32_t kMagic = (127u + 24 - kBias - kManBits) << 23;
  uint32_t code;
  if (mag < (128u - kBias) << 23) {
    code = __float_as_uint(__uint_as_float(mag) + __uint_as_float(kMagic)) - kMagic;
  } else {
    code = (mag + kRound + ((mag >> kShift) & 1)) >> kShift;
  }
  constexpr uint32_t kLargest = kExpBits == 5 ? 31u << kManBits : kNanCode - 1;  // infinity, or 448
  if (code > kLargest) code = kLargest;
  if (mag > 0x7f800000u) code = kNanCode;
  return code | sign;
}

}  // namespace pycomm::cuda
