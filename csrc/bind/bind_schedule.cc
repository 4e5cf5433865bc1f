// csrc/schedule in Python.
#include "bind/bind.h"

namespace pycomm {

void bind_schedule(pybind11::module_& m) {}

}  // namespace pycomm
