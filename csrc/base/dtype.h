// Element types and reduction operations: the vocabulary shared by kernels, engine and binding.
//
// The numeric values travel between ranks (agreement check), so they never change meaning. Names are
// torch's without the "torch." prefix. A new dtype needs a line in each function here and a kernel column.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // torch.float8_e4m3fn: no infinity, NaN is S.1111.111
  kFloat8E5M2,  // torch.float8_e5m2
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
};
inline constexpr int kNumDTypes = 14;

enum class ReduceOp : uint8_t { kSum, kProduct, kMin, kMax, kAvg, kBand, kBor, kBxor, kPremulSum };
inline constexpr int kNumReduceOps = 9;

constexpr size_t dtype_size(DType t) {
  switch (t) {
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kComplex64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool: return 1;
    case DType::kComplex128: return 16;
  }
  return 0;
}

constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::kFloat64: return "float64";
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt8: return "uint8";
    case DType::kBool: return "bool";
    case DType::kComplex64: return "complex64";
    case DType::kComplex128: return "complex128";
  }
  return "?";
}

constexpr const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kProduct: return "product";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kBand: return "band";
    case ReduceOp::kBor: return "bor";
    case ReduceOp::kBxor: return "bxor";
    case ReduceOp::kPremulSum: return "premul_sum";
  }
  return "?";
}

// Low-precision floats are accumulated in fp32 and rounded once where one rank sees all operands.
constexpr bool is_low_precision(DType t) {
  return t == DType::kFloat16 || t == DType::kBFloat16 || t == DType::kFloat8E4M3 || t == DType::kFloat8E5M2;
}

}  // namespace pycomm
