// The extension module pycomm._C: each bind_<folder>.cc adds its part.
#include <pybind11/pybind11.h>

#include "bind/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of pycomm; use the pycomm package, not this module.";
  pycomm::bind_schedule(m);
  pycomm::bind_kernels(m);
  pycomm::bind_bucket(m);
  pycomm::bind_engine(m);
  pycomm::bind_probe(m);
}
