// What each bind_<folder>.cc offers to module.cc.
#pragma once

#include <pybind11/pybind11.h>

#include "base/status.h"

namespace pycomm {

void bind_schedule(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_ps(pybind11::module_& m);
void bind_bucket(pybind11::module_& m);
void bind_probe(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);

// Sets the Python exception for a failed status (classes live in pycomm/errors.py).
void set_python_error(const Status& status);
// Throws pybind11::error_already_set after set_python_error when the status is a failure.
void throw_if_error(const Status& status);

}  // namespace pycomm
