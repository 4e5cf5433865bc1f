#include "bind/selection.h"

#include <pybind11/stl.h>

#include "bind/bind.h"
#include "schedule/catalog.h"

namespace py = pybind11;

namespace pycomm {

namespace {

py::list selection(const PyCommunicator& self, int kind) {
  py::list rows;
  for (const Choice& c : self.comm->selector().table(static_cast<CallKind>(kind))) {
    rows.append(py::make_tuple(c.max_bytes, catalog()[c.algorithm].name, catalog()[c.direct_algorithm].name,
                               c.tile_bytes));
  }
  return rows;
}

void set_selection(PyCommunicator& self, int kind,
                   const std::vector<std::tuple<uint64_t, std::string, std::string, uint32_t>>& rows) {
  std::vector<Choice> table;
  for (const auto& [max_bytes, algorithm, direct, tile] : rows) {
    Choice c{max_bytes, 0, 0, tile};
    throw_if_error(algorithm_index(static_cast<CallKind>(kind), algorithm, &c.algorithm));
    throw_if_error(algorithm_index(static_cast<CallKind>(kind), direct, &c.direct_algorithm));
    table.push_back(c);
  }
  throw_if_error(self.comm->selector().set_table(static_cast<CallKind>(kind), std::move(table)));
}

HostSelector& host_selector(const PyCommunicator& self) {
  HostSelector* const selector = self.comm->host_selector();
  if (selector == nullptr) throw_if_error(Status::error(Code::kValue, "all ranks are on one host"));
  return *selector;
}

py::list host_selection(const PyCommunicator& self, int collective) {
  py::list rows;
  for (const HostChoice& c : host_selector(self).table(static_cast<Collective>(collective)))
    rows.append(py::make_tuple(c.max_bytes, catalog()[c.algorithm].name, c.n_sockets));
  return rows;
}

void set_host_selection(const PyCommunicator& self, int collective,
                        const std::vector<std::tuple<uint64_t, std::string, uint8_t>>& rows) {
  std::vector<HostChoice> table;
  for (const auto& [max_bytes, algorithm, n_sockets] : rows) {
    HostChoice c{max_bytes, 0, n_sockets};
    throw_if_error(algorithm_index(static_cast<CallKind>(collective), algorithm, &c.algorithm));
    table.push_back(c);
  }
  throw_if_error(host_selector(self).set_table(static_cast<Collective>(collective), std::move(table)));
}

}  // namespace

void add_selection(py::class_<PyCommunicator>& communicator) {
  communicator.def("selection", &selection)
      .def("set_selection", &set_selection)
      .def("host_selection", &host_selection)
      .def("set_host_selection", &set_host_selection);
}

}  // namespace pycomm
