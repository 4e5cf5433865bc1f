// The Communicator's base class in C: all_reduce(tensor) without a Python frame.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm {

// Adds the type _C.FastCalls. Its instances are given their core by `_bind_core`; `all_reduce` with one plain
// tensor and op "sum" runs at once, anything else is handed to the subclass's `_all_reduce`.
void add_fast_calls(pybind11::module_& m);

}  // namespace pycomm
