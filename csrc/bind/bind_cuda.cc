// What this build and this machine have of CUDA: _C.cuda. Importing needs no GPU and no driver.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bind/bind.h"

#if defined(PYCOMM_HAS_CUDA)
#include "kernels/cuda/kernels.h"
#include "transport/cuda/nccl.h"
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

}  // namespace

void bind_cuda(py::module_& m) {
  py::module_ c =
      m.def_submodule("cuda", "The CUDA kernels: whether they were built, and for how many devices.");
  c.def("build", &build, "PYCOMM_CUDA of this build: off, on or emulated.");
  c.def("set_nccl_folders", &set_nccl_folders, "Where libnccl.so.2 may lie, beside the linker's places.");
  c.def(
      "device_count", &device_count,
      "Devices that this process can use; 0 without a GPU, without a driver, or without CUDA in the build.");
}

}  // namespace pycomm
