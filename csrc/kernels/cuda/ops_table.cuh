// Which Op serves a dtype and an operation: the table that every kernel of reductions is made from.
//
// A Maker turns an Op into what its kernel needs on the host (an Entry, usually with the function that
// launches the kernel): `Maker::template make<O>(n_lanes)`, where n_lanes is how many elements of the Op's
// format make one of the dtype (a complex number is two floats, four bytes are an int32 for bitwise
// operations). OpTable<Maker>::find gives Entry{} where the operation is not defined. Instantiates Maker for
// some 30 Ops: include it in one .cu per kernel.
#pragma once

#include <type_traits>

#include "kernels/cuda/ops.cuh"

namespace pycomm::cuda {

// What training calls all the time: its kernels are made for each number of sources.
template <class O>
constexpr bool kIsTrainingSum = false;
template <>
inline constexpr bool kIsTrainingSum<ScaledSum<Plain<float>>> = true;
template <>
inline constexpr bool kIsTrainingSum<ScaledSum<Float16>> = true;
template <>
inline constexpr bool kIsTrainingSum<ScaledSum<BFloat16>> = true;

template <class A>
void set_param(Param<A>& p, ReduceOp op, double scalar) {
  p = make_param<A>(op, scalar);
}
inline void set_param(Which& p, ReduceOp op, double) { p.op = op; }

template <class Maker>
class OpTable {
 public:
  using Entry = typename Maker::Entry;

  static Entry find(DType dtype, ReduceOp op) {
    switch (dtype) {
      case DType::kFloat64: return of_float<Plain<double>>(op);
      case DType::kFloat32: return of_float<Plain<float>>(op);
      case DType::kFloat16: return of_float<Float16>(op);
      case DType::kBFloat16: return of_float<BFloat16>(op);
      case DType::kFloat8E4M3: return of_float<Float8E4M3>(op);
      case DType::kFloat8E5M2: return of_float<Float8E5M2>(op);
      case DType::kInt8: return of_integer<int8_t>(op);
      case DType::kInt16: return of_integer<int16_t>(op);
      case DType::kInt32: return of_integer<int32_t>(op);
      case DType::kInt64: return of_integer<int64_t>(op);
      case DType::kUInt8: return of_integer<uint8_t>(op);
      case DType::kBool: return of_bool(op);
      case DType::kComplex64: return of_complex<float>(op);
      case DType::kComplex128: return of_complex<double>(op);
    }
    return {};
  }

 private:
  template <class O>
  static Entry make(size_t n_lanes = 1) {
    return Maker::template make<O>(n_lanes);
  }

  // Of bytes a kernel for product, min and max would spill registers; min and max are exact.
  template <class F, class OfBytes>
  static Entry of_three() {
    return make<std::conditional_t<sizeof(typename F::Store) == 1, OfBytes, ProductMinMax<F>>>();
  }

  template <class F>
  static Entry of_float(ReduceOp op) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum: return make<ScaledSum<F>>();
      case ReduceOp::kProduct: return of_three<F, Product<F>>();
      case ReduceOp::kMin:
      case ReduceOp::kMax: return of_three<F, MinMax<F>>();
      case ReduceOp::kBand:
      case ReduceOp::kBor:
      case ReduceOp::kBxor: return {};
    }
    return {};
  }

  template <class T>
  static Entry of_complex(ReduceOp op) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum: return make<ScaledSum<Plain<T>>>(2);
      case ReduceOp::kProduct: return make<Product<ComplexFormat<T>>>();
      case ReduceOp::kMin:
      case ReduceOp::kMax:
      case ReduceOp::kBand:
      case ReduceOp::kBor:
      case ReduceOp::kBxor: return {};
    }
    return {};
  }

  template <class T>
  static Entry of_integer(ReduceOp op) {
    using Unsigned = std::make_unsigned_t<T>;
    using Wide = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    using WideSigned = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kProduct: return make<SumProduct<Plain<Unsigned, Wide>>>();
      case ReduceOp::kMin:
      case ReduceOp::kMax: return make<MinMax<Plain<T, WideSigned>>>();
      case ReduceOp::kBand:
      case ReduceOp::kBor:
      case ReduceOp::kBxor: return make<Bitwise<Bits>>(sizeof(T));
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum: return {};
    }
    return {};
  }

  static Entry of_bool(ReduceOp op) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kProduct:
      case ReduceOp::kMin:
      case ReduceOp::kMax:
      case ReduceOp::kBand:
      case ReduceOp::kBor:
      case ReduceOp::kBxor: return make<Bitwise<Bool>>();
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum: return {};
    }
    return {};
  }
};

}  // namespace pycomm::cuda
