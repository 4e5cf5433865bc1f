#include "bind/tensor.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "bind/attribute.h"
#include "bind/dlpack.h"

namespace pycomm {

int emulated_device() {
#if defined(PYCOMM_CUDA_EMULATED)
  static const int device = [] {
    const char* text = std::getenv("PYCOMM_EMULATED_DEVICE");
    if (text != nullptr && std::strcmp(text, "rank") == 0) text = std::getenv("RANK");
    return text == nullptr ? -1 : std::atoi(text);
  }();
  return device;
#else
  return -1;
#endif
}

namespace {
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
const dlpack::ExchangeApi* api = nullptr;  // null: torch is too old, attributes are read instead
PyObject* is_grad_enabled = nullptr;
PyObject* stream_of = nullptr;  // torch's current stream of a device, as an integer
// Found once on the class: looking them up by name on every tensor costs as much as the calls.
PyObject *is_neg = nullptr, *is_conj = nullptr;
Attribute requires_grad;
PyObject *str_is_contiguous, *str_untyped_storage, *str_nbytes, *str_data_ptr, *str_numel, *str_dtype,
    *str_device, *str_type, *str_index;

// The answer of a Python call or attribute as a truth value; -1 with an error set.
int truth(PyObject* result) {
  if (result == nullptr) return -1;
  const int t = PyObject_IsTrue(result);
  Py_DECREF(result);
  return t;
}
Status python_error(const char* what) { return Status::error(Code::kInterrupt, what); }

bool dtype_of(dlpack::DataType t, DType* out) {
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  static constexpr Row kRows[] = {
      {dlpack::kFloat, 64, DType::kFloat64},
      {dlpack::kFloat, 32, DType::kFloat32},
      {dlpack::kFloat, 16, DType::kFloat16},
      {dlpack::kBfloat, 16, DType::kBFloat16},
      {dlpack::kFloat8E4M3FN, 8, DType::kFloat8E4M3},
      {dlpack::kFloat8E5M2, 8, DType::kFloat8E5M2},
      {dlpack::kInt, 8, DType::kInt8},
      {dlpack::kInt, 16, DType::kInt16},
      {dlpack::kInt, 32, DType::kInt32},
      {dlpack::kInt, 64, DType::kInt64},
      {dlpack::kUInt, 8, DType::kUInt8},
      {dlpack::kBool, 8, DType::kBool},
      {dlpack::kComplex, 64, DType::kComplex64},
      {dlpack::kComplex, 128, DType::kComplex128},
  };
  for (const Row& r : kRows) {
    if (r.code == t.code && r.bits == t.bits && t.lanes == 1) {
      *out = r.dtype;
      return true;
    }
  }
  return false;
}

Status unsupported_dtype(const char* what, PyObject* tensor) {
  PyObject* dtype = PyObject_GetAttr(tensor, str_dtype);
  PyObject* name = dtype != nullptr ? PyObject_Str(dtype) : nullptr;
  const char* shown = name != nullptr ? PyUnicode_AsUTF8(name) : nullptr;
  Status s = Status::error(
      Code::kType,
      format(
          "%s: dtype %s is not supported; supported are float64, float32, float16, bfloat16, float8_e4m3fn, "
          "float8_e5m2, int8, int16, int32, int64, uint8, bool, complex64, complex128",
          what, shown != nullptr ? shown : "of this tensor"));
  Py_XDECREF(name);
  Py_XDECREF(dtype);
  PyErr_Clear();
  return s;
}
Status wrong_device(const char* what, const char* kind) {
  return Status::error(
      Code::kValue, format("%s must be a CPU or CUDA tensor, is on '%s'; move it with .cpu()", what, kind));
}

// Whether a real tensor is lazily negated does not change, but asking costs as much as a small call.
// Remembered are tensors that are not, by object and address; the weak reference tells whether the object at
// that address is still the one that was asked.
struct Known {
  PyObject* tensor;
  const void* data;
  PyObject* weak;
};
constexpr size_t kKnown = 1024;
Known known[kKnown];

Known& known_slot(PyObject* tensor) {
  return known[(reinterpret_cast<uintptr_t>(tensor) >> 4) * 0x9E3779B97F4A7C15ull >> 54];
}
bool known_plain(PyObject* tensor, const void* data) {
  const Known& k = known_slot(tensor);
  return k.tensor == tensor && k.data == data && PyWeakref_GET_OBJECT(k.weak) == tensor;
}

// 1 contiguous, 0 not.
int contiguous(const dlpack::Tensor& t, uint64_t* n_elems) {
  uint64_t n = 1;
  for (int i = 0; i < t.ndim; i++) n *= static_cast<uint64_t>(t.shape[i]);
  *n_elems = n;
  if (n == 0 || t.strides == nullptr) return 1;
  int64_t expect = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    if (t.shape[i] != 1 && t.strides[i] != expect) return 0;
    expect *= t.shape[i];
  }
  return 1;
}

Status view_by_api(PyObject* tensor, const char* what, TensorView* view, Layout* layout) {
  dlpack::Tensor t;
  if (api->dltensor_from_py_object_no_sync(tensor, &t) != 0) {
    // Sparse tensors and others without plain memory: say which argument, keep torch's reason (its first
    // line: a C++ stack follows).
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* text = value != nullptr ? PyObject_Str(value) : nullptr;
    const char* reason = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
    if (reason == nullptr) reason = "no memory";
    Status s = Status::error(Code::kType, format("%s is not a plain dense tensor: %.*s", what,
                                                 static_cast<int>(std::strcspn(reason, "\n")), reason));
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
    return s;
  }
  if (t.device.device_type == dlpack::kCuda)
    view->device = t.device.device_id;
  else if (t.device.device_type == dlpack::kCpu || t.device.device_type == dlpack::kCudaHost)
    view->device = emulated_device();
  else
    return wrong_device(what, format("device type %d of DLPack", t.device.device_type).c_str());
  if (!dtype_of(t.dtype, &view->dtype)) return unsupported_dtype(what, tensor);
  if (!contiguous(t, &view->n_elems)) *layout = Layout::kNeedsStaging;
  view->data = static_cast<char*>(t.data) + t.byte_offset;
  return Status();
}

// torch < 2.10: the same facts, one attribute at a time.
Status view_by_attributes(PyObject* tensor, const char* what, TensorView* view, Layout* layout) {
  PyObject* device = PyObject_GetAttr(tensor, str_device);
  PyObject* kind = device != nullptr ? PyObject_GetAttr(device, str_type) : nullptr;
  PyObject* index = device != nullptr ? PyObject_GetAttr(device, str_index) : nullptr;
  Py_XDECREF(device);
  if (kind == nullptr || index == nullptr) {
    Py_XDECREF(kind);
    Py_XDECREF(index);
    return python_error(what);
  }
  Status known_device;
  if (PyUnicode_CompareWithASCIIString(kind, "cpu") == 0)
    view->device = emulated_device();
  else if (PyUnicode_CompareWithASCIIString(kind, "cuda") == 0)
    view->device = index == Py_None ? 0 : static_cast<int>(PyLong_AsLong(index));
  else
    known_device = wrong_device(what, PyUnicode_AsUTF8(kind));
  Py_DECREF(kind);
  Py_DECREF(index);
  PYCOMM_RETURN_IF_ERROR(std::move(known_device));
  PyObject* dtype = PyObject_GetAttr(tensor, str_dtype);
  PyObject* name = dtype != nullptr ? PyObject_Str(dtype) : nullptr;
  Py_XDECREF(dtype);
  if (name == nullptr) return python_error(what);
  bool known = false;
  for (int i = 0; i < kNumDTypes; i++) {
    const std::string full = std::string("torch.") + dtype_name(static_cast<DType>(i));
    if (PyUnicode_CompareWithASCIIString(name, full.c_str()) != 0) continue;
    view->dtype = static_cast<DType>(i);
    known = true;
  }
  Py_DECREF(name);
  if (!known) return unsupported_dtype(what, tensor);
  const int plain = truth(PyObject_CallMethodNoArgs(tensor, str_is_contiguous));
  if (plain < 0) return python_error(what);
  if (plain == 0) *layout = Layout::kNeedsStaging;
  PyObject* pointer = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
  PyObject* numel = PyObject_CallMethodNoArgs(tensor, str_numel);
  if (pointer != nullptr && numel != nullptr) {
    view->data = PyLong_AsVoidPtr(pointer);
    view->n_elems = PyLong_AsUnsignedLongLong(numel);
  }
  Py_XDECREF(pointer);
  Py_XDECREF(numel);
  return PyErr_Occurred() != nullptr ? python_error(what) : Status();
}
}  // namespace

