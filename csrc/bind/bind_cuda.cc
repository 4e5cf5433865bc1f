// What this build and this machine have of CUDA, and csrc/kernels/cuda by raw address: _C.cuda.
//
// The functions take what those of _C.kernels take (bind_kernels.cc), of device memory, and then a device and
// a stream of it, as torch gives it (an integer; 0: the legacy default stream). They enqueue and return: what
// is on the stream before them comes first, what is put on it afterwards may use the results. Arrays are one
// launch for about 128 tensors. Where CUDA is emulated they have ended when they return, since what follows
// runs on the host. Addresses and counts are the caller's word: nothing here can check them.
//
// Importing needs no GPU and no driver. In a build without CUDA they raise ValueError.
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/kernel_names.h"
#include "bind/tensor.h"
#include "engine/device_engine.h"

#if defined(PYCOMM_HAS_CUDA)
#include "kernels/cuda/kernels.h"
#include "transport/cuda/nccl.h"
#include "transport/cuda/on_device.h"
#endif

namespace py = pybind11;

namespace pycomm {

namespace {

const char* build() {
#if defined(PYCOMM_CUDA_EMULATED)
  return "emulated";
#elif defined(PYCOMM_HAS_CUDA)
  return "on";
#else
  return "off";
#endif
}

int device_count() {
#if defined(PYCOMM_HAS_CUDA)
  return cuda::device_count();
#else
  return 0;
#endif
}

void set_nccl_folders(std::vector<std::string> folders) {
#if defined(PYCOMM_HAS_CUDA)
  nccl::set_search_folders(std::move(folders));
#endif
}

// Of torch's allocator, which takes the GIL; the engine's threads ask it only when memory is out.
void set_empty_cache(py::object function) {
  static PyObject* const empty_cache = function.release().ptr();
  DeviceEngine::set_free_cached([] {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    PyObject* const done = PyObject_CallNoArgs(empty_cache);
    if (done == nullptr) PyErr_WriteUnraisable(empty_cache);
    Py_XDECREF(done);
  });
}

std::string nccl_version() {
#if defined(PYCOMM_HAS_CUDA)
  const nccl::Library* library = nullptr;
  if (nccl::open(&library).ok()) return nccl::version_text(library->version);
#endif
  return "";
}

#if defined(PYCOMM_HAS_CUDA)

using Blocks = std::vector<std::pair<uintptr_t, size_t>>;  // address, elements
template <class T>
T* at(uintptr_t p) {
  return reinterpret_cast<T*>(p);
}

std::vector<ConstBlock> sources(const Blocks& given) {
  std::vector<ConstBlock> blocks;
  for (const auto& [p, n] : given) blocks.push_back({at<const void>(p), n});
  return blocks;
}

// Puts `enqueue(stream)` on the stream of the device.
template <class F>
void put(int device, uintptr_t stream, const F& enqueue) {
  cuda::Stream const s = at<CUstream_st>(stream);
  throw_if_error(cuda::on_device(device, s, [&] { return enqueue(s); }));
}

void cast(const std::string& to, uintptr_t dst, const std::string& from, uintptr_t src, size_t n_elems,
          float scale, int device, uintptr_t stream) {
  const DType dst_dtype = parse_dtype(to), src_dtype = parse_dtype(from);
  const cuda::CastSegment segment{at<void>(dst), at<const void>(src), n_elems};
  put(device, stream, [&](cuda::Stream s) {
    return cuda::cast(dst_dtype, src_dtype, {&segment, 1}, scale, s);
  });
}

void pack(const std::string& to, uintptr_t dst, const std::string& from, const Blocks& srcs, float scale,
          int device, uintptr_t stream) {
  const DType dst_dtype = parse_dtype(to), src_dtype = parse_dtype(from);
  put(device, stream, [&](cuda::Stream s) {
    return cuda::pack(dst_dtype, at<void>(dst), src_dtype, sources(srcs), scale, s);
  });
}

void unpack(const std::string& to, const Blocks& dsts, const std::string& from, uintptr_t src, float scale,
            int device, uintptr_t stream) {
  const DType dst_dtype = parse_dtype(to), src_dtype = parse_dtype(from);
  std::vector<Block> blocks;
  for (const auto& [p, n] : dsts) blocks.push_back({at<void>(p), n});
  put(device, stream, [&](cuda::Stream s) {
    return cuda::unpack(dst_dtype, blocks, src_dtype, at<const void>(src), scale, s);
  });
}

void norm(const std::string& dtype, const Blocks& tensors, uintptr_t workspace, uintptr_t result, int device,
          uintptr_t stream) {
  const DType t = parse_dtype(dtype);
  put(device, stream, [&](cuda::Stream s) {
    return cuda::norm(t, sources(tensors), at<void>(workspace), at<cuda::NormResult>(result), s);
  });
}

size_t norm_workspace_bytes(const std::string& dtype, const Blocks& tensors) {
  return cuda::norm_workspace_bytes(parse_dtype(dtype), sources(tensors));
}

void bind_kernels_of_cuda(py::module_& c) {
  const py::arg device("device"), stream("stream");
  c.def("cast", &cast, py::arg("dst_dtype"), py::arg("dst"), py::arg("src_dtype"), py::arg("src"),
        py::arg("n_elems"), py::arg("scale"), device, stream, "As _C.kernels.cast.");
  c.def("pack", &pack, py::arg("dst_dtype"), py::arg("dst"), py::arg("src_dtype"), py::arg("srcs"),
        py::arg("scale"), device, stream, "As _C.kernels.pack.");
  c.def("unpack", &unpack, py::arg("dst_dtype"), py::arg("dsts"), py::arg("src_dtype"), py::arg("src"),
        py::arg("scale"), device, stream, "As _C.kernels.unpack.");
  c.def("norm", &norm, py::arg("dtype"), py::arg("tensors"), py::arg("workspace"), py::arg("result"), device,
        stream,
        "The sum of the squares of the tensors (address, n_elems), as a float64, and then how many elements\n"
        "are infinite or NaN, as an int64: into the 16 bytes at result. workspace: norm_workspace_bytes of\n"
        "device memory; both aligned to 8.");
  c.def("norm_workspace_bytes", &norm_workspace_bytes, py::arg("dtype"), py::arg("tensors"));
}

#else

void bind_kernels_of_cuda(py::module_& c) {
  for (const char* name : {"cast", "pack", "unpack", "norm", "norm_workspace_bytes"}) {
    c.def(name, [name](const py::args&, const py::kwargs&) {
      const char* const why = DeviceEngine::why_not_built();
      throw_if_error(Status::error(Code::kValue, format("_C.cuda.%s: %s", name, why)));
    });
  }
}

#endif

}  // namespace

namespace {
std::map<std::string, std::vector<std::pair<uint64_t, std::string>>> built_in_selection() {
  std::map<std::string, std::vector<std::pair<uint64_t, std::string>>> all;
  if (DeviceEngine::why_not_built() != nullptr) return all;
  const DeviceTables tables;
  for (int i = 0; i < kNumCollectives; i++) {
    const auto c = static_cast<Collective>(i);
    for (const DeviceTables::Row& r : tables.of(c))
      all[collective_name(c)].emplace_back(r.max_bytes, device_way_name(r.way));
  }
  return all;
}
}  // namespace

void bind_cuda(py::module_& m) {
  py::module_ c = m.def_submodule("cuda", "The CUDA kernels: whether they were built, for how many devices.");
  c.def("build", &build, "PYCOMM_CUDA of this build: off, on or emulated.");
  c.def("set_nccl_folders", &set_nccl_folders, "Where libnccl.so.2 may lie, beside the linker's places.");
  c.def("set_empty_cache", &set_empty_cache, "What frees device memory that torch keeps for later.");
  c.def("nccl_version", &nccl_version, "Of the NCCL that calls go through, as 2.28.7; \"\" without one.");
  c.def(
      "device_count", &device_count,
      "Devices that this process can use; 0 without a GPU, without a driver, or without CUDA in the build.");
  c.def("emulated_device", &emulated_device,
        "The device that the host's tensors are taken to be on, where CUDA is emulated; else -1.");
  c.def("built_in_selection", &built_in_selection,
        "Which way serves up to how many bytes where nothing was measured, by collective; {} without CUDA.");
  c.def("why_not_built", &DeviceEngine::why_not_built, "Why there is no CUDA engine; None where there is.");
  bind_kernels_of_cuda(c);
}

}  // namespace pycomm
