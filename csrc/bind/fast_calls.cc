// all_reduce of Communicator, in C: a synchronous sum of plain tensors, the call that training makes most,
// has no Python frame and makes no objects. Everything else (other arguments, lists, layouts that need
// staging, and whatever is wrong) goes to `_all_reduce` in pycomm/collectives.py, which refuses what the
// signature does not have. A call that fails its checks here is refused to the peers (refuse_and_raise) and
// raises.
//
// Words: the fast way; the long way. Threads: with the GIL, given away by GilHooks while waiting.
// Cost: about 0.25 us on one rank.
#include "bind/fast_calls.h"

#include "bind/bind.h"
#include "bind/request.h"
#include "bind/tensor.h"

namespace py = pybind11;

namespace pycomm {

namespace {

struct FastCalls {
  PyObject_HEAD PyObject* object;  // owns the core
  PyCommunicator* core;
};

// Interned: arguments' names are compared by address.
PyObject *sum_name, *slow_name, *op_name, *out_name, *async_op_name, *algorithm_name, *deterministic_name,
    *timeout_name, *compress_name, *error_feedback_name;

// 1 done, 0 must go the long way, -1 with a Python error.
int try_all_reduce(PyCommunicator& core, PyObject* tensor, PyObject* out) {
  Request request;
  TensorView view, out_view;
  Layout layout, out_layout = Layout::kPlain;
  Status s = view_tensor(tensor, "tensor", out == tensor, &view, &layout);
  if (s.ok() && out != tensor) s = view_tensor(out, "out", true, &out_view, &out_layout);
  if (s.code() == Code::kInterrupt && PyErr_Occurred() != nullptr) return -1;
  // What is wrong, differs or overlaps is for the long way to judge.
  if (!s.ok() || view.device >= 0 || layout == Layout::kNeedsStaging || out_layout == Layout::kNeedsStaging)
    return 0;
  remember_plain(tensor, view);
  if (out == tensor) out_view = view;
  if (out != tensor) {
    remember_plain(out, out_view);
    const size_t n_bytes = view.n_elems * dtype_size(view.dtype);
    const char *a = static_cast<char*>(view.data), *b = static_cast<char*>(out_view.data);
    const bool apart = a + n_bytes <= b || b + n_bytes <= a;
    if (view.dtype != out_view.dtype || view.n_elems != out_view.n_elems || !apart) return 0;
  }
  Call& c = request.call;
  c.sig.kind = CallKind::kAllReduce;
  c.sig.dtype = view.dtype;
  c.sig.count = view.n_elems;
  c.in = Buffer(view.data, view.n_elems);
  c.out = Buffer(out_view.data, view.n_elems);
  request.deterministic = core.deterministic;
  s = core.comm->prepare(&request, core.algorithm_for(CallKind::kAllReduce));
  if (!s.ok()) refuse_and_raise(core, s);
  GilHooks hooks;
  if (view.n_elems * dtype_size(view.dtype) > kKeepGilBytes) hooks.before_block();
  raise_after(hooks, core.comm->run(request, &hooks));
  return 1;
}

bool is_sum(PyObject* op) {
  return op == sum_name || (PyUnicode_CheckExact(op) && PyUnicode_CompareWithASCIIString(op, "sum") == 0);
}

// The arguments that the fast way knows: tensor, op "sum" and out; the others only at their defaults.
bool parse(PyObject* const* args, Py_ssize_t n_args, PyObject* names, PyObject** tensor, PyObject** out) {
  if (n_args < 1 || n_args > 2 || (n_args == 2 && !is_sum(args[1]))) return false;
  *tensor = *out = args[0];
  const Py_ssize_t n_names = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < n_names; i++) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    PyObject* value = args[n_args + i];
    if (name == out_name) {
      if (value != Py_None) *out = value;
      continue;
    }
    const bool is_default = name == op_name ? n_args == 1 && is_sum(value)
                            : name == async_op_name
                                ? value == Py_False
                                : value == Py_None && (name == algorithm_name || name == deterministic_name ||
                                                       name == timeout_name || name == compress_name ||
                                                       name == error_feedback_name);
    if (!is_default) return false;
  }
  return !PyList_Check(*tensor) && !PyTuple_Check(*tensor) && !PyList_Check(*out) && !PyTuple_Check(*out);
}

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t n_args, PyObject* names) {
  auto* fast = reinterpret_cast<FastCalls*>(self);
  PyObject *tensor, *out;
  if (fast->core != nullptr && parse(args, n_args, names, &tensor, &out)) {
    try {
      const int done = try_all_reduce(*fast->core, tensor, out);
      if (done < 0) return nullptr;
      if (done > 0) return Py_NewRef(out);
    } catch (py::error_already_set& e) {
      e.restore();
      return nullptr;
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
      return nullptr;
    }
  }
  PyObject* slow = PyObject_GetAttr(self, slow_name);
  if (slow == nullptr) return nullptr;
  PyObject* result = PyObject_Vectorcall(slow, args, static_cast<size_t>(n_args), names);
  Py_DECREF(slow);
  return result;
}

