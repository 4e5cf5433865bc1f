// csrc/kernels in Python.
#include "bind/bind.h"

namespace pycomm {

void bind_kernels(pybind11::module_& m) {}

}  // namespace pycomm
