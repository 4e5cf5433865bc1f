// Our own declarations of what we use of DLPack 1.x and its C exchange API, so that the build needs no torch.
//
// torch >= 2.10 hands out a table of function pointers in the capsule torch.Tensor.__dlpack_c_exchange_api__;
// through it a tensor's address, shape, dtype and device cost tens of nanoseconds. The layout is checked
// against torch's own header by tests/python/test_dlpack.py. Source: the DLPack specification, version 1.3.
#pragma once

#include <cstdint>

namespace pycomm::dlpack {

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t device_type;
  int32_t device_id;
};
inline constexpr int32_t kCpu = 1;
inline constexpr int32_t kCuda = 2;
inline constexpr int32_t kCudaHost = 3;

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
inline constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6,
                         kFloat8E4M3FN = 10, kFloat8E5M2 = 12;

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ManagedTensor {  // before DLPack 1.0
  Tensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
};

struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor dl_tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  int (*managed_tensor_to_py_object_no_sync)(ManagedTensorVersioned* tensor, void** out);
  int (*dltensor_from_py_object_no_sync)(void* object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace pycomm::dlpack
