// The tables by which a communicator chooses algorithms on the CPU, for pycomm/tuning*.py: read, and set.
#pragma once

#include <pybind11/pybind11.h>

#include "bind/request.h"

namespace pycomm {

void add_selection(pybind11::class_<PyCommunicator>& communicator);

}  // namespace pycomm