void bind_tensor_setup(PyObject* tensor, PyObject* parameter, PyObject* exchange_api, PyObject* grad_enabled,
                       PyObject* current) {
  Py_INCREF(tensor);
  Py_INCREF(parameter);
  Py_INCREF(grad_enabled);
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor);
  parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
  is_grad_enabled = grad_enabled;
  if (current != Py_None) stream_of = Py_NewRef(current);
  api = nullptr;
  if (exchange_api != nullptr && PyCapsule_CheckExact(exchange_api)) {
    const auto* a =
        static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(exchange_api, "dlpack_exchange_api"));
    while (a != nullptr && a->version.major > 1) a = a->prev_api;
    if (a != nullptr && a->version.major == 1 && a->dltensor_from_py_object_no_sync != nullptr) api = a;
    PyErr_Clear();
  }
  is_neg = PyObject_GetAttrString(tensor, "is_neg");
  is_conj = PyObject_GetAttrString(tensor, "is_conj");
  if (!requires_grad.find(tensor, "requires_grad")) return;
  str_is_contiguous = PyUnicode_InternFromString("is_contiguous");
  str_untyped_storage = PyUnicode_InternFromString("untyped_storage");
  str_nbytes = PyUnicode_InternFromString("nbytes");
  str_data_ptr = PyUnicode_InternFromString("data_ptr");
  str_numel = PyUnicode_InternFromString("numel");
  str_dtype = PyUnicode_InternFromString("dtype");
  str_device = PyUnicode_InternFromString("device");
  str_type = PyUnicode_InternFromString("type");
  str_index = PyUnicode_InternFromString("index");
}

