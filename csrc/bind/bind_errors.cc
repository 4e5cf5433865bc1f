// Status -> Python exception: the one place where csrc's failures become exceptions.
#include "bind/bind.h"

namespace py = pybind11;

namespace pycomm {

namespace {
const char* class_name(Code code) {
  switch (code) {
    case Code::kSchedule: return "ScheduleError";
    case Code::kMismatch: return "MismatchError";
    case Code::kPeerLost: return "PeerLostError";
    case Code::kTimeout: return "CommTimeoutError";
    case Code::kOk:
    case Code::kValue:
    case Code::kType:
    case Code::kRefused:
    case Code::kClosed:
    case Code::kSystem:
    case Code::kInterrupt: return "CommError";
  }
  return "CommError";
}
}  // namespace

void set_python_error(const Status& status) {
  switch (status.code()) {
    case Code::kValue: PyErr_SetString(PyExc_ValueError, status.message().c_str()); return;
    case Code::kType: PyErr_SetString(PyExc_TypeError, status.message().c_str()); return;
    case Code::kInterrupt:
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyboardInterrupt, status.message().c_str());
      return;
    default: break;
  }
  py::object cls = py::module_::import("pycomm.errors").attr(class_name(status.code()));
  PyErr_SetString(cls.ptr(), status.message().c_str());
}

void throw_if_error(const Status& status) {
  if (status.ok()) return;
  set_python_error(status);
  throw py::error_already_set();
}

}  // namespace pycomm
