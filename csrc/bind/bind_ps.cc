// What the communicators of other processes are in, for `pycomm ps` (engine/ps.h). Needs no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "engine/ps.h"

namespace py = pybind11;

namespace pycomm {

void bind_ps(py::module_& m) {
  m.def("read_arena", [](const std::string& path) {
    std::vector<PsRow> rows;
    throw_if_error(read_arena(path, &rows));
    return rows;
  });
  py::class_<PsRow>(m, "PsRow")
      .def_readonly("pid", &PsRow::pid)
      .def_readonly("job", &PsRow::job)
      .def_readonly("label", &PsRow::label)
      .def_readonly("host", &PsRow::host)
      .def_readonly("job_rank", &PsRow::job_rank)
      .def_readonly("rank", &PsRow::rank)
      .def_readonly("size", &PsRow::size)
      .def_readonly("failed", &PsRow::failed)
      .def_readonly("why", &PsRow::why)
      .def_readonly("call", &PsRow::call)
      .def_readonly("number", &PsRow::number)
      .def_readonly("inside", &PsRow::inside)
      .def_readonly("waits_for", &PsRow::waits_for)
      .def_readonly("waited_s", &PsRow::waited_s)
      .def_readonly("transfer", &PsRow::transfer)
      .def_readonly("transfer_peer", &PsRow::transfer_peer)
      .def_readonly("transfer_s", &PsRow::transfer_s);
}

}  // namespace pycomm
