// csrc/bucket in Python.
#include "bind/bind.h"

namespace pycomm {

void bind_bucket(pybind11::module_& m) {}

}  // namespace pycomm
