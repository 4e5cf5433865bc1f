// Reductions over memory: dst[i] = finish(T(srcs[0][i], …, srcs[n-1][i])).
//
// T is the canonical reduction tree of docs/numerics.md over the sources in the order given: for one source
// it is that source, else with p the largest power of two <= n and m = min(p, n - p/2),
// T(lo, hi) = T(lo, lo+m) (+) T(lo+m, hi). Every ISA and every n_dsts gives the same bits. fp16, bf16 and fp8
// are accumulated in fp32 and rounded once, to nearest even. Kernels set MXCSR's rounding and denormal bits
// themselves and restore them; no FMA contraction.
//
// `scalar` is used by avg (the sum is divided by it, once, before rounding) and premul_sum (every source is
// multiplied by it before the sum); other ops ignore it. With one source, avg is "divide" and premul_sum is
// "multiply". All dsts get the same value; a dst may be the same memory as a source (exactly, not shifted).
// Pointers need no alignment. n_elems = 0 is a no-op; n_dsts and n_srcs are at least 1, n_srcs at most 2^30.
#pragma once

#include <cstddef>
#include <string>

#include "base/dtype.h"
#include "base/status.h"

namespace pycomm {

using ReduceFn = void (*)(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t n_elems,
                          double scalar);

// Null when the operation is not defined for the dtype (for example band of a float, avg of an integer).
ReduceFn find_reduce(DType dtype, ReduceOp op);

// "sum, product, min, max" and so on: what find_reduce knows for this dtype, for error messages.
std::string defined_ops(DType dtype);

// "baseline", "avx2" or "avx512": chosen once, at first use, from cpuid, lowered by PYCOMM_ISA.
const char* active_isa();

// Fails when PYCOMM_ISA names what this build or this processor does not have; find_reduce then knows
// nothing. The extension calls it at import.
Status init_kernels();

}  // namespace pycomm
