// csrc/schedule in Python: _C.schedule lists, builds, prints, proves and prices schedules.
//
// A step is the tuple (op, peer, round, n_chunks, src, dst, src_left); op is a name, and a number only where
// no op has that number. Schedule.steps can be set, so that tests can break a schedule and see it refused.
// Algorithms are named by collective and name; an unknown name is a ValueError that lists what exists.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "schedule/cost.h"
#include "schedule/exact.h"
#include "schedule/print.h"
#include "schedule/verify.h"

namespace py = pybind11;

namespace pycomm {

namespace {

using StepTuple = std::tuple<std::string, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, bool>;

Collective parse_collective(const std::string& name) {
  Collective c{};
  if (find_collective(name, &c)) return c;
  std::string known;
  for (int i = 0; i < kNumCollectives; i++) {
    if (i > 0) known += ", ";
    known += collective_name(static_cast<Collective>(i));
  }
  throw_if_error(Status::error(
      Code::kValue, format("collective is '%s'; expected one of: %s", name.c_str(), known.c_str())));
  return c;  // not reached
}

const Algorithm& parse_algorithm(const std::string& collective, const std::string& name) {
  const Collective c = parse_collective(collective);
  const Algorithm* a = find_algorithm(c, name);
  if (a == nullptr) {
    throw_if_error(
        Status::error(Code::kValue, format("%s has no algorithm '%s'; expected one of: %s",
                                           collective.c_str(), name.c_str(), known_algorithms(c).c_str())));
  }
  return *a;
}

StepTuple to_tuple(const Step& s) {
  return {op_text(s), s.peer, s.round, s.n_chunks, s.src, s.dst, s.src_left()};
}

Step from_tuple(const StepTuple& t, size_t at) {
  const auto& [op, peer, round, n_chunks, src, dst, src_left] = t;
  Step s{};
  bool known = false;
  for (uint64_t bits = 0; bits < 8 && !known; bits++) {
    s.op_bits = bits;
    known = op_text(s) == op;
  }
  constexpr uint64_t kMax20 = (1 << 20) - 1;
  std::string what;
  if (!known) what = format("op is '%s'; expected send, recv, recv_reduce, reduce or copy", op.c_str());
  if (peer > kMax20 || round > kMax20 || n_chunks > kMax20)
    what = "peer, round or n_chunks needs over 20 bits";
  if (src > UINT32_MAX || dst > UINT32_MAX) what = "src or dst needs over 32 bits";
  if (!what.empty()) throw_if_error(Status::error(Code::kValue, format("step %zu: %s", at, what.c_str())));
  s.op_bits |= static_cast<uint64_t>(src_left) << 3;
  s.peer = peer;
  s.round = round;
  s.n_chunks = n_chunks;
  s.src = static_cast<uint32_t>(src);
  s.dst = static_cast<uint32_t>(dst);
  return s;
}

std::vector<StepTuple> get_steps(const Schedule& s) {
  std::vector<StepTuple> list;
  for (const Step& step : s.steps) list.push_back(to_tuple(step));
  return list;
}

void set_steps(Schedule& s, const std::vector<StepTuple>& list) {
  std::vector<Step> steps;
  for (size_t i = 0; i < list.size(); i++) steps.push_back(from_tuple(list[i], i));
  s.steps = std::move(steps);
}

Schedule build_by_name(const std::string& collective, const std::string& algorithm, int rank, int n_ranks,
                       int root, int n_chunks) {
  Schedule s;
  throw_if_error(build_schedule(parse_algorithm(collective, algorithm), rank, n_ranks, root, n_chunks, &s));
  return s;
}

Proof prove(const std::string& collective, const std::string& algorithm, int n_ranks, int root, int n_chunks,
            bool in_place) {
  const Algorithm& a = parse_algorithm(collective, algorithm);
  Proof proof;
  Status s;
  {
    py::gil_scoped_release release;
    s = verify(a, n_ranks, root, n_chunks, in_place, &proof);
  }
  // A schedule that cannot be built has no proof, and so no violation.
  if (!s.ok() && proof.violation.what.empty()) throw_if_error(s);
  return proof;
}

Proof prove_given(const std::vector<Schedule>& schedules, const std::string& collective, int root,
                  bool in_place, bool deterministic) {
  const Claim claim{parse_collective(collective), root, in_place, deterministic};
  return verify_schedules(schedules, claim);
}

AcrossProof prove_across(const std::string& collective, const std::vector<int>& host_of, int root,
                         bool in_place) {
  const Collective c = parse_collective(collective);
  AcrossProof out;
  Status s;
  {
    py::gil_scoped_release release;
    s = verify_across(c, host_of, root, in_place, &out);
  }
  if (!s.ok() && out.proof.violation.what.empty()) throw_if_error(s);
  return out;
}

Cost cost(const std::string& collective, const std::string& algorithm, int n_ranks, double n_bytes,
          double alpha, double beta, double gamma, int ranks_per_node, double alpha_between,
          double beta_between, double slice_bytes, int root, int n_chunks) {
  const Algorithm& a = parse_algorithm(collective, algorithm);
  const CostModel model{{alpha, beta}, {alpha_between, beta_between}, gamma, ranks_per_node, slice_bytes};
  Cost out;
  Status s;
  {
    py::gil_scoped_release release;
    s = predict(a, n_ranks, root, n_chunks, n_bytes, model, &out);
  }
  throw_if_error(s);
  return out;
}

std::tuple<double, double, double> work(const std::string& collective, const std::string& algorithm,
                                        int n_ranks, double n_bytes, const std::string& protocol,
                                        double tile_bytes, int root, int n_chunks) {
  if (protocol != "tiled" && protocol != "direct") {
    throw_if_error(Status::error(
        Code::kValue, format("protocol is '%s'; expected one of: tiled, direct", protocol.c_str())));
  }
  SharedWork w;
  throw_if_error(shared_work(parse_algorithm(collective, algorithm), n_ranks, root, n_chunks, n_bytes,
                             protocol == "tiled" ? SharedProtocol::kTiled : SharedProtocol::kDirect,
                             tile_bytes, &w));
  return {w.syncs, w.read_bytes, w.written_bytes};
}

void bind_classes(py::module_& m) {
  py::class_<Algorithm>(m, "Algorithm", "A line of the catalog.")
      .def_property_readonly("collective", [](const Algorithm& a) { return collective_name(a.collective); })
      .def_readonly("name", &Algorithm::name)
      .def_readonly("summary", &Algorithm::summary)
      .def_readonly("deterministic", &Algorithm::deterministic)
      .def_readonly("in_place", &Algorithm::in_place)
      .def_readonly("default_n_chunks", &Algorithm::default_n_chunks)
      .def(
          "rounds", [](const Algorithm& a, int n, int chunks) { return a.rounds(n, chunks); },
          py::arg("n_ranks"), py::arg("n_chunks"))
      .def(
          "max_parts_sent", [](const Algorithm& a, int n, int chunks) { return a.max_parts_sent(n, chunks); },
          py::arg("n_ranks"), py::arg("n_chunks"));
  py::class_<Schedule>(m, "Schedule", "What one rank does; steps can be replaced.")
      .def_readonly("rank", &Schedule::rank)
      .def_readonly("n_ranks", &Schedule::n_ranks)
      .def_readonly("root", &Schedule::root)
      .def_readonly("n_parts", &Schedule::n_parts)
      .def_readonly("n_in", &Schedule::n_in)
      .def_readonly("n_out", &Schedule::n_out)
      .def_readonly("n_scratch", &Schedule::n_scratch)
      .def_readonly("part", &Schedule::part)
      .def_property("steps", &get_steps, &set_steps);
  py::class_<Proof>(m, "Proof", "What the verifier found; violation is empty when ok.")
      .def_readonly("ok", &Proof::ok)
      .def_readonly("rounds", &Proof::rounds)
      .def_readonly("max_parts_sent", &Proof::max_parts_sent)
      .def_readonly("n_parts_sent", &Proof::n_parts_sent)
      .def_readonly("n_steps", &Proof::n_steps)
      .def_property_readonly("violation", [](const Proof& p) { return p.ok ? "" : p.violation.text(); })
      .def_property_readonly("rank", [](const Proof& p) { return p.violation.rank; })
      .def_property_readonly("step", [](const Proof& p) { return p.violation.index; });
  py::class_<AcrossProof>(m, "AcrossProof", "The same of a deterministic reduction over hosts.")
      .def_property_readonly("ok", [](const AcrossProof& p) { return p.proof.ok; })
      .def_property_readonly("rounds", [](const AcrossProof& p) { return p.proof.rounds; })
      .def_readonly("between", &AcrossProof::between)
      .def_readonly("n_parts", &AcrossProof::n_parts)
      .def_readonly("n_subtrees", &AcrossProof::n_subtrees)
      .def_readonly("n_parts_leaving", &AcrossProof::n_parts_leaving)
      .def_property_readonly("violation",
                             [](const AcrossProof& p) { return p.proof.ok ? "" : p.proof.violation.text(); });
  py::class_<Cost>(m, "Cost", "A prediction.")
      .def_readonly("seconds", &Cost::seconds)
      .def_readonly("rounds", &Cost::rounds)
      .def_readonly("max_bytes_sent", &Cost::max_bytes_sent)
      .def_property_readonly("method", [](const Cost& c) { return cost_method_name(c.method); });
}

}  // namespace

void bind_schedule(py::module_& module) {
  py::module_ m = module.def_submodule("schedule", "Collective algorithms as data (csrc/schedule).");
  bind_classes(m);
  m.attr("MAX_VERIFY_RANKS") = kMaxVerifyRanks;
  m.attr("MAX_COST_RANKS") = kMaxCostRanks;
  m.def("catalog", [] { return std::vector<Algorithm>(catalog().begin(), catalog().end()); });
  m.def("build", &build_by_name, py::arg("collective"), py::arg("algorithm"), py::arg("rank"),
        py::arg("n_ranks"), py::arg("root") = 0, py::arg("n_chunks") = 0);
  m.def(
      "text",
      [](const Schedule& s, const std::string& collective, const std::string& algorithm) {
        return schedule_text(parse_algorithm(collective, algorithm), s);
      },
      py::arg("schedule"), py::arg("collective"), py::arg("algorithm"));
  m.def(
      "step_texts",
      [](const Schedule& s) {
        std::vector<std::string> list;
        for (const Step& step : s.steps) list.push_back(step_text(s, step));
        return list;
      },
      py::arg("schedule"));
  m.def("verify", &prove, py::arg("collective"), py::arg("algorithm"), py::arg("n_ranks"),
        py::arg("root") = 0, py::arg("n_chunks") = 0, py::arg("in_place") = false);
  m.def("verify_schedules", &prove_given, py::arg("schedules"), py::arg("collective"), py::arg("root") = 0,
        py::arg("in_place") = false, py::arg("deterministic") = false);
  m.def("verify_across", &prove_across, py::arg("collective"), py::arg("host_of"), py::arg("root") = 0,
        py::arg("in_place") = false);
  m.def("cost", &cost, py::arg("collective"), py::arg("algorithm"), py::arg("n_ranks"), py::arg("n_bytes"),
        py::kw_only(), py::arg("alpha"), py::arg("beta"), py::arg("gamma") = 0.0,
        py::arg("ranks_per_node") = 0, py::arg("alpha_between") = 0.0, py::arg("beta_between") = 0.0,
        py::arg("slice_bytes") = 0.0, py::arg("root") = 0, py::arg("n_chunks") = 0);
  m.def("shared_work", &work, py::arg("collective"), py::arg("algorithm"), py::arg("n_ranks"),
        py::arg("n_bytes"), py::arg("protocol"), py::arg("tile_bytes") = 262144.0, py::arg("root") = 0,
        py::arg("n_chunks") = 0);
}

}  // namespace pycomm
