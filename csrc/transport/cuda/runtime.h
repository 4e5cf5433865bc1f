// CUDA's error codes as Status, and the current device of a scope: for host code that calls the runtime.
//
// A CUDA error becomes Code::kSystem with CUDA's name and words for it. Every entry point that calls the
// runtime sets its device first, since the runtime is linked statically and knows nothing of torch's.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "base/status.h"

namespace pycomm {

Status cuda_status(cudaError_t error, const std::string& what);

// Afterwards the thread has the context that it had, or none. CUDA calls of a thread that has none make one
// on device 0, as does cudaSetDevice(0): hundreds of MB there, of every rank. So it is the context that is
// kept, and not the device's number, which is 0 on a thread that has never set one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Status status() const { return status_.clone(); }

 private:
  void* before_ = nullptr;  // the driver's CUcontext
  Status status_;
};

// Tells GPUs apart, and the parts of one that MIG has divided, over all machines.
struct DeviceId {
  unsigned char bytes[16] = {};
  bool operator==(const DeviceId&) const = default;
};
Status device_id(int device, DeviceId* out);

// Whether what the event was recorded behind has ended. Asked for so that it spoils no capture, of whatever
// thread. Not kOk: the device has failed, and nothing on it will end any more.
Status event_passed(int device, cudaEvent_t event, bool* passed);
// The same of all that is on a stream; a failed device is not busy.
bool stream_is_busy(int device, cudaStream_t stream);

}  // namespace pycomm
