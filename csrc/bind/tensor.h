// Tensors at the border: what a torch.Tensor is to the engine, or why it cannot be one.
//
// Memory is the host's or a CUDA device's. Where CUDA is emulated (tests/cuda_on_cpu), all tensors are the
// host's, and PYCOMM_EMULATED_DEVICE says on which device those of collectives are taken to be.
//
// `setup` is called once by the package with torch's classes and, where torch has it, the exchange API. Only
// torch.Tensor and torch.nn.Parameter are taken: a subclass may mean something else by its memory.
#pragma once

#include <Python.h>

#include <cstdint>

#include "base/dtype.h"
#include "base/status.h"
#include "engine/call.h"

namespace pycomm {

namespace dlpack {
struct ExchangeApi;
}

struct TensorView {
  void* data;
  uint64_t n_elems;
  DType dtype;
  int device = -1;  // of CUDA; -1: host memory
};

enum class Layout : uint8_t { kPlain, kNeedsStaging };

void bind_tensor_setup(PyObject* tensor_type, PyObject* parameter_type, PyObject* exchange_api,
                       PyObject* grad_enabled, PyObject* current_stream);

// Fails with kType or kValue, naming `what` ("tensor", "output", …). Sets *layout to kNeedsStaging (and
// leaves the view alone) when the tensor is not contiguous, or is lazily conjugated or negated. `written`
// tensors must not need autograd while it is recording. With a Python error set, the code is kInterrupt.
Status view_tensor(PyObject* tensor, const char* what, bool written, TensorView* view, Layout* layout);

// Spares later calls on a tensor that was found plain the question for its lazy bits, which costs as much as
// a small call. Only small, real ones that are no Parameter: the weak reference that tells whether the object
// at that address is still the same keeps torch.utils.swap_tensors, and so Module.to, from swapping it, and
// `z.data = z.conj()` makes a plain tensor lazy.
void remember_plain(PyObject* tensor, const TensorView& view);

// A tensor, or a list or tuple of tensors of one dtype on one device.
Status view_tensors(PyObject* object, const char* what, bool written, Buffer* buffer, DType* dtype,
                    int* device, Layout* layout);

// The device that host memory stands for where CUDA is emulated and PYCOMM_EMULATED_DEVICE asks for it; else
// -1.
int emulated_device();

// "CPU", "cuda:1"
std::string device_name(int device);
// torch's current stream of the device. With a Python error set, the code is kInterrupt.
Status current_stream(int device, void** stream);

// torch's; null where torch is too old.
const dlpack::ExchangeApi* exchange_api();
// bind/make_tensor.cc: a new tensor over memory that `deleter(context)` frees with the tensor's storage; null
// with a Python error. Without the exchange API a capsule "dltensor", of uint8 where dtype is float8.
PyObject* make_tensor(void* data, const int64_t* shape, int ndim, DType dtype, int device, void* context,
                      void (*deleter)(void*));

}  // namespace pycomm