PyObject* bind_core(PyObject* self, PyObject* object) {
  auto* fast = reinterpret_cast<FastCalls*>(self);
  try {
    fast->core = py::handle(object).cast<PyCommunicator*>();
  } catch (const py::cast_error& e) {
    PyErr_SetString(PyExc_TypeError, "expected a _C.Communicator");
    return nullptr;
  }
  Py_XSETREF(fast->object, Py_NewRef(object));
  Py_RETURN_NONE;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<FastCalls*>(self)->object);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(all_reduce)),
     METH_FASTCALL | METH_KEYWORDS,
     "all_reduce($self, tensor, op='sum', *, out=None, async_op=False, algorithm=None, deterministic=None, "
     "timeout=None, compression=None, error_feedback=None)\n--\n\n"
     "Every rank gets the reduction of all ranks' tensors, the same bits everywhere.\n\n"
     "Args:\n"
     "    tensor: any shape, the same number of elements and dtype on every rank, or a list of tensors (one\n"
     "        coalesced call); overwritten when out is None.\n"
     "    op: see pycomm.collectives; avg is defined for floating and complex dtypes.\n"
     "    out: receives the result; as many elements and the dtype of tensor.\n"
     "    async_op, algorithm, deterministic, timeout: see pycomm.collectives.\n"
     "    compression, error_feedback: what crosses between hosts, see pycomm.collectives.\n\n"
     "Returns:\n"
     "    out or tensor (a pycomm.Work with async_op).\n\n"
     "Raises:\n"
     "    TypeError, ValueError, CommError: the common list of pycomm.collectives.\n\n"
     "Example:\n"
     "    >>> import pycomm, torch\n"
     "    >>> pycomm.init().all_reduce(torch.arange(3))\n"
     "    tensor([0, 1, 2])\n"},
    {"_bind_core", bind_core, METH_O, "Gives the instance its core."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_methods, methods},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {0, nullptr},
};
PyType_Spec spec = {"pycomm._C.FastCalls", sizeof(FastCalls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                    slots};

}  // namespace

void add_fast_calls(py::module_& m) {
  sum_name = PyUnicode_InternFromString("sum");
  slow_name = PyUnicode_InternFromString("_all_reduce");
  op_name = PyUnicode_InternFromString("op");
  out_name = PyUnicode_InternFromString("out");
  async_op_name = PyUnicode_InternFromString("async_op");
  algorithm_name = PyUnicode_InternFromString("algorithm");
  deterministic_name = PyUnicode_InternFromString("deterministic");
  timeout_name = PyUnicode_InternFromString("timeout");
  compress_name = PyUnicode_InternFromString("compression");
  error_feedback_name = PyUnicode_InternFromString("error_feedback");
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  m.attr("FastCalls") = py::reinterpret_steal<py::object>(type);
}

}  // namespace pycomm
