// The communicator in Python: one generic `call`, point-to-point, arena tensors, and a fast all_reduce.
//
// Arguments arrive checked for meaning by pycomm/communicator.py; what is checked here is what only C++ sees
// cheaply: the tensors. A call that fails its checks is refused to the peers (Engine::refuse) and raises.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "bind/bind.h"
#include "bind/hooks.h"
#include "bind/tensor.h"
#include "engine/communicator.h"
#include "engine/p2p.h"
#include "schedule/catalog.h"

namespace py = pybind11;

namespace pycomm {

namespace {

constexpr size_t kKeepGilBytes = size_t{64} << 10;

struct PyCommunicator {
  std::shared_ptr<Node> node;
  std::unique_ptr<Communicator> comm;
  bool deterministic = false;
  std::string forced[kNumCollectives];

  const char* algorithm_for(CallKind kind) const {
    const auto k = static_cast<size_t>(kind);
    return k < kNumCollectives && !forced[k].empty() ? forced[k].c_str() : nullptr;
  }
};

void raise_after(GilHooks& hooks, const Status& s) {
  hooks.acquire();
  throw_if_error(s);
}

// The rank's own call is invalid: tell the peers, then raise here.
void refuse_and_raise(PyCommunicator& self, const Status& why) {
  if (why.code() == Code::kValue || why.code() == Code::kType || why.code() == Code::kSchedule) {
    Request request;
    request.refusal = why.message();
    GilHooks hooks;
    const Status s = self.comm->run(request, &hooks);
    hooks.acquire();
    if (!s.ok()) return throw_if_error(s);  // closed, or failed before: that is the news
  }
  throw_if_error(why);
}

// What overlaps must be the same place, or results would depend on timing.
Status check_overlap(const Call& call, size_t size, uint64_t in_at, uint64_t out_at) {
  if (!call.in.single() || !call.out.single() || call.in.n_elems() == 0 || call.out.n_elems() == 0)
    return Status();
  const std::byte *a = call.in.data(), *b = call.out.data();
  const bool apart = a + call.in.n_elems() * size <= b || b + call.out.n_elems() * size <= a;
  const bool same = call.sig.kind != CallKind::kAllToAll && a - in_at * size == b - out_at * size;
  if (apart || same) return Status();
  return Status::error(
      Code::kValue, format("%s: input and output overlap, but not as an in-place call (docs/architecture.md)",
                           call_kind_name(call.sig.kind)));
}

struct Options {
  int op = 0;
  int root = 0;
  double scalar = 1.0;
  std::vector<uint64_t> counts, send_counts, recv_counts;
  std::optional<std::string> algorithm;
  std::optional<bool> deterministic;
  double timeout_s = 0;
};

// Which share of the vector each tensor must hold.
Status check_sizes(const PyCommunicator& self, const Call& call, const std::vector<uint64_t>& counts) {
  const int rank = self.comm->rank();
  const bool root = rank == call.sig.root;
  const uint64_t all = call.sig.count;
  const uint64_t mine = counts.empty() ? all : counts[static_cast<size_t>(rank)];
  const auto expect = [&](const char* what, const Buffer& b, uint64_t want) {
    if (b.n_elems() == want) return Status();
    return Status::error(
        Code::kValue,
        format("%s: %s has %llu elements, expected %llu", call_kind_name(call.sig.kind), what,
               static_cast<unsigned long long>(b.n_elems()), static_cast<unsigned long long>(want)));
  };
  switch (call.sig.kind) {
    case CallKind::kAllReduce:
      PYCOMM_RETURN_IF_ERROR(expect("tensor", call.in, all));
      return expect("out", call.out, all);
    case CallKind::kReduceScatter:
      PYCOMM_RETURN_IF_ERROR(expect("input", call.in, all));
      return expect("output", call.out, mine);
    case CallKind::kAllGather:
      PYCOMM_RETURN_IF_ERROR(expect("input", call.in, mine));
      return expect("output", call.out, all);
    case CallKind::kBroadcast: return expect("tensor", call.out, all);
    case CallKind::kReduce:
      PYCOMM_RETURN_IF_ERROR(expect("tensor", call.in, all));
      return root ? expect("out", call.out, all) : Status();
    case CallKind::kGather:
      PYCOMM_RETURN_IF_ERROR(expect("tensor", call.in, mine));
      return root ? expect("output", call.out, all) : Status();
    case CallKind::kScatter:
      if (root) PYCOMM_RETURN_IF_ERROR(expect("input", call.in, all));
      return expect("output", call.out, mine);
    case CallKind::kAllToAll:
    case CallKind::kBarrier:
    case CallKind::kRefused: return Status();
  }
  return Status();
}

uint64_t sum(const std::vector<uint64_t>& v) {
  uint64_t n = 0;
  for (uint64_t x : v) n += x;
  return n;
}

// Builds the request; `in` or `out` may be None where this rank has none.
Status make_request(PyCommunicator& self, CallKind kind, PyObject* in, PyObject* out, uint64_t count,
                    Options o, Request* request) {
  Call& call = request->call;
  Layout layout = Layout::kPlain, out_layout = Layout::kPlain;
  DType out_dtype = DType::kUInt8;
  call.sig.kind = kind;
  call.sig.op = static_cast<ReduceOp>(o.op);
  call.sig.root = o.root;
  call.scalar = o.scalar;
  const bool has_in = in != Py_None, has_out = out != Py_None;
  if (has_in)
    PYCOMM_RETURN_IF_ERROR(view_tensors(in, "input", in == out, &call.in, &call.sig.dtype, &layout));
  if (has_out && out == in) {
    call.out = call.in;
  } else if (has_out) {
    PYCOMM_RETURN_IF_ERROR(view_tensors(out, "output", true, &call.out, &out_dtype, &out_layout));
    if (has_in && out_dtype != call.sig.dtype) {
      return Status::error(Code::kType, format("%s: input is %s, output is %s", call_kind_name(kind),
                                               dtype_name(call.sig.dtype), dtype_name(out_dtype)));
    }
    call.sig.dtype = out_dtype;
  }
  if (layout != Layout::kPlain || out_layout != Layout::kPlain)
    return Status::error(Code::kSystem, "needs staging");
  const auto n = static_cast<uint64_t>(self.comm->size());
  call.sig.count = count;
  if (kind == CallKind::kAllReduce || kind == CallKind::kReduce) call.sig.count = call.in.n_elems();
  if (kind == CallKind::kBroadcast) call.sig.count = call.out.n_elems();
  const bool parted = kind == CallKind::kReduceScatter || kind == CallKind::kAllGather ||
                      kind == CallKind::kGather || kind == CallKind::kScatter;
  if (parted) {
    if (o.counts.empty()) {
      const bool whole_in = kind == CallKind::kReduceScatter;
      const bool part_in = kind == CallKind::kAllGather || kind == CallKind::kGather;
      const uint64_t whole = whole_in  ? call.in.n_elems()
                             : part_in ? call.in.n_elems() * n
                                       : call.out.n_elems() * n;
      if (whole % n != 0) {
        return Status::error(Code::kValue,
                             format("%s: %llu elements do not divide evenly over %llu ranks; give counts=",
                                    call_kind_name(kind), static_cast<unsigned long long>(whole),
                                    static_cast<unsigned long long>(n)));
      }
      o.counts.assign(n, whole / n);
    }
    if (o.counts.size() != n) {
      return Status::error(Code::kValue,
                           format("%s: counts has %zu entries, expected %llu, one for each rank",
                                  call_kind_name(kind), o.counts.size(), static_cast<unsigned long long>(n)));
    }
    call.sig.count = sum(o.counts);
  }
  if (kind == CallKind::kAllToAll) {
    call.sig.count = 0;  // may differ between ranks; pairs are compared by the engine
    if (o.send_counts.size() != n || o.recv_counts.size() != n)
      return Status::error(Code::kValue, "all_to_all: one split size for each rank is needed");
    if (sum(o.send_counts) != call.in.n_elems() || sum(o.recv_counts) != call.out.n_elems()) {
      return Status::error(
          Code::kValue,
          format("all_to_all: split sizes add up to %llu and %llu, the tensors have %llu and %llu elements",
                 static_cast<unsigned long long>(sum(o.send_counts)),
                 static_cast<unsigned long long>(sum(o.recv_counts)),
                 static_cast<unsigned long long>(call.in.n_elems()),
                 static_cast<unsigned long long>(call.out.n_elems())));
    }
  }
  if (o.root < 0 || static_cast<uint64_t>(o.root) >= n) {
    return Status::error(
        Code::kValue, format("%s: rank %d is not in this communicator of %llu", call_kind_name(kind), o.root,
                             static_cast<unsigned long long>(n)));
  }
  PYCOMM_RETURN_IF_ERROR(check_sizes(self, call, o.counts));
  uint64_t before = 0;
  if (!o.counts.empty()) {
    for (int q = 0; q < self.comm->rank(); q++) before += o.counts[static_cast<size_t>(q)];
  }
  const bool in_part = kind == CallKind::kAllGather || kind == CallKind::kGather;
  const bool out_part = kind == CallKind::kReduceScatter || kind == CallKind::kScatter;
  if (has_in && has_out) {
    PYCOMM_RETURN_IF_ERROR(
        check_overlap(call, dtype_size(call.sig.dtype), in_part ? before : 0, out_part ? before : 0));
  }
  request->counts = std::move(o.counts);
  request->send_counts = std::move(o.send_counts);
  request->recv_counts = std::move(o.recv_counts);
  request->deterministic = o.deterministic.value_or(self.deterministic);
  request->timeout_s = o.timeout_s;
  return self.comm->prepare(request, o.algorithm ? o.algorithm->c_str() : self.algorithm_for(kind));
}

bool is_staging(const Status& s) { return s.code() == Code::kSystem && s.message() == "needs staging"; }

Options options_from(const py::dict& d) {
  Options o;
  for (const auto& [k, v] : d) {
    const auto key = k.cast<std::string>();
    if (v.is_none()) continue;
    if (key == "op")
      o.op = v.cast<int>();
    else if (key == "root")
      o.root = v.cast<int>();
    else if (key == "scalar")
      o.scalar = v.cast<double>();
    else if (key == "counts")
      o.counts = v.cast<std::vector<uint64_t>>();
    else if (key == "send_counts")
      o.send_counts = v.cast<std::vector<uint64_t>>();
    else if (key == "recv_counts")
      o.recv_counts = v.cast<std::vector<uint64_t>>();
    else if (key == "algorithm")
      o.algorithm = v.cast<std::string>();
    else if (key == "deterministic")
      o.deterministic = v.cast<bool>();
    else if (key == "timeout_s")
      o.timeout_s = v.cast<double>();
    else
      throw py::type_error("unknown option " + key);
  }
  return o;
}

// True: done (or a Work); NotImplemented: the tensors need staging by the caller.
py::object call(PyCommunicator& self, int kind, py::object in, py::object out, uint64_t count,
                const py::dict& options, bool async_op) {
  auto request = std::make_unique<Request>();
  Status s = make_request(self, static_cast<CallKind>(kind), in.ptr(), out.ptr(), count,
                          options_from(options), request.get());
  if (is_staging(s)) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  if (s.code() == Code::kInterrupt && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (!s.ok()) refuse_and_raise(self, s);
  if (async_op) return py::cast(self.comm->start(std::move(request)));
  GilHooks hooks;
  const Call& c = request->call;
  if (c.in.n_elems() + c.out.n_elems() > kKeepGilBytes / dtype_size(c.sig.dtype)) hooks.before_block();
  raise_after(hooks, self.comm->run(*request, &hooks));
  return py::bool_(true);
}

// fast(tensor, op): all_reduce in place with the communicator's defaults; False when it must go the long way.
PyObject* fast_all_reduce(PyObject* capsule, PyObject* const* args, Py_ssize_t n_args) {
  static PyObject* const kSumName = PyUnicode_InternFromString("sum");
  auto& self = *static_cast<PyCommunicator*>(PyCapsule_GetPointer(capsule, "pycomm.communicator"));
  if (n_args != 2 || args[1] != kSumName || PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0]))
    Py_RETURN_FALSE;
  try {
    Request request;
    TensorView view;
    Layout layout;
    Status s = view_tensor(args[0], "tensor", true, &view, &layout);
    if (s.ok() && layout == Layout::kNeedsStaging) Py_RETURN_FALSE;
    if (s.code() == Code::kInterrupt && PyErr_Occurred() != nullptr) return nullptr;
    Call& c = request.call;
    if (s.ok()) {
      c.sig.kind = CallKind::kAllReduce;
      c.sig.dtype = view.dtype;
      c.sig.count = view.n_elems;
      c.in = c.out = Buffer(view.data, view.n_elems);
      request.deterministic = self.deterministic;
      s = self.comm->prepare(&request, self.algorithm_for(CallKind::kAllReduce));
    }
    if (!s.ok()) refuse_and_raise(self, s);
    GilHooks hooks;
    if (view.n_elems * dtype_size(view.dtype) > kKeepGilBytes) hooks.before_block();
    raise_after(hooks, self.comm->run(request, &hooks));
    Py_RETURN_TRUE;
  } catch (py::error_already_set& e) {
    e.restore();
    return nullptr;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}
PyMethodDef kFast = {"fast_all_reduce",
                     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(fast_all_reduce)), METH_FASTCALL,
                     nullptr};

py::object point_to_point(PyCommunicator& self, bool is_send, py::object tensor, int peer, int tag,
                          double timeout_s, bool async_op) {
  TensorView view;
  Layout layout;
  Status s = view_tensor(tensor.ptr(), "tensor", !is_send, &view, &layout);
  if (s.ok() && layout == Layout::kNeedsStaging) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
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
    if (!work->done()) p2p.in_background();
    return py::cast(work);
  }
  GilHooks hooks;
  raise_after(hooks, p2p.finish(work, &hooks));
  return py::int_(work->source);
}