namespace {
// A storage may have been made smaller than its tensors (frameworks free memory so). Asking costs 0.5 us,
// which smaller calls would feel.
Status check_storage(PyObject* tensor, const char* what, const TensorView& view) {
  const size_t n_bytes = view.n_elems * dtype_size(view.dtype);
  if (n_bytes < (size_t{1} << 20)) return Status();
  PyObject* storage = PyObject_CallMethodNoArgs(tensor, str_untyped_storage);
  PyObject* begin = storage != nullptr ? PyObject_CallMethodNoArgs(storage, str_data_ptr) : nullptr;
  PyObject* size = storage != nullptr ? PyObject_CallMethodNoArgs(storage, str_nbytes) : nullptr;
  size_t have = 0;
  if (begin != nullptr && size != nullptr)
    have = PyLong_AsSize_t(begin) + PyLong_AsSize_t(size) - reinterpret_cast<uintptr_t>(view.data);
  Py_XDECREF(storage);
  Py_XDECREF(begin);
  Py_XDECREF(size);
  if (PyErr_Occurred() != nullptr) return python_error(what);
  if (n_bytes <= have) return Status();
  return Status::error(Code::kValue, format("%s has %zu bytes, its storage ends after %zu (was it resized?)",
                                            what, n_bytes, have));
}
}  // namespace

