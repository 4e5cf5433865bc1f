// The extension module pycomm._C: each bind_<folder>.cc adds its part.
#include <pybind11/pybind11.h>

#include "bind/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of pycomm; use the pycomm package, not this module.";
  try {
    pycomm::bind_schedule(m);
    pycomm::bind_kernels(m);
    pycomm::bind_bucket(m);
    pycomm::bind_engine(m);
    pycomm::bind_ps(m);
    pycomm::bind_probe(m);
    pycomm::bind_cuda(m);
  } catch (const pybind11::error_already_set& e) {
    throw pybind11::import_error(e.what());  // else the last line that a user sees is "initialization failed"
  }
}
