// The counting hooks of DistributedDataParallel: _C.Tally and _C.plain_gradients.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm {

void add_tally(pybind11::module_& m);
// Called once with torch.Tensor; may leave a Python error.
void tally_setup(PyObject* tensor);

}  // namespace pycomm