py::object empty(PyCommunicator& self, const std::vector<int64_t>& shape, int dtype) {
  size_t n = dtype_size(static_cast<DType>(dtype));
  for (int64_t s : shape) n *= static_cast<size_t>(s);
  struct Block {
    std::shared_ptr<Arena> arena;
    uint64_t offset;
  };
  auto block = std::make_unique<Block>(Block{self.node->arena(), 0});
  throw_if_error(self.comm->check_usable());
  throw_if_error(block->arena->allocate(n, &block->offset));
  void* data = block->arena->base() + block->offset;
  PyObject* t = make_tensor(data, shape.data(), static_cast<int>(shape.size()), static_cast<DType>(dtype),
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

std::unique_ptr<PyCommunicator> split(PyCommunicator& self, int64_t color, int64_t key) {
  auto c = std::make_unique<PyCommunicator>();
  c->node = self.node;
  c->deterministic = self.deterministic;
  for (int k = 0; k < kNumCollectives; k++) c->forced[k] = self.forced[k];
  GilHooks hooks;
  raise_after(hooks, self.comm->split(color, key, &hooks, &c->comm));
  return c->comm != nullptr ? std::move(c) : nullptr;
}

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

bool wait_work(Work& self, double timeout_s) {
  GilHooks hooks;
  bool finished;
  raise_after(hooks, self.wait(timeout_s, &hooks, &finished));
  return finished;
}

}  // namespace

void bind_engine(py::module_& m) {
  m.def("setup", [](py::object tensor, py::object parameter, py::object api, py::object grad_enabled) {
    bind_tensor_setup(tensor.ptr(), parameter.ptr(), api.ptr(), grad_enabled.ptr());
  });
  m.def("usable_cores", &usable_cores);
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("wait", &wait_work)
      .def("done", &Work::done)
      .def("raise_if_failed", [](const Work& w) { throw_if_error(w.result()); })
      .def_readonly("source", &Work::source);
  py::class_<PyCommunicator>(m, "Communicator")
      .def_static("join", &join)
      .def_property_readonly("rank", [](const PyCommunicator& c) { return c.comm->rank(); })
      .def_property_readonly("size", [](const PyCommunicator& c) { return c.comm->size(); })
      .def_property_readonly("closed", [](const PyCommunicator& c) { return c.comm->closed(); })
      .def_property_readonly("failed", [](const PyCommunicator& c) { return c.comm->group().failed(); })
      .def_property(
          "timeout_s", [](const PyCommunicator& c) { return c.comm->group().timeout_s(); },
          [](PyCommunicator& c, double s) { c.comm->group().set_timeout_s(s); })
      .def_readwrite("deterministic", &PyCommunicator::deterministic)
      .def("force_algorithm",
           [](PyCommunicator& c, int kind, const std::string& name) { c.forced[kind] = name; })
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
      .def("arena_base", [](const PyCommunicator& c,
                            int q) { return reinterpret_cast<uintptr_t>(c.comm->group().arena_base(q)); })
      .def("pid", [](const PyCommunicator& c, int q) { return c.node->pid(c.comm->group().node_rank(q)); })
      .def("split", &split)
      .def("selection", &selection)
      .def("set_selection", &set_selection)
      .def("set_wait_policy",
           [](PyCommunicator& c, int polls, int yields) {
             c.comm->group().set_policy({polls, yields});
           })
      .def("abort",
           [](PyCommunicator& c, const std::string& why) {
             py::gil_scoped_release r;
             c.comm->abort(why);
           })
      .def("close",
           [](PyCommunicator& c) {
             py::gil_scoped_release r;
             c.comm->close();
           })
      .def("fast_all_reduce", [](py::object self) {
        auto& c = self.cast<PyCommunicator&>();
        py::object capsule =
            py::reinterpret_steal<py::object>(PyCapsule_New(&c, "pycomm.communicator", nullptr));
        return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&kFast, capsule.ptr(), nullptr));
      });
}

}  // namespace pycomm
