#include "kernels/blocks.h"

#include "kernels/isa.h"

namespace pycomm {
namespace {
const BlockFns& functions(DType code) { return active_table()->blocks[static_cast<int>(code)]; }
}  // namespace

bool blocks_supported(DType code) { return active_table() != nullptr && functions(code).quantize != nullptr; }

void block_maxima(const float* src, size_t n_elems, float* maxima) {
  active_table()->block_maxima(src, n_elems, maxima);
}

void quantize(DType code, void* codes, float* src, size_t n_elems, const float* maxima, bool feedback) {
  functions(code).quantize(codes, src, n_elems, maxima, feedback);
}

void combine(DType code, void* codes, std::span<const void* const> srcs, size_t n_elems, const float* maxima,
             float* lost) {
  functions(code).combine(codes, srcs.data(), srcs.size(), n_elems, maxima, lost);
}

void dequantize(DType code, float* dst, const void* codes, size_t n_elems, const float* maxima) {
  functions(code).dequantize(dst, codes, n_elems, maxima);
}

}  // namespace pycomm