Status view_tensor(PyObject* tensor, const char* what, bool written, TensorView* view, Layout* layout) {
  if (tensor_type == nullptr) return Status::error(Code::kSystem, "import pycomm before using pycomm._C");
  if (Py_TYPE(tensor) != tensor_type && Py_TYPE(tensor) != parameter_type) {
    return Status::error(Code::kType, format("%s must be a torch.Tensor (not a subclass), got %s", what,
                                             Py_TYPE(tensor)->tp_name));
  }
  *layout = Layout::kPlain;
  PYCOMM_RETURN_IF_ERROR(api != nullptr ? view_by_api(tensor, what, view, layout)
                                        : view_by_attributes(tensor, what, view, layout));
  // The lazy bits are not part of the memory: what lies there is not the tensor's value.
  if (!known_plain(tensor, view->data)) {
    int lazy = truth(PyObject_Vectorcall(is_neg, &tensor, 1, nullptr));
    if (lazy == 0 && (view->dtype == DType::kComplex64 || view->dtype == DType::kComplex128)) {
      lazy = truth(PyObject_Vectorcall(is_conj, &tensor, 1, nullptr));
    }
    if (lazy < 0) return python_error(what);
    if (lazy > 0) *layout = Layout::kNeedsStaging;
    PYCOMM_RETURN_IF_ERROR(check_storage(tensor, what, *view));
  }
  if (view->data == nullptr && view->n_elems > 0) {
    return Status::error(Code::kType, format("%s has no memory (a meta or fake tensor?)", what));
  }
  PyObject* needs_grad = requires_grad.get(tensor);
  if (needs_grad == nullptr) return python_error(what);
  Py_DECREF(needs_grad);
  if (needs_grad != Py_False) {
    const int recording = truth(PyObject_CallNoArgs(is_grad_enabled));
    if (recording < 0) return python_error(what);
    if (recording > 0) {
      return Status::error(
          Code::kValue,
          format("%s requires grad, and autograd would not see this call%s: use torch.no_grad() or .detach()",
                 what, written ? " change it" : ""));
    }
  }
  return Status();
}

void remember_plain(PyObject* tensor, const TensorView& view) {
  constexpr size_t kSmallBytes = 16 << 10;
  if (Py_TYPE(tensor) != tensor_type || view.n_elems * dtype_size(view.dtype) > kSmallBytes) return;
  if (view.dtype == DType::kComplex64 || view.dtype == DType::kComplex128) return;
  if (known_plain(tensor, view.data)) return;
  PyObject* weak = PyWeakref_NewRef(tensor, nullptr);
  if (weak == nullptr) {
    PyErr_Clear();
    return;
  }
  Known& k = known_slot(tensor);
  PyObject* old = k.weak;
  k = {tensor, view.data, weak};
  Py_XDECREF(old);
}

const dlpack::ExchangeApi* exchange_api() { return api; }

std::string device_name(int device) { return device < 0 ? "CPU" : format("cuda:%d", device); }

Status current_stream(int device, void** stream) {
  *stream = nullptr;
  if (stream_of == nullptr || emulated_device() >= 0) return Status();
  PyObject* const value = PyObject_CallFunction(stream_of, "i", device);
  if (value == nullptr) return python_error("torch's current stream");
  *stream = PyLong_AsVoidPtr(value);
  Py_DECREF(value);
  return PyErr_Occurred() != nullptr ? python_error("torch's current stream") : Status();
}

Status view_tensors(PyObject* object, const char* what, bool written, Buffer* buffer, DType* dtype,
                    int* device, Layout* layout) {
  TensorView view;
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) {
    PYCOMM_RETURN_IF_ERROR(view_tensor(object, what, written, &view, layout));
    *buffer = Buffer(view.data, view.n_elems);
    *dtype = view.dtype;
    *device = view.device;
    return Status();
  }
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
  if (n == 0) return Status::error(Code::kValue, format("%s is an empty list", what));
  std::vector<Segment> segments;
  segments.reserve(static_cast<size_t>(n));
  *layout = Layout::kPlain;
  for (Py_ssize_t i = 0; i < n; i++) {
    Layout one;
    Status s = view_tensor(PySequence_Fast_GET_ITEM(object, i), what, written, &view, &one);
    if (!s.ok()) return std::move(s).within(format("element %zd", i));
    if (one == Layout::kNeedsStaging) *layout = one;
    if (i == 0) {
      *dtype = view.dtype;
      *device = view.device;
    }
    if (view.device != *device) {
      return Status::error(
          Code::kValue,
          format("%s: element %zd is on %s, element 0 on %s; one call takes tensors on one device", what, i,
                 device_name(view.device).c_str(), device_name(*device).c_str()));
    }
    if (view.dtype != *dtype) {
      return Status::error(Code::kType,
                           format("%s: element %zd is %s, element 0 is %s; one call takes one dtype", what, i,
                                  dtype_name(view.dtype), dtype_name(*dtype)));
    }
    segments.push_back({static_cast<std::byte*>(view.data), view.n_elems});
  }
  *buffer = Buffer(std::move(segments), dtype_size(*dtype));
  return Status();
}

}  // namespace pycomm
