// Tensors of torch's over memory of ours.
//
// Through torch's exchange API where it has one; else as a capsule "dltensor" of DLPack's first form, for
// torch.utils.dlpack.from_dlpack, which reads the versioned form only since torch 2.9. Older ones do not know
// float8 there either: such a capsule is of uint8, and whoever takes it views it as what it is.
#include <algorithm>
#include <vector>

#include "bind/dlpack.h"
#include "bind/tensor.h"

namespace pycomm {

namespace {

dlpack::DataType dlpack_of(DType t) {
  const auto bits = static_cast<uint8_t>(8 * dtype_size(t));
  switch (t) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kFloat16: return {dlpack::kFloat, bits, 1};
    case DType::kBFloat16: return {dlpack::kBfloat, bits, 1};
    case DType::kFloat8E4M3: return {dlpack::kFloat8E4M3FN, bits, 1};
    case DType::kFloat8E5M2: return {dlpack::kFloat8E5M2, bits, 1};
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64: return {dlpack::kInt, bits, 1};
    case DType::kUInt8: return {dlpack::kUInt, bits, 1};
    case DType::kBool: return {dlpack::kBool, bits, 1};
    case DType::kComplex64:
    case DType::kComplex128: return {dlpack::kComplex, bits, 1};
  }
  return {};
}

struct Shaped {
  std::vector<int64_t> shape, strides;
  void* context = nullptr;
  void (*deleter)(void*) = nullptr;

  dlpack::Tensor over(void* data, dlpack::Device where, dlpack::DataType type) {
    return {data, where, static_cast<int32_t>(shape.size()), type, shape.data(), strides.data(), 0};
  }
};

// T: one of DLPack's two.
template <class T>
struct Managed : Shaped {
  explicit Managed(Shaped shaped) : Shaped(std::move(shaped)) {
    tensor.manager_ctx = this;
    tensor.deleter = [](T* t) {
      auto* self = static_cast<Managed*>(t->manager_ctx);
      self->Shaped::deleter(self->context);
      delete self;
    };
  }
  T tensor{};
};

// Whoever takes the tensor out of a capsule gives the capsule another name.
void drop_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* const t = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  t->deleter(t);
}

}  // namespace

PyObject* make_tensor(void* data, const int64_t* shape, int ndim, DType dtype, int device, void* context,
                      void (*deleter)(void*)) {
  const bool on_host = device < 0 || emulated_device() >= 0;
  const dlpack::Device where =
      on_host ? dlpack::Device{dlpack::kCpu, 0} : dlpack::Device{dlpack::kCuda, device};
  Shaped shaped{{shape, shape + ndim}, std::vector<int64_t>(static_cast<size_t>(ndim), 1), context, deleter};
  for (int i = ndim - 2; i >= 0; i--) {
    const auto next = static_cast<size_t>(i) + 1;
    shaped.strides[next - 1] = shaped.strides[next] * std::max<int64_t>(1, shaped.shape[next]);
  }
  const dlpack::ExchangeApi* const api = exchange_api();
  if (api == nullptr) {
    dlpack::DataType type = dlpack_of(dtype);
    if (type.code == dlpack::kFloat8E4M3FN || type.code == dlpack::kFloat8E5M2) type.code = dlpack::kUInt;
    auto* const m = new Managed<dlpack::ManagedTensor>(std::move(shaped));
    m->tensor.dl_tensor = m->over(data, where, type);
    PyObject* const capsule = PyCapsule_New(&m->tensor, "dltensor", &drop_capsule);
    if (capsule == nullptr) m->tensor.deleter(&m->tensor);
    return capsule;
  }
  auto* const m = new Managed<dlpack::ManagedTensorVersioned>(std::move(shaped));
  m->tensor.version = {1, 0};
  m->tensor.dl_tensor = m->over(data, where, dlpack_of(dtype));
  void* out = nullptr;
  if (api->managed_tensor_to_py_object_no_sync(&m->tensor, &out) != 0) {
    if (PyErr_Occurred() == nullptr)
      PyErr_SetString(PyExc_RuntimeError, "torch could not make a tensor of arena memory");
    return nullptr;
  }
  return static_cast<PyObject*>(out);
}

}  // namespace pycomm
