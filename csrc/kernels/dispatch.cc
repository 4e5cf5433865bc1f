// Which instruction set serves this process, and the public functions of reduce.h and cast.h.
//
// The choice is made once, from cpuid, lowered by PYCOMM_ISA. A name that is unknown, or that this processor
// cannot run, is an error: init_kernels returns it (the extension raises it at import), and until then
// nothing is defined: find_reduce and cast_supported say no rather than run something else than what was
// asked for.
#include <cstdlib>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/isa.h"

namespace pycomm {
namespace {

struct Isa {
  const KernelTable* table;
  bool (*supported)();
};

// Slowest first.
const Isa kIsas[] = {
    {&kBaselineTable, [] { return true; }},
#if defined(__x86_64__) && !defined(PYCOMM_BASELINE_ONLY)  // the fuzz targets: clang 14 cannot ask for f16c
    {&kAvx2Table, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
    {&kAvx512Table,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
};

const KernelTable* best_table() {
  const KernelTable* best = nullptr;
  for (const Isa& isa : kIsas) {
    if (isa.supported()) best = isa.table;
  }
  return best;
}

const KernelTable* choose_table() {
  const char* wanted = std::getenv("PYCOMM_ISA");
  if (wanted == nullptr || *wanted == '\0') return best_table();
  return find_isa(wanted);
}

}  // namespace

const KernelTable* find_isa(const char* name) {
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.table->name, name) == 0) return isa.supported() ? isa.table : nullptr;
  }
  return nullptr;
}

std::string supported_isas() {
  std::string names;
  for (const Isa& isa : kIsas) {
    if (!isa.supported()) continue;
    if (!names.empty()) names += ", ";
    names += isa.table->name;
  }
  return names;
}

const KernelTable* active_table() {
  static const KernelTable* const table = choose_table();
  return table;
}

Status init_kernels() {
  if (active_table() != nullptr) return {};
  const char* wanted = std::getenv("PYCOMM_ISA");
  return Status::error(Code::kValue, format("PYCOMM_ISA=%s: expected an instruction set that this build and "
                                            "this processor have (%s); unset it to take the best",
                                            wanted ? wanted : "", supported_isas().c_str()));
}

const char* active_isa() { return active_table() != nullptr ? active_table()->name : "none"; }

ReduceFn find_reduce(DType dtype, ReduceOp op) {
  const KernelTable* table = active_table();
  return table ? table->reduce[static_cast<int>(dtype)][static_cast<int>(op)] : nullptr;
}

std::string defined_ops(DType dtype) {
  std::string names;
  for (int op = 0; op < kNumReduceOps; ++op) {
    if (find_reduce(dtype, static_cast<ReduceOp>(op)) == nullptr) continue;
    if (!names.empty()) names += ", ";
    names += reduce_op_name(static_cast<ReduceOp>(op));
  }
  return names;
}

bool cast_supported(DType dst, DType src) {
  const KernelTable* table = active_table();
  return table && (dst == src || table->cast[static_cast<int>(dst)][static_cast<int>(src)] != nullptr);
}

bool scale_supported(DType dst, DType src) {
  const KernelTable* table = active_table();
  return table && table->cast[static_cast<int>(dst)][static_cast<int>(src)] != nullptr;
}

void cast(DType dst_dtype, void* dst, DType src_dtype, const void* src, size_t n_elems, float scale) {
  if (dst_dtype == src_dtype && scale == 1.0f) {
    if (n_elems > 0) std::memmove(dst, src, n_elems * dtype_size(src_dtype));
    return;
  }
  active_table()->cast[static_cast<int>(dst_dtype)][static_cast<int>(src_dtype)](dst, src, n_elems, scale);
}

void pack(DType dst_dtype, void* dst, DType src_dtype, std::span<const ConstBlock> srcs, float scale) {
  char* at = static_cast<char*>(dst);
  for (const ConstBlock& block : srcs) {
    cast(dst_dtype, at, src_dtype, block.data, block.n_elems, scale);
    at += block.n_elems * dtype_size(dst_dtype);
  }
}

void unpack(DType dst_dtype, std::span<const Block> dsts, DType src_dtype, const void* src, float scale) {
  const char* at = static_cast<const char*>(src);
  for (const Block& block : dsts) {
    cast(dst_dtype, block.data, src_dtype, at, block.n_elems, scale);
    at += block.n_elems * dtype_size(src_dtype);
  }
}

}  // namespace pycomm
