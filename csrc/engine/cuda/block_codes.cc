#include "engine/cuda/block_codes.h"

namespace pycomm::cuda {

Status BlockCodes::encode(std::byte* message, float* values, uint64_t n, float* residual, bool keep,
                          Stream stream) const {
  auto* const maxima = reinterpret_cast<float*>(message);
  std::byte* const codes = message + n_blocks(n) * sizeof(float);
  float* from = values;
  if (residual != nullptr) {
    const void* srcs[2] = {residual, values};
    const ReduceSegment sum{residual, srcs, n};
    PYCOMM_RETURN_IF_ERROR(cuda::reduce(DType::kFloat32, ReduceOp::kSum, {&sum, 1}, 2, 1.0, stream));
    from = residual;
  }
  PYCOMM_RETURN_IF_ERROR(cuda::block_maxima(from, n, maxima, stream));
  PYCOMM_RETURN_IF_ERROR(cuda::quantize(code, codes, from, n, maxima, residual != nullptr, stream));
  return keep ? cuda::dequantize(code, values, codes, n, maxima, stream) : Status();
}

Status BlockCodes::decode(float* values, const std::byte* message, uint64_t n, Stream stream) const {
  const auto* const maxima = reinterpret_cast<const float*>(message);
  return cuda::dequantize(code, values, message + n_blocks(n) * sizeof(float), n, maxima, stream);
}

}  // namespace pycomm::cuda
