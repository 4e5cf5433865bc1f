// csrc/kernels in Python: _C.kernels, by raw address, for compression, tests and tools; else tensors go
// through the engine.
//
// dtypes and operations are given by the names of base/dtype.h. Addresses and counts are the caller's word:
// nothing here can check them. Importing the extension fails when PYCOMM_ISA asks for what is not there.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/kernel_names.h"
#include "kernels/blocks.h"
#include "kernels/cast.h"
#include "kernels/isa.h"
#include "kernels/random.h"
#include "kernels/reduce.h"

namespace py = pybind11;

namespace pycomm {

DType parse_dtype(const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType t = static_cast<DType>(i);
    if (name == dtype_name(t)) return t;
    if (i > 0) known += ", ";
    known += dtype_name(t);
  }
  throw_if_error(Status::error(
      Code::kValue, format("kernels: dtype is '%s'; expected one of: %s", name.c_str(), known.c_str())));
  return DType::kFloat32;  // not reached
}

namespace {

// One that block codes can have (kernels/blocks.h).
DType parse_code(const std::string& name) {
  const DType t = parse_dtype(name);
  if (!blocks_supported(t)) {
    throw_if_error(Status::error(
        Code::kValue,
        format("kernels: no codes of %s; expected int8, float8_e4m3fn, float16 or bfloat16", name.c_str())));
  }
  return t;
}

ReduceOp parse_op(const std::string& name, DType dtype) {
  for (int i = 0; i < kNumReduceOps; ++i) {
    if (name == reduce_op_name(static_cast<ReduceOp>(i))) return static_cast<ReduceOp>(i);
  }
  throw_if_error(Status::error(Code::kValue, format("kernels: op is '%s'; %s has: %s", name.c_str(),
                                                    dtype_name(dtype), defined_ops(dtype).c_str())));
  return ReduceOp::kSum;  // not reached
}

void reduce(const std::string& dtype_str, const std::string& op_str, const std::vector<uintptr_t>& dsts,
            const std::vector<uintptr_t>& srcs, size_t n_elems, double scalar, const std::string& isa) {
  const DType dtype = parse_dtype(dtype_str);
  const ReduceOp op = parse_op(op_str, dtype);
  const KernelTable* table = isa.empty() ? active_table() : find_isa(isa.c_str());
  if (table == nullptr) {
    throw_if_error(Status::error(Code::kValue, format("kernels: isa is '%s'; expected one of: %s",
                                                      isa.c_str(), supported_isas().c_str())));
  }
  const ReduceFn fn = table->reduce[static_cast<int>(dtype)][static_cast<int>(op)];
  if (fn == nullptr) {
    throw_if_error(
        Status::error(Code::kValue, format("kernels: %s is not defined for %s, which has: %s", op_str.c_str(),
                                           dtype_name(dtype), defined_ops(dtype).c_str())));
  }
  if (dsts.empty() || srcs.empty()) {
    throw_if_error(
        Status::error(Code::kValue, format("kernels: %zu destinations and %zu sources; expected at "
                                           "least one of each",
                                           dsts.size(), srcs.size())));
  }
  std::vector<void*> out;
  for (const uintptr_t p : dsts) out.push_back(reinterpret_cast<void*>(p));
  std::vector<const void*> in;
  for (const uintptr_t p : srcs) in.push_back(reinterpret_cast<const void*>(p));
  fn(out.data(), static_cast<int>(out.size()), in.data(), static_cast<int>(in.size()), n_elems, scalar);
}

std::pair<DType, DType> parse_cast(const std::string& dst, const std::string& src, float scale) {
  const DType to = parse_dtype(dst), from = parse_dtype(src);
  if (!cast_supported(to, from)) {
    throw_if_error(Status::error(
        Code::kValue,
        format("kernels: no cast from %s to %s; casts are between float32 and float64, float16, "
               "bfloat16, float8_e4m3fn or float8_e5m2, and between equal dtypes",
               src.c_str(), dst.c_str())));
  }
  if (scale != 1.0f && !scale_supported(to, from)) {
    throw_if_error(
        Status::error(Code::kValue, format("kernels: scale is %g for %s; integers and bool are only "
                                           "copied, with a scale of 1",
                                           scale, src.c_str())));
  }
  return {to, from};
}

void cast_py(const std::string& dst_dtype, uintptr_t dst, const std::string& src_dtype, uintptr_t src,
             size_t n_elems, float scale) {
  const auto [to, from] = parse_cast(dst_dtype, src_dtype, scale);
  cast(to, reinterpret_cast<void*>(dst), from, reinterpret_cast<const void*>(src), n_elems, scale);
}

using Blocks = std::vector<std::pair<uintptr_t, size_t>>;  // address, elements

void pack_py(const std::string& dst_dtype, uintptr_t dst, const std::string& src_dtype, const Blocks& srcs,
             float scale) {
  const auto [to, from] = parse_cast(dst_dtype, src_dtype, scale);
  std::vector<ConstBlock> blocks;
  for (const auto& [p, n] : srcs) blocks.push_back({reinterpret_cast<const void*>(p), n});
  pack(to, reinterpret_cast<void*>(dst), from, blocks, scale);
}

void unpack_py(const std::string& dst_dtype, const Blocks& dsts, const std::string& src_dtype, uintptr_t src,
               float scale) {
  const auto [to, from] = parse_cast(dst_dtype, src_dtype, scale);
  std::vector<Block> blocks;
  for (const auto& [p, n] : dsts) blocks.push_back({reinterpret_cast<void*>(p), n});
  unpack(to, blocks, from, reinterpret_cast<const void*>(src), scale);
}

float* floats(uintptr_t p) { return reinterpret_cast<float*>(p); }

void combine_py(const std::string& code, uintptr_t codes, const std::vector<uintptr_t>& srcs, size_t n_elems,
                uintptr_t maxima, uintptr_t lost) {
  const DType t = parse_code(code);
  if (srcs.empty()) throw_if_error(Status::error(Code::kValue, "kernels: combine of no sources"));
  std::vector<const void*> in;
  for (const uintptr_t p : srcs) in.push_back(reinterpret_cast<const void*>(p));
  combine(t, reinterpret_cast<void*>(codes), in, n_elems, floats(maxima), floats(lost));
}

void keep_mask_py(uintptr_t keep, const std::vector<uint64_t>& sizes, const std::vector<uint64_t>& strides,
                  uint64_t first, uint64_t seed, uint64_t threshold) {
  if (sizes.size() != strides.size() || (!strides.empty() && strides.back() != 1)) {
    throw_if_error(Status::error(
        Code::kValue,
        format("kernels: keep_mask has %zu sizes and %zu strides; expected as many, the last stride 1",
               sizes.size(), strides.size())));
  }
  const py::gil_scoped_release released;
  keep_mask(reinterpret_cast<uint8_t*>(keep), sizes, strides, first, seed, threshold);
}

void bind_blocks(py::module_& k) {
  k.attr("BLOCK_ELEMS") = kBlockElems;
  k.def(
      "block_maxima",
      [](uintptr_t src, size_t n, uintptr_t maxima) { block_maxima(floats(src), n, floats(maxima)); },
      py::arg("src"), py::arg("n_elems"), py::arg("maxima"),
      "The largest magnitude of each block of float32; infinity where one is not finite.");
  k.def(
      "quantize",
      [](const std::string& code, uintptr_t codes, uintptr_t src, size_t n, uintptr_t maxima, bool feedback) {
        quantize(parse_code(code), reinterpret_cast<void*>(codes), floats(src), n, floats(maxima), feedback);
      },
      py::arg("code_dtype"), py::arg("codes"), py::arg("src"), py::arg("n_elems"), py::arg("maxima"),
      py::arg("feedback"), "float32 to codes; with feedback, src becomes what they do not say of it.");
  k.def("combine", &combine_py, py::arg("code_dtype"), py::arg("codes"), py::arg("srcs"), py::arg("n_elems"),
        py::arg("maxima"), py::arg("lost"),
        "codes = the mean of all sources' codes; what its encoding lost, times their number, is added to\n"
        "lost, an address of float32 or 0.");
  k.def(
      "dequantize",
      [](const std::string& code, uintptr_t dst, uintptr_t codes, size_t n, uintptr_t maxima) {
        dequantize(parse_code(code), floats(dst), reinterpret_cast<const void*>(codes), n, floats(maxima));
      },
      py::arg("code_dtype"), py::arg("dst"), py::arg("codes"), py::arg("n_elems"), py::arg("maxima"),
      "Codes to float32; NaN in blocks whose maximum is infinite.");
}

}  // namespace

