// The communicator in Python: one generic `call`, point-to-point, and arena tensors.
//
// Arguments arrive checked for meaning by pycomm/arguments.py; what is checked here is what only C++ sees
// cheaply: the tensors. A call that fails its checks is refused to the peers (Engine::refuse) and raises.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "base/log.h"
#include "bind/bind.h"
#include "bind/device_calls.h"
#include "bind/fast_calls.h"
#include "bind/hooks.h"
#include "bind/request.h"
#include "bind/selection.h"
#include "bind/tally.h"
#include "bind/tensor.h"
#include "engine/communicator.h"
#include "engine/p2p.h"

namespace py = pybind11;

namespace pycomm {

namespace {

void set_option(const std::string& key, const py::handle& v, Options* o) {
  if (key == "op")
    o->op = v.cast<int>();
  else if (key == "root")
    o->root = v.cast<int>();
  else if (key == "scalar")
    o->scalar = v.cast<double>();
  else if (key == "counts")
    o->counts = v.cast<std::vector<uint64_t>>();
  else if (key == "send_counts")
    o->send_counts = v.cast<std::vector<uint64_t>>();
  else if (key == "recv_counts")
    o->recv_counts = v.cast<std::vector<uint64_t>>();
  else if (key == "algorithm")
    o->algorithm = v.cast<std::string>();
  else if (key == "deterministic")
    o->deterministic = v.cast<bool>();
  else if (key == "compression")
    o->compression = v.cast<int>();
  else if (key == "residual")
    o->residual = v.cast<std::pair<uintptr_t, uint64_t>>();
  else if (key == "timeout_s")
    o->timeout_s = v.cast<double>();
  else
    throw py::cast_error("there is no such argument");
}

Status options_from(const py::dict& d, Options* o) {
  for (const auto& [k, v] : d) {
    if (v.is_none()) continue;
    const auto key = k.cast<std::string>();
    try {
      set_option(key, v, o);
    } catch (const py::cast_error&) {
      const std::string shown = py::repr(v).cast<std::string>().substr(0, 200);
      return Status::error(Code::kType,
                           format("a collective cannot take %s=%s: an unknown argument, or a value "
                                  "of the wrong type or range",
                                  key.c_str(), shown.c_str()));
    }
  }
  return Status();
}

// True: done (or a Work); NotImplemented: the tensors need staging by the caller.
py::object call(PyCommunicator& self, int kind, py::object in, py::object out, const py::dict& options,
                bool async_op) {
  auto request = std::make_unique<Request>();
  Options given;
  Status s = options_from(options, &given);
  if (s.ok()) {
    s = make_request(self, static_cast<CallKind>(kind), in.ptr(), out.ptr(), std::move(given), request.get());
  }
  if (is_staging(s)) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  if (s.code() == Code::kInterrupt && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (!s.ok()) refuse_and_raise(self, s);
  if (async_op) return py::cast(self.comm->start(std::move(request)));
  GilHooks hooks;
  const Call& c = request->call;
  const bool large = c.in.n_elems() + c.out.n_elems() > kKeepGilBytes / dtype_size(c.sig.dtype);
  if (large || c.device >= 0) hooks.before_block();  // NCCL may have to connect, which knows no hooks
  s = self.comm->run(*request, &hooks);
  if (request->end != nullptr) {
    Status ended = end_on_host(*request->end, &hooks);
    if (s.ok()) s = std::move(ended);
  }
  raise_after(hooks, s);
  return py::bool_(true);
}

py::object point_to_point(PyCommunicator& self, bool is_send, py::object tensor, int peer, int tag,
                          double timeout_s, bool async_op) {
  TensorView view;
  Layout layout;
  Status s = view_tensor(tensor.ptr(), "tensor", !is_send, &view, &layout);
  // Messages travel through host memory (pycomm/staging.py).
  const bool elsewhere = view.device >= 0 && !DeviceEngine::is_emulated();
  if (s.ok() && (elsewhere || layout == Layout::kNeedsStaging))
    return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  if (s.code() == Code::kInterrupt && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (s.ok() && (peer < (is_send ? 0 : -1) || peer >= self.comm->size())) {
    s = Status::error(Code::kValue, format("%s: rank %d is not in this communicator of %d",
                                           is_send ? "send" : "recv", peer, self.comm->size()));
  }
  if (s.ok()) s = self.comm->check_usable();
  throw_if_error(s);  // nobody else is in this call, so nobody needs to be told
  const size_t n_bytes = view.n_elems * dtype_size(view.dtype);
  const double limit = timeout_s > 0 ? timeout_s : self.comm->group().timeout_s();
  PointToPoint& p2p = self.comm->p2p();
  auto work = is_send ? p2p.send(peer, tag, view.dtype, view.data, n_bytes, limit)
                      : p2p.recv(peer, tag, view.dtype, view.data, n_bytes, limit);
  if (async_op) {
    if (!work->done()) {
      work->set_communicator(self.comm, true);
      p2p.in_background();
    }
    return py::cast(work);
  }
  GilHooks hooks;
  raise_after(hooks, p2p.finish(work, &hooks));
  return py::int_(work->source);
}

// `device`: of CUDA; -1: the host's arena.
py::object empty(PyCommunicator& self, const std::vector<int64_t>& shape, int dtype, int device) {
  size_t n = dtype_size(static_cast<DType>(dtype));
  for (int64_t s : shape) {
    if (s < 0 || __builtin_mul_overflow(n, static_cast<size_t>(s), &n) || n > (size_t{1} << 62)) {
      const Status why =
          Status::error(Code::kValue, "empty: the sizes are negative, or too many bytes for any machine");
      if (device >= 0 && self.comm->device() == nullptr) refuse_and_raise(self, why);  // collective
      throw_if_error(why);
    }
  }
  if (device >= 0) {
    PyObject* t = empty_on_device(self, shape, static_cast<DType>(dtype), n, device);
    if (t == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(t);
  }
  struct Block {
    std::shared_ptr<Arena> arena;
    uint64_t offset;
  };
  auto block = std::make_unique<Block>(Block{self.node->arena(), 0});
  throw_if_error(self.comm->check_usable());
  throw_if_error(block->arena->allocate(n, &block->offset));
  void* data = block->arena->base() + block->offset;
  PyObject* t = make_tensor(data, shape.data(), static_cast<int>(shape.size()), static_cast<DType>(dtype), -1,
                            block.release(), [](void* b) {
                              auto* held = static_cast<Block*>(b);
                              held->arena->release(held->offset);
                              delete held;
                            });
  if (t == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(t);
}

Status check_signals() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0 ? Status::error(Code::kInterrupt, "interrupted") : Status();
}

std::unique_ptr<PyCommunicator> join(const std::string& folder, int rank, int size, double join_timeout_s,
                                     double timeout_s) {
  auto c = std::make_unique<PyCommunicator>();
  Status s;
  {
    py::gil_scoped_release release;
    s = Node::join(folder, rank, size, kControlBytes, join_timeout_s, check_signals, &c->node);
  }
  throw_if_error(s);
  std::vector<int> ranks;
  for (int q = 0; q < size; q++) ranks.push_back(q);
  const std::vector<uint64_t> controls(static_cast<size_t>(size), 0);
  throw_if_error(Communicator::create(c->node, ranks, rank, timeout_s, controls, &c->comm));
  return c;
}

// This process's connections to those on other hosts. `towards`: an address or name that the others know, or
// "". The secret is the file's, or where that is "" these bytes.
std::shared_ptr<Net> make_net(int rank, int size, const std::string& interfaces, const std::string& towards,
                              const std::string& ports, int n_lanes, bool encrypt,
                              const std::string& zero_copy, const py::bytes& secret,
                              const std::string& secret_file, const std::string& job,
                              const std::string& settings, const std::string& host, double connect_timeout_s,
                              double heartbeat_s) {
  NetOptions o;
  o.rank = rank;
  o.size = size;
  o.n_lanes = n_lanes;
  o.encrypt = encrypt;
  o.zero_copy = zero_copy == "1"   ? ZeroCopy::Mode::kAlways
                : zero_copy == "0" ? ZeroCopy::Mode::kOff
                                   : ZeroCopy::Mode::kAuto;
  o.job = job;
  o.settings_text = settings;
  o.host = host;
  o.connect_timeout_s = connect_timeout_s;
  o.heartbeat_s = heartbeat_s;
  Address peer;
  std::vector<Address> found;
  if (!towards.empty()) {
    throw_if_error(resolve(towards, 0, &found));
    peer = found.front();
  }
  throw_if_error(choose_address(interfaces, peer, &o.at));
  throw_if_error(parse_port_range(ports, &o.ports));
  Secret s;
  if (!secret_file.empty()) {
    throw_if_error(Secret::from_file(secret_file, &s));
  } else {
    const std::string bytes = secret;
    throw_if_error(Secret::from_bytes(bytes.data(), bytes.size(), &s));
  }
  std::shared_ptr<Net> net;
  throw_if_error(Net::create(std::move(o), std::move(s), &net));
  return net;
}

void set_peers(Net& net, const std::vector<std::string>& addresses, std::vector<std::string> names) {
  std::vector<Address> parsed(addresses.size());
  for (size_t q = 0; q < addresses.size(); q++) throw_if_error(Address::parse(addresses[q], &parsed[q]));
  net.set_peers(std::move(parsed), std::move(names));
}

// The ranks of several hosts: this host's meet in `folder`, as `local_rank` of `local_size`.
std::unique_ptr<PyCommunicator> join_hosts(const std::string& folder, int local_rank, int local_size,
                                           double join_timeout_s, double timeout_s, std::shared_ptr<Net> net,
                                           std::vector<int> host_of) {
  auto c = std::make_unique<PyCommunicator>();
  Status s;
  {
    py::gil_scoped_release release;
    s = Node::join(folder, local_rank, local_size, kControlBytes, join_timeout_s, check_signals, &c->node);
  }
  throw_if_error(s);
  std::vector<int> ranks;
  for (int q = 0; q < local_size; q++) ranks.push_back(q);
  const std::vector<uint64_t> controls(static_cast<size_t>(local_size), 0);
  Communicator::Across across;
  across.rank = net->rank();
  for (int q = 0; q < net->size(); q++) across.job_ranks.push_back(q);
  net->set_hosts(host_of);
  across.net = std::move(net);
  across.host_of = std::move(host_of);
  across.id = 2;
  throw_if_error(
      Communicator::create(c->node, ranks, local_rank, timeout_s, controls, std::move(across), &c->comm));
  return c;
}

std::unique_ptr<PyCommunicator> split(PyCommunicator& self, int64_t color, int64_t key, int64_t plan) {
  auto c = std::make_unique<PyCommunicator>();
  c->node = self.node;
  c->deterministic = self.deterministic;
  for (int k = 0; k < kNumCollectives; k++) c->forced[k] = self.forced[k];
  GilHooks hooks;
  raise_after(hooks, self.comm->split(color, key, plan, &hooks, &c->comm));
  return c->comm != nullptr ? std::move(c) : nullptr;
}

std::unique_ptr<PyCommunicator> shrink(PyCommunicator& self, const std::vector<int>& exclude,
                                       double timeout_s) {
  auto c = std::make_unique<PyCommunicator>();
  c->node = self.node;
  c->deterministic = self.deterministic;
  for (int k = 0; k < kNumCollectives; k++) c->forced[k] = self.forced[k];
  GilHooks hooks;
  raise_after(hooks, self.comm->shrink(exclude, timeout_s, &hooks, &c->comm));
  return c;
}

int checked(const PyCommunicator& c, int q) {
  if (q < 0 || q >= c.comm->size()) {
    throw_if_error(
        Status::error(Code::kValue, format("rank %d is not in this communicator of %d", q, c.comm->size())));
  }
  return q;
}

}  // namespace

void bind_engine(py::module_& m) {
  m.def("setup", [](py::object tensor, py::object parameter, py::object api, py::object grad_enabled,
                    py::object current_stream) {
    bind_tensor_setup(tensor.ptr(), parameter.ptr(), api.ptr(), grad_enabled.ptr(), current_stream.ptr());
    if (PyErr_Occurred() == nullptr) tally_setup(tensor.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  });
  m.def("usable_cores", &usable_cores);
  m.def("set_log_level", [](const std::string& text) {
    LogLevel level = LogLevel::kWarning;
    throw_if_error(parse_log_level(text, &level));
    set_log_level(level);
  });
  py::class_<Completions, std::shared_ptr<Completions>>(m, "Completions")
      .def(py::init<>())
      .def("stop", &Completions::stop)
      .def("pop", [](Completions& c) -> std::optional<uint64_t> {
        py::gil_scoped_release r;
        uint64_t id = 0;
        if (!c.pop(&id)) return std::nullopt;
        return id;
      });
  add_work(m);
  py::class_<Net, std::shared_ptr<Net>>(m, "Net")
      .def(py::init(&make_net))
      .def_property_readonly("address", [](const Net& n) { return n.address().to_string(); })
      .def_property_readonly("bytes_sent", &Net::bytes_sent)
      .def_property_readonly("strangers", &Net::strangers)
      .def("set_peers", &set_peers);
  py::class_<PyCommunicator> communicator(m, "Communicator");
  communicator.def_static("join", &join)
      .def_static("join_hosts", &join_hosts)
      .def_property_readonly("hosts",
                             [](const PyCommunicator& c) {
                               const Placement* l = c.comm->placement();
                               return l != nullptr ? l->host_of
                                                   : std::vector<int>(static_cast<size_t>(c.comm->size()), 0);
                             })
      .def_property_readonly("rank", [](const PyCommunicator& c) { return c.comm->rank(); })
      .def_property_readonly("size", [](const PyCommunicator& c) { return c.comm->size(); })
      .def_property_readonly("closed", [](const PyCommunicator& c) { return c.comm->closed(); })
      .def_property_readonly("failed", [](const PyCommunicator& c) { return c.comm->group().failed(); })
      .def_property(
          "timeout_s", [](const PyCommunicator& c) { return c.comm->group().timeout_s(); },
          [](PyCommunicator& c, double s) { c.comm->group().set_timeout_s(s); })
      .def_readwrite("deterministic", &PyCommunicator::deterministic)
      .def("force_algorithm",
           [](PyCommunicator& c, int kind, const std::string& name) {
             uint8_t index;
             throw_if_error(
                 algorithm_index(static_cast<CallKind>(kind), name, &index).within("PYCOMM_ALGORITHM"));
             c.forced[kind] = name;
           })
      .def("call", &call)
      .def("point_to_point", &point_to_point)
      .def("refuse",
           [](PyCommunicator& c, const std::string& why) {
             Request request;
             request.refusal = why;
             GilHooks hooks;
             raise_after(hooks, c.comm->run(request, &hooks));
           })
      .def("check_usable", [](const PyCommunicator& c) { throw_if_error(c.comm->check_usable()); })
      .def("empty", &empty)
      .def("owns", [](const PyCommunicator& c,
                      uintptr_t p) { return c.node->arena()->owns(reinterpret_cast<void*>(p)); })
      .def("arena_bytes_in_use", [](const PyCommunicator& c) { return c.node->arena()->bytes_in_use(); })
      .def("pid",
           [](const PyCommunicator& c, int q) {  // 0: not a process of this host, or not visible here
             const int local = c.comm->local_rank(checked(c, q));
             return local < 0 ? 0 : c.node->pid(c.comm->group().node_rank(local));
           })
      .def("set_note", [](PyCommunicator& c, uint64_t note) { c.comm->group().set_note(note); })
      .def("note",
           [](const PyCommunicator& c, int q) {  // what a rank of another host does is not known here
             const int local = c.comm->local_rank(checked(c, q));
             return local < 0 ? 0 : c.comm->group().note(local);
           })
      .def("introduce",
           [](PyCommunicator& c, const std::string& job, const std::string& label, int job_rank) {
             c.comm->group().introduce(job, label, c.comm->rank(), c.comm->size(), job_rank);
           })
      .def("describe", [](const PyCommunicator& c, int q) { return c.comm->describe(checked(c, q)); })
      .def("split", &split)
      .def("shrink", &shrink)
      .def("abort",
           [](PyCommunicator& c, const std::string& why) {
             py::gil_scoped_release r;
             c.comm->abort(why);
           })
      .def(
          "close",
          [](PyCommunicator& c, double limit_s, const std::string& why) {
            GilHooks hooks;
            raise_after(hooks, c.comm->close(&hooks, limit_s, why));
          },
          py::arg("limit_s") = INFINITY, py::arg("why") = "");
  add_selection(communicator);
  add_device_calls(communicator);
  add_fast_calls(m);
  add_tally(m);
}

}  // namespace pycomm
