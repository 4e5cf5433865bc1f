// The table of one instruction set: which format and operation serve which dtype.
//
// Included once, by isa_<name>.cc. Undefined on purpose: min, max and bitwise of complex; bitwise of floats;
// avg and premul_sum of integers (an integer mean is not an integer, and a factor that is would be a
// product); avg and premul_sum of bool. For bool sum and max are or, product and min are and, as in torch.
#pragma once

#include "kernels/blocks_body.h"
#include "kernels/cast_body.h"
#include "kernels/isa.h"
#include "kernels/random_body.h"
#include "kernels/reduce_body.h"

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

constexpr int at(DType t) { return static_cast<int>(t); }
constexpr int at(ReduceOp op) { return static_cast<int>(op); }

template <class F>
constexpr void fill_float(KernelTable& table, DType t) {
  ReduceFn* row = table.reduce[at(t)];
  row[at(ReduceOp::kSum)] = reduce_entry<Sum<F>>;
  row[at(ReduceOp::kProduct)] = reduce_entry<Product<F>>;
  row[at(ReduceOp::kMin)] = reduce_entry<Min<F>>;
  row[at(ReduceOp::kMax)] = reduce_entry<Max<F>>;
  row[at(ReduceOp::kAvg)] = reduce_entry<Avg<F>>;
  row[at(ReduceOp::kPremulSum)] = reduce_entry<PremulSum<F>>;
}

template <class F>
constexpr void fill_complex(KernelTable& table, DType t) {
  ReduceFn* row = table.reduce[at(t)];
  row[at(ReduceOp::kSum)] = reduce_entry<Sum<F>, 2>;
  row[at(ReduceOp::kProduct)] = reduce_entry<ComplexProduct<F>, 2>;
  row[at(ReduceOp::kAvg)] = reduce_entry<Avg<F>, 2>;
  row[at(ReduceOp::kPremulSum)] = reduce_entry<PremulSum<F>, 2>;
}

template <class T, class Unsigned>
constexpr void fill_integer(KernelTable& table, DType t) {
  ReduceFn* row = table.reduce[at(t)];
  row[at(ReduceOp::kSum)] = reduce_entry<Sum<Plain<Unsigned>>>;
  row[at(ReduceOp::kProduct)] = reduce_entry<Product<Plain<Unsigned>>>;
  row[at(ReduceOp::kMin)] = reduce_entry<Min<Plain<T>>>;
  row[at(ReduceOp::kMax)] = reduce_entry<Max<Plain<T>>>;
  row[at(ReduceOp::kBand)] = reduce_entry<And<Plain<uint8_t>>, sizeof(T)>;
  row[at(ReduceOp::kBor)] = reduce_entry<Or<Plain<uint8_t>>, sizeof(T)>;
  row[at(ReduceOp::kBxor)] = reduce_entry<Xor<Plain<uint8_t>>, sizeof(T)>;
}

constexpr void fill_bool(KernelTable& table) {
  ReduceFn* row = table.reduce[at(DType::kBool)];
  row[at(ReduceOp::kSum)] = reduce_entry<Or<Bool>>;
  row[at(ReduceOp::kMax)] = reduce_entry<Or<Bool>>;
  row[at(ReduceOp::kBor)] = reduce_entry<Or<Bool>>;
  row[at(ReduceOp::kProduct)] = reduce_entry<And<Bool>>;
  row[at(ReduceOp::kMin)] = reduce_entry<And<Bool>>;
  row[at(ReduceOp::kBand)] = reduce_entry<And<Bool>>;
  row[at(ReduceOp::kBxor)] = reduce_entry<Xor<Bool>>;
}

template <class F>
constexpr void fill_small_casts(KernelTable& table, DType t) {
  table.cast[at(t)][at(DType::kFloat32)] = cast_entry<F, Plain<float>>;
  table.cast[at(DType::kFloat32)][at(t)] = cast_entry<Plain<float>, F>;
  table.cast[at(t)][at(t)] = cast_entry<F, F>;
}

template <class F>
constexpr void fill_blocks(KernelTable& table, DType t) {
  table.blocks[at(t)] = {quantize_entry<F>, combine_entry<F>, dequantize_entry<F>};
}

constexpr KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  fill_float<Plain<double>>(table, DType::kFloat64);
  fill_float<Plain<float>>(table, DType::kFloat32);
  fill_float<Float16>(table, DType::kFloat16);
  fill_float<BFloat16>(table, DType::kBFloat16);
  fill_float<Float8E4M3>(table, DType::kFloat8E4M3);
  fill_float<Float8E5M2>(table, DType::kFloat8E5M2);
  fill_complex<Plain<float>>(table, DType::kComplex64);
  fill_complex<Plain<double>>(table, DType::kComplex128);
  fill_integer<int8_t, uint8_t>(table, DType::kInt8);
  fill_integer<int16_t, uint16_t>(table, DType::kInt16);
  fill_integer<int32_t, uint32_t>(table, DType::kInt32);
  fill_integer<int64_t, uint64_t>(table, DType::kInt64);
  fill_integer<uint8_t, uint8_t>(table, DType::kUInt8);
  fill_bool(table);

  fill_small_casts<Float16>(table, DType::kFloat16);
  fill_small_casts<BFloat16>(table, DType::kBFloat16);
  fill_small_casts<Float8E4M3>(table, DType::kFloat8E4M3);
  fill_small_casts<Float8E5M2>(table, DType::kFloat8E5M2);
  table.cast[at(DType::kFloat32)][at(DType::kFloat32)] = cast_entry<Plain<float>, Plain<float>>;
  table.cast[at(DType::kFloat64)][at(DType::kFloat64)] = cast_entry<Plain<double>, Plain<double>>;
  table.cast[at(DType::kFloat32)][at(DType::kFloat64)] = cast_entry<Float32AsDouble, Plain<double>>;
  table.cast[at(DType::kFloat64)][at(DType::kFloat32)] = cast_entry<Plain<double>, Float32AsDouble>;
  table.cast[at(DType::kComplex64)][at(DType::kComplex64)] = cast_entry<Plain<float>, Plain<float>, 2>;
  table.cast[at(DType::kComplex128)][at(DType::kComplex128)] = cast_entry<Plain<double>, Plain<double>, 2>;

  fill_blocks<Int8>(table, DType::kInt8);
  fill_blocks<BlockFloat8>(table, DType::kFloat8E4M3);
  fill_blocks<BlockFloat16>(table, DType::kFloat16);
  fill_blocks<BlockBFloat16>(table, DType::kBFloat16);
  table.block_maxima = PYCOMM_ISA_NS::block_maxima;
  table.keep_run = PYCOMM_ISA_NS::keep_run;
  return table;
}

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