void bind_kernels(py::module_& m) {
  throw_if_error(init_kernels());
  py::module_ k =
      m.def_submodule("kernels", "Reductions and casts by address (csrc/kernels/reduce.h, cast.h).");
  k.def("reduce", &reduce, py::arg("dtype"), py::arg("op"), py::arg("dsts"), py::arg("srcs"),
        py::arg("n_elems"), py::arg("scalar") = 1.0, py::arg("isa") = "",
        "Reduces n_elems elements of the sources (addresses) in the canonical order into every destination.\n"
        "isa names an instruction set of supported_isas(); empty: the active one.");
  k.def("cast", &cast_py, py::arg("dst_dtype"), py::arg("dst"), py::arg("src_dtype"), py::arg("src"),
        py::arg("n_elems"), py::arg("scale") = 1.0f, "dst = src * scale, rounded to nearest even.");
  k.def("pack", &pack_py, py::arg("dst_dtype"), py::arg("dst"), py::arg("src_dtype"), py::arg("srcs"),
        py::arg("scale") = 1.0f,
        "The blocks (address, n_elems) one after another into dst, cast and scaled.");
  k.def("unpack", &unpack_py, py::arg("dst_dtype"), py::arg("dsts"), py::arg("src_dtype"), py::arg("src"),
        py::arg("scale") = 1.0f, "The opposite of pack.");
  bind_blocks(k);
  k.def("keep_mask", &keep_mask_py, py::arg("keep"), py::arg("sizes"), py::arg("strides"), py::arg("first"),
        py::arg("seed"), py::arg("threshold"),
        "1 where dropout keeps an element of a box, by its number in the whole (csrc/kernels/random.h), else "
        "0.");
  k.def("active_isa", &active_isa, "The instruction set in use: baseline, avx2 or avx512.");
  k.def("supported_isas", &supported_isas, "What this processor can run, comma-separated, slowest first.");
  k.def(
      "defined_ops", [](const std::string& dtype) { return defined_ops(parse_dtype(dtype)); },
      py::arg("dtype"), "The reductions that exist for the dtype, comma-separated.");
}

}  // namespace pycomm
