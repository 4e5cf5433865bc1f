// Casts between float32 and the low-precision floats, and pack/unpack of many tensors in one call.
//
// Rounding is to nearest even, overflow goes to infinity (float8_e4m3fn has none: 448 with the sign kept, for
// infinity too) as torch's casts do since 2.13, NaN stays NaN. `scale` multiplies in float32 (in float64 when
// one side is float64 or complex128): before rounding on the way down, after decoding on the way up. Same
// dtype on both sides is a (scaled) copy; a scale of exactly 1 between equal dtypes moves bits untouched. dst
// may be src exactly when the two dtypes have the same size, else they must not overlap. No alignment is
// needed.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace pycomm {

// Supported: any pair out of {float32, float16, bfloat16, float8_e4m3fn, float8_e5m2} with float32 on at
// least one side, and equal dtypes; and float64 <-> float32.
bool cast_supported(DType dst, DType src);
// Whether the pair takes a scale other than 1: all of the above but integers and bool.
bool scale_supported(DType dst, DType src);
// The pair must be supported, and so must a scale other than 1.
void cast(DType dst_dtype, void* dst, DType src_dtype, const void* src, size_t n_elems, float scale);

struct ConstBlock {
  const void* data;
  size_t n_elems;
};
struct Block {
  void* data;
  size_t n_elems;
};

// dst receives the blocks one after another.
void pack(DType dst_dtype, void* dst, DType src_dtype, std::span<const ConstBlock> srcs, float scale);
void unpack(DType dst_dtype, std::span<const Block> dsts, DType src_dtype, const void* src, float scale);

}  // namespace pycomm
