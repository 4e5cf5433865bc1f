// What DistributedDataParallel does for every gradient of every backward, in C: hooks that count, and one
// look at a bucket's gradients. In Python each of these would cost as much as autograd's own share.
//
// Words: the *tally* of a backward is its mode, which gradients came, in which order and how often, and for
// each bucket how many are *left*; a *hook* is what autograd calls with a parameter whose gradient has been
// accumulated. Hooks own their tally; the tally calls `begin` when a gradient comes while no backward is
// under way, and `complete` when a bucket has none left. Both callables must hold their reducer weakly: the
// garbage collector does not see through autograd's hooks.
// Threads: all calls have the GIL. Cost: about 0.05 us beyond reading `.grad`.
#include "bind/tally.h"

#include <structmember.h>

#include <cstdint>
#include <vector>

#include "bind/attribute.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace pycomm {

namespace {

constexpr int kIdle = 0;  // the other modes are Python's business (pycomm/ddp/tally.py)

PyTypeObject *tally_type = nullptr, *hook_type = nullptr, *plain_tensor = nullptr;
Attribute grad, dtype, layout, needs_grad;

struct Counts {
  std::vector<int32_t> came;       // in order, with repetitions
  std::vector<int32_t> times;      // of each gradient
  std::vector<int32_t> bucket_of;  // of each gradient
  std::vector<int32_t> awaited, left;
  Py_ssize_t n_distinct = 0;
};

struct Tally {
  PyObject_HEAD int mode;
  PyObject *begin, *complete;
  Counts* counts;
};

struct Hook {
  PyObject_HEAD vectorcallfunc call;
  Tally* tally;
  size_t index;
};

bool to_ints(PyObject* list, std::vector<int32_t>* out) {
  PyObject* fast = PySequence_Fast(list, "expected a list of int");
  if (fast == nullptr) return false;
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
  out->resize(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; i++)
    (*out)[static_cast<size_t>(i)] = static_cast<int32_t>(PyLong_AsLong(PySequence_Fast_GET_ITEM(fast, i)));
  Py_DECREF(fast);
  return PyErr_Occurred() == nullptr;
}

PyObject* to_list(const std::vector<int32_t>& v) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(v.size()));
  for (size_t i = 0; list != nullptr && i < v.size(); i++) {
    PyObject* number = PyLong_FromLong(v[i]);
    if (number == nullptr) Py_CLEAR(list);
    if (number != nullptr) PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
  }
  return list;
}

// ---- hooks ----------------------------------------------------------------------------------------------

PyObject* gradient_came(PyObject* self, PyObject* const* args, size_t n_args, PyObject*) {
  auto* hook = reinterpret_cast<Hook*>(self);
  if (PyVectorcall_NARGS(n_args) != 1) {
    PyErr_SetString(PyExc_TypeError, "a hook of DistributedDataParallel takes one parameter");
    return nullptr;
  }
  Tally* tally = hook->tally;
  if (tally->mode == kIdle) {
    PyObject* done = PyObject_CallNoArgs(tally->begin);
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    if (tally->mode == kIdle) Py_RETURN_NONE;  // the reducer is gone
  }
  PyObject* gradient = grad.get(args[0]);
  if (gradient == nullptr) return nullptr;
  Py_DECREF(gradient);
  if (gradient == Py_None) Py_RETURN_NONE;  // an undefined gradient went through the graph: none has come
  Counts& c = *tally->counts;
  if (hook->index >= c.bucket_of.size()) Py_RETURN_NONE;  // autograd took its list of hooks before we left it
  c.came.push_back(static_cast<int32_t>(hook->index));
  if (c.times[hook->index]++ == 0) c.n_distinct++;
  if (--c.left[static_cast<size_t>(c.bucket_of[hook->index])] != 0) Py_RETURN_NONE;
  return PyObject_CallNoArgs(tally->complete);
}

void hook_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<Hook*>(self)->tally);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot hook_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, hook_members},
    {Py_tp_dealloc, reinterpret_cast<void*>(hook_dealloc)},
    {0, nullptr},
};
PyType_Spec hook_spec = {"pycomm._C.GradientHook", sizeof(Hook), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         hook_slots};

// ---- the tally ------------------------------------------------------------------------------------------

Counts& counts_of(PyObject* self) { return *reinterpret_cast<Tally*>(self)->counts; }

PyObject* tally_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *begin, *complete;
  if (!PyArg_ParseTuple(args, "OO:Tally", &begin, &complete)) return nullptr;
  auto* self = reinterpret_cast<Tally*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->begin = Py_NewRef(begin);
  self->complete = Py_NewRef(complete);
  self->counts = new Counts;
  return reinterpret_cast<PyObject*>(self);
}

void tally_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Tally*>(object);
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF(self->begin);
  Py_XDECREF(self->complete);
  delete self->counts;
  type->tp_free(object);
  Py_DECREF(type);
}

void clear(Counts& c) {
  c.came.clear();
  c.times.assign(c.bucket_of.size(), 0);
  c.left = c.awaited;
  c.n_distinct = 0;
}

PyObject* arm(PyObject* self, PyObject* args) {
  PyObject *awaited, *bucket_of;
  if (!PyArg_ParseTuple(args, "OO:arm", &awaited, &bucket_of)) return nullptr;
  Counts fresh;
  if (!to_ints(awaited, &fresh.awaited) || !to_ints(bucket_of, &fresh.bucket_of)) return nullptr;
  for (const int32_t bucket : fresh.bucket_of) {
    if (bucket < 0 || static_cast<size_t>(bucket) >= fresh.awaited.size()) {
      PyErr_Format(PyExc_ValueError, "Tally.arm: bucket %d of %zu", bucket, fresh.awaited.size());
      return nullptr;
    }
  }
  clear(fresh);
  counts_of(self) = std::move(fresh);
  Py_RETURN_NONE;
}

