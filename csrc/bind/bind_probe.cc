// What benchmarks ask of the core. The memory probe: a Probe is a buffer (its own segment's data bytes),
// plans are opaque and keep their Probe alive; and what the agreement check adds to a call. The GIL is held
// throughout, since a measurement must not pay for giving it away; a rank that never arrives ends the wait by
// the probe's own deadline.
#include <pybind11/stl.h>

#include <chrono>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "engine/call.h"
#include "engine/probe.h"

namespace py = pybind11;

namespace pycomm {

namespace {

// (sources, destinations, n_elems), a place being (rank, byte offset)
using Place = std::pair<int, uint64_t>;
using Move = std::tuple<std::vector<Place>, std::vector<Place>, uint64_t>;

struct OpaquePlan {
  ProbePlan plan;
};

std::vector<ProbePlace> places(const std::vector<Place>& in) {
  std::vector<ProbePlace> out;
  for (const Place& place : in) out.push_back({place.first, place.second});
  return out;
}

double seconds_per_exchange(Probe& probe, int n_exchanges) {
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < n_exchanges; ++i) throw_if_error(probe.exchange());
  std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / n_exchanges;
}

// Signing a call and comparing the signature with a peer's, which has arrived together with its flag.
double seconds_per_agreement(int n_calls) {
  Signature signature;
  signature.dtype = DType::kFloat32;
  volatile uint32_t peers = 0;
  uint64_t n_equal = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < n_calls; i++) {
    signature.count = static_cast<uint64_t>(i);
    const uint32_t own = signature.hash();
    n_equal += own == peers;
    peers = own;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  volatile const uint64_t used = n_equal;
  static_cast<void>(used);
  return elapsed.count() / n_calls;
}

}  // namespace

void bind_probe(py::module_& m) {
  m.def("seconds_per_agreement", &seconds_per_agreement, py::arg("n_calls"));
  // Python's own metaclass instead of pybind11's, so that the classes look as _C.pyi says (stubtest).
  const py::metaclass plain_type(reinterpret_cast<PyObject*>(&PyType_Type));
  py::class_<OpaquePlan>(m, "ProbePlan", plain_type);
  py::class_<Probe>(m, "Probe", plain_type, py::buffer_protocol())
      .def(py::init([](int rank, int n_ranks, uint64_t n_bytes) {
             std::unique_ptr<Probe> probe;
             throw_if_error(Probe::create(rank, n_ranks, n_bytes, &probe));
             return probe;
           }),
           py::arg("rank"), py::arg("n_ranks"), py::arg("n_bytes"))
      .def_buffer([](Probe& p) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(p.data()), static_cast<py::ssize_t>(p.n_bytes()));
      })
      .def_property_readonly("fd", &Probe::fd)
      .def(
          "attach", [](Probe& p, int peer, int fd) { throw_if_error(p.attach(peer, fd)); }, py::arg("peer"),
          py::arg("fd"))
      .def(
          "plan",
          [](Probe& p, const std::vector<Move>& moves) {
            OpaquePlan out;
            for (const auto& [src, dst, n_elems] : moves)
              throw_if_error(p.add_move(&out.plan, places(src), places(dst), n_elems));
            return out;
          },
          py::arg("moves"), py::keep_alive<0, 1>())
      .def(
          "run", [](Probe& p, const OpaquePlan& plan) { throw_if_error(p.run(plan.plan)); }, py::arg("plan"))
      .def("exchange", [](Probe& p) { throw_if_error(p.exchange()); })
      .def("set_timeout", &Probe::set_timeout, py::arg("seconds"))
      .def("seconds_per_exchange", &seconds_per_exchange, py::arg("n_exchanges"));
}

}  // namespace pycomm
