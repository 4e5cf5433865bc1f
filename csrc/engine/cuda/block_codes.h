// What travels in a call with block codes: float32 values as numbers of 8 or 16 bits with a scale per 256.
//
// A *message* of n values is its blocks' maxima (float32), then its n codes (kernels/blocks.h); its blocks
// begin at its first value. The sender's maxima are its own, so nothing is agreed on before: as
// engine/compressed.h, which does the same between hosts. Everything is enqueued on a stream. Cost: three or
// four passes over the values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/blocks.h"
#include "kernels/cuda/kernels.h"

namespace pycomm::cuda {

struct BlockCodes {
  DType code = DType::kInt8;  // int8, float8_e4m3fn, float16 or bfloat16

  size_t message_bytes(uint64_t n) const { return n_blocks(n) * sizeof(float) + n * dtype_size(code); }
  // With a residual (n values): it is added before, and then holds what the message does not say. With `keep`
  // the values become what the message says. The message is aligned to 4.
  Status encode(std::byte* message, float* values, uint64_t n, float* residual, bool keep,
                Stream stream) const;
  Status decode(float* values, const std::byte* message, uint64_t n, Stream stream) const;
};

}  // namespace pycomm::cuda