PyObject* reset(PyObject* self, PyObject*) {
  reinterpret_cast<Tally*>(self)->mode = kIdle;
  clear(counts_of(self));
  Py_RETURN_NONE;
}

PyObject* left_of(PyObject* self, PyObject* bucket) {
  const size_t at = PyLong_AsSize_t(bucket);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (at >= counts_of(self).left.size()) return PyErr_Format(PyExc_IndexError, "Tally.left: bucket %zu", at);
  return PyLong_FromLong(counts_of(self).left[at]);
}

PyObject* make_hook(PyObject* self, PyObject* index) {
  const size_t at = PyLong_AsSize_t(index);
  if (PyErr_Occurred() != nullptr) return nullptr;
  auto* hook = reinterpret_cast<Hook*>(hook_type->tp_alloc(hook_type, 0));
  if (hook == nullptr) return nullptr;
  hook->call = gradient_came;
  hook->tally = reinterpret_cast<Tally*>(Py_NewRef(self));
  hook->index = at;
  return reinterpret_cast<PyObject*>(hook);
}

PyMethodDef tally_methods[] = {
    {"arm", arm, METH_VARARGS,
     "arm(awaited, bucket_of): how many gradients each bucket awaits (below 1: it never completes), and the\n"
     "bucket of each gradient. Nothing has come."},
    {"reset", reset, METH_NOARGS, "Nothing has come, and no backward is under way."},
    {"left", left_of, METH_O, "left(bucket): how many of its gradients are still to come."},
    {"hook", make_hook, METH_O, "hook(index): a callable for a parameter's post-accumulate-grad hook."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef tally_members[] = {
    {"mode", T_INT, offsetof(Tally, mode), 0, "0: no backward is under way."},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef tally_getset[] = {
    {"came", [](PyObject* self, void*) { return to_list(counts_of(self).came); }, nullptr,
     "Which gradients came, in order.", nullptr},
    {"times", [](PyObject* self, void*) { return to_list(counts_of(self).times); }, nullptr,
     "How often each came.", nullptr},
    {"n_distinct", [](PyObject* self, void*) { return PyLong_FromSsize_t(counts_of(self).n_distinct); },
     nullptr, "How many came at least once.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot tally_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tally_new)},
    {Py_tp_methods, tally_methods},
    {Py_tp_members, tally_members},
    {Py_tp_getset, tally_getset},
    {Py_tp_dealloc, reinterpret_cast<void*>(tally_dealloc)},
    {0, nullptr},
};
PyType_Spec tally_spec = {"pycomm._C.Tally", sizeof(Tally), 0, Py_TPFLAGS_DEFAULT, tally_slots};

// ---- a bucket's gradients -------------------------------------------------------------------------------

// 1 yes, 0 no, -1 with a Python error.
int has(const Attribute& attribute, PyObject* tensor, PyObject* wanted) {
  PyObject* value = attribute.get(tensor);
  if (value == nullptr) return -1;
  Py_DECREF(value);  // dtypes, layouts and truth values live for ever
  return value == wanted ? 1 : 0;
}

PyObject* plain_gradients(PyObject*, PyObject* const* args, Py_ssize_t n_args) {
  if (n_args != 3 || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "plain_gradients(parameters: list, dtype, layout)");
    return nullptr;
  }
  const Py_ssize_t n = PyList_GET_SIZE(args[0]);
  PyObject* gradients = PyList_New(n);
  for (Py_ssize_t i = 0; gradients != nullptr && i < n; i++) {
    PyObject* gradient = grad.get(PyList_GET_ITEM(args[0], i));
    if (gradient != nullptr) PyList_SET_ITEM(gradients, i, gradient);
    int is_plain = gradient == nullptr ? -1 : Py_IS_TYPE(gradient, plain_tensor) ? 1 : 0;
    if (is_plain > 0) is_plain = has(dtype, gradient, args[1]);
    if (is_plain > 0) is_plain = has(layout, gradient, args[2]);
    if (is_plain > 0) is_plain = has(needs_grad, gradient, Py_False);
    if (is_plain > 0) continue;
    Py_DECREF(gradients);
    if (is_plain < 0) return nullptr;
    Py_RETURN_NONE;
  }
  return gradients;
}

PyMethodDef functions[] = {
    {"plain_gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(plain_gradients)),
     METH_FASTCALL,
     "plain_gradients(parameters, dtype, layout): their `grad`s, or None unless each is a torch.Tensor of "
     "that\n"
     "dtype and layout that requires no gradient."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void tally_setup(PyObject* tensor) {
  plain_tensor = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  static_cast<void>(grad.find(tensor, "grad") && dtype.find(tensor, "dtype") &&
                    layout.find(tensor, "layout") && needs_grad.find(tensor, "requires_grad"));
}

void add_tally(py::module_& m) {
  hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
  tally_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tally_spec));
  if (hook_type == nullptr || tally_type == nullptr || PyModule_AddFunctions(m.ptr(), functions) != 0)
    throw py::error_already_set();
  m.attr("GradientHook") = py::handle(reinterpret_cast<PyObject*>(hook_type));
  m.attr("Tally") = py::handle(reinterpret_cast<PyObject*>(tally_type));
}

}  // namespace pycomm
