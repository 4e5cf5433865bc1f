// Numbers of 8 or 16 bits that share a scale block by block: what a compressed all-reduce sends.
//
// Words: a *block* is kBlockElems consecutive elements of a float32 vector (the last may be shorter); its
// *maximum* is the largest magnitude in it on any rank, infinity when one is not finite; its *code* for an
// element x is x * m in the format's nearest number, where m, the *multiplier*, follows from the maximum M:
//
//   int8                       127 / M           so that |code| <= 127
//   float8_e4m3fn, float16,    a power of two    so that M m is in [2^7, 2^8), [2^14, 2^15),
//   bfloat16                                     [2^-1, 2)
//
// A block whose M is below 2^-100 is sent as zeros; one whose M is 2^127 or more, where rounding could
// overflow, or infinite, decodes to NaN, on all ranks alike. Steps of an average over n ranks, each with its
// bound for an element of a block:
//
//   1. block_maxima, then the maximum over the ranks.
//   2. quantize: |x - decoded| <= u |x| + f.
//   3. combine, by the owner of a part, on all ranks' codes: their exact sum for int8 (below 2^24), else one
//      in float32 in rank order; divided by n and encoded again: at most as much again.
//   4. dequantize.
//
// With u = 2^-4 (float8_e4m3fn), 2^-11 (float16), 2^-8 (bfloat16), 0 (int8) and f = 2^-17 M, 2^-38 M,
// 2^-132 M, M / 254, where the steps of int8 add a float32 rounding of M 2^-23. Error feedback: quantize and
// combine put what they lost into the source, for the caller to add to the next vector (Karimireddy et al.
// 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes"). Cost: one read and write per
// element and step. All instruction sets give the same bits.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace pycomm {

inline constexpr size_t kBlockElems = 256;

constexpr size_t n_blocks(size_t n_elems) { return (n_elems + kBlockElems - 1) / kBlockElems; }

// int8, float8_e4m3fn, float16 and bfloat16.
bool blocks_supported(DType code);

// maxima: n_blocks(n_elems) of them.
void block_maxima(const float* src, size_t n_elems, float* maxima);

// With `feedback`, src becomes what the codes do not say of it: 0 in blocks that are not finite.
void quantize(DType code, void* codes, float* src, size_t n_elems, const float* maxima, bool feedback);

// codes: the encoded mean of all sources, which may be one of them. `lost`, when not null, gets n times what
// the encoding lost added to it.
void combine(DType code, void* codes, std::span<const void* const> srcs, size_t n_elems, const float* maxima,
             float* lost);

void dequantize(DType code, float* dst, const void* codes, size_t n_elems, const float* maxima);

}  // namespace pycomm
