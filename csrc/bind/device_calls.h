// What the binding of communicators has for calls on CUDA tensors, and Work, whose wait() orders streams.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "bind/request.h"
#include "engine/device_engine.h"

namespace pycomm {

// Where CUDA is emulated, what follows a call runs on the host, and there is no stream for it to wait on:
// waits for the end there, also of a failed call, whose tensors are the host's and may be freed at once; does
// nothing elsewhere.
Status end_on_host(const DeviceEnd& end, CallerHooks* hooks);

// A tensor in memory of the device that this communicator's peers reach; collective where it is the first
// call on CUDA. Null with a Python error.
PyObject* empty_on_device(PyCommunicator& self, const std::vector<int64_t>& shape, DType dtype,
                          size_t n_bytes, int device);

void add_device_calls(pybind11::class_<PyCommunicator>& communicator);
void add_work(pybind11::module_& m);

}  // namespace pycomm
