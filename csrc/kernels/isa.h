// Internal to kernels/: the table of functions that one instruction set provides, and which sets there are.
//
// The bodies (reduce_body.h, cast_body.h, blocks_body.h, random_body.h, convert.h, vec.h, float_env.h) are
// compiled once per instruction set by isa_<name>.cc, with that set's flags (isa.cmake), inside an anonymous
// namespace: nothing of theirs may be merged by the linker with the same template compiled for another set,
// or a baseline machine would run AVX-512 code. The only symbol that such a file exports is its table. Every
// set gives the same bits (NaN payloads aside), so the choice is about speed only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/reduce.h"

namespace pycomm {

using CastFn = void (*)(void* dst, const void* src, size_t n_elems, float scale);

// See blocks.h.
struct BlockFns {
  void (*quantize)(void* codes, float* src, size_t n_elems, const float* maxima, bool feedback);
  void (*combine)(void* codes, const void* const* srcs, size_t n_srcs, size_t n_elems, const float* maxima,
                  float* lost);
  void (*dequantize)(float* dst, const void* codes, size_t n_elems, const float* maxima);
};

struct KernelTable {
  const char* name;
  ReduceFn reduce[kNumDTypes][kNumReduceOps];  // null: not defined
  CastFn cast[kNumDTypes][kNumDTypes];         // [dst][src]; null: no arithmetic on that pair
  BlockFns blocks[kNumDTypes];                 // by the dtype of the codes; null: not defined
  void (*block_maxima)(const float* src, size_t n_elems, float* maxima);
  void (*keep_run)(uint8_t* keep, uint64_t first, size_t n, uint64_t seed, uint64_t threshold);  // random.h
};

extern const KernelTable kBaselineTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
#endif

// The table of that name when it was compiled in and this processor can run it, else null.
const KernelTable* find_isa(const char* name);

// "baseline, avx2, avx512": what this processor can run, slowest first.
std::string supported_isas();

// The table in use; null when PYCOMM_ISA asks for what cannot be (init_kernels says so).
const KernelTable* active_table();

}  // namespace pycomm
