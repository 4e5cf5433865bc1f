// The CUDA kernels, as the engine calls them: plain C++, no CUDA header needed.
//
// Every function enqueues on a stream of the current device and returns; a Status tells of a bad argument
// (kValue) or a launch that CUDA refused (kSystem), never of what happens later on the device. Pointers are
// device memory, need no alignment, and stay valid until the stream has passed; arrays of segments are read
// before the call returns. Results have the same bits as those of the CPU's kernels (NaN
// payloads aside), whatever the alignment, the grid or the number of segments.
//
// Fast is memory of which all pointers of a segment have the same remainder modulo 16 (for casts: reach a
// multiple of 16 at the same element); the rest goes element by element. Cost: one read per source and one
// write per element, one launch per about 64 (reductions) or 128 (the others) segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/blocks.h"
#include "kernels/cast.h"

struct CUstream_st;

namespace pycomm::cuda {

using Stream = CUstream_st*;

// How many devices this process can use; 0 where there is no GPU or no driver, whatever the reason.
int device_count();

// ---- reduce: dst = finish(T(srcs)), as ReduceFn of kernels/reduce.h

inline constexpr int kMaxReduceSrcs = 32;

struct ReduceSegment {
  void* dst;                // may be one of the sources, exactly
  const void* const* srcs;  // n_srcs of them
  size_t n_elems;
};
bool reduce_supported(DType dtype, ReduceOp op);
Status reduce(DType dtype, ReduceOp op, std::span<const ReduceSegment> segments, int n_srcs, double scalar,
              Stream stream);

// ---- cast, pack, unpack: as kernels/cast.h, of many tensors in one launch

struct CastSegment {
  void* dst;
  const void* src;
  size_t n_elems;
};
bool cast_supported(DType dst, DType src);
bool scale_supported(DType dst, DType src);
Status cast(DType dst_dtype, DType src_dtype, std::span<const CastSegment> segments, float scale,
            Stream stream);
Status pack(DType dst_dtype, void* dst, DType src_dtype, std::span<const ConstBlock> srcs, float scale,
            Stream stream);
Status unpack(DType dst_dtype, std::span<const Block> dsts, DType src_dtype, const void* src, float scale,
              Stream stream);

// ---- the sum of the squares of many tensors, and how many elements are infinite or NaN

// Written to device memory. sum_squares is accumulated in float64 in an order that depends on the lengths
// only, so ranks with the same values get the same bits; it is not finite when n_nonfinite > 0.
struct NormResult {
  double sum_squares;
  uint64_t n_nonfinite;
};
// float64, float32, float16, bfloat16, complex64 and complex128 (|z|^2).
bool norm_supported(DType dtype);
size_t norm_workspace_bytes(DType dtype, std::span<const ConstBlock> tensors);
// workspace: device memory, aligned to 8, of at least that many bytes, untouched until the stream has passed.
Status norm(DType dtype, std::span<const ConstBlock> tensors, void* workspace, NormResult* result,
            Stream stream);

// ---- coded vectors: codes of 8 or 16 bits with a scale per block of 256, as kernels/blocks.h

// A *message* of n float32 values: its n_blocks(n) maxima, from coded_begin(n) on its codes, and codes of 0
// up to a multiple of four. It is aligned to 16.
constexpr size_t coded_begin(size_t n_elems) { return (n_blocks(n_elems) * sizeof(float) + 15) / 16 * 16; }
constexpr size_t coded_bytes(DType code, size_t n_elems) {
  return coded_begin(n_elems) + (n_elems + 3) / 4 * 4 * dtype_size(code);
}

struct CodedSegment {
  float* dst;               // may be the source that is not coded, exactly
  void* message;            // null: the result is not encoded
  float* residual;          // null: without error feedback
  const void* const* srcs;  // n_srcs messages; but float32 values at `plain`, which is -1 when there are none
  size_t n_elems;
};
bool blocks_supported(DType code);
// One pass: v = finish(T(decoded sources)), op sum or avg, as reduce. Without a message dst = v. With one,
// the codes of v + residual go there, residual gets what they do not say, and dst, if not null, what they
// say.
Status reduce_coded(DType code, ReduceOp op, std::span<const CodedSegment> segments, int n_srcs, int plain,
                    double scalar, Stream stream);

}  // namespace pycomm::cuda
