#include "engine/compressed.h"

#include <algorithm>

#include "kernels/reduce.h"
#include "schedule/catalog.h"

namespace pycomm {

void Codec::encode(std::byte* message, float* values, uint64_t n, uint64_t at, bool keep) const {
  float* const maxima = reinterpret_cast<float*>(message);
  std::byte* const codes = message + n_blocks(n) * sizeof(float);
  const ReduceFn add = find_reduce(DType::kFloat32, ReduceOp::kSum);
  for (uint64_t from = 0; from < n; from += kPiece) {
    const uint64_t m = std::min(kPiece, n - from);
    float* const mine = values + from;
    float* source = mine;
    if (residual_ != nullptr) {
      source = residual_ + at + from;
      void* dst = source;
      const void* srcs[2] = {mine, source};
      add(&dst, 1, srcs, 2, m, 1.0);
    }
    float* const largest = maxima + from / kBlockElems;
    std::byte* const to = codes + from * dtype_size(code_);
    block_maxima(source, m, largest);
    quantize(code_, to, source, m, largest, residual_ != nullptr);
    if (keep) dequantize(code_, mine, to, m, largest);
  }
}

void Codec::decode(float* values, const std::byte* message, uint64_t n, uint64_t from,
                   uint64_t n_values) const {
  const float* const maxima = reinterpret_cast<const float*>(message);
  const std::byte* const codes = message + n_blocks(n) * sizeof(float);
  dequantize(code_, values, codes + from * dtype_size(code_), n_values, maxima + from / kBlockElems);
}

Status check_compression(const Signature& sig, bool several_hosts) {
  const char* const kind = call_kind_name(sig.kind);
  const char* const name = compression_name(sig.compression);
  const bool reduces = sig.kind == CallKind::kAllReduce || sig.kind == CallKind::kReduceScatter;
  if (!reduces && sig.kind != CallKind::kAllGather)
    return Status::error(Code::kType, format("%s takes no compression", kind));
  const bool sums = sig.op == ReduceOp::kSum || sig.op == ReduceOp::kAvg || sig.op == ReduceOp::kPremulSum;
  if (reduces && !sums) {
    return Status::error(Code::kValue, format("%s: compression='%s' is for op sum, avg and premul_sum, got "
                                              "'%s'; leave compression out",
                                              kind, name, reduce_op_name(sig.op)));
  }
  const bool is_float =
      sig.dtype == DType::kFloat32 || sig.dtype == DType::kFloat16 || sig.dtype == DType::kBFloat16;
  if (!is_float || dtype_size(code_dtype(sig.compression)) >= dtype_size(sig.dtype)) {
    const bool wide = dtype_size(code_dtype(sig.compression)) > 1;
    return Status::error(
        Code::kValue,
        format("%s: compression='%s' makes %s smaller, got %s; leave compression out", kind, name,
               wide ? "float32" : "float32, float16 and bfloat16", dtype_name(sig.dtype)));
  }
  if (!several_hosts) return Status();
  if (sig.deterministic) {
    return Status::error(Code::kValue,
                         format("%s: deterministic=True promises bits that do not depend on which rank runs "
                                "where; what compression='%s' rounds between hosts does: give one of the two",
                                kind, name));
  }
  if (sig.algorithm < catalog().size() && std::string_view(catalog()[sig.algorithm].name) != "direct") {
    return Status::error(Code::kValue, format("%s: compression='%s' between hosts needs the algorithm "
                                              "'direct', got '%s', which would round at every hop",
                                              kind, name, catalog()[sig.algorithm].name));
  }
  return Status();
}

}  // namespace pycomm
