// CUDA's error codes as Status, and the current device of a scope: for host code that calls the runtime.
//
// A CUDA error becomes Code::kSystem with CUDA's name and words for it. Every entry point that calls the
// runtime sets its device first, since the runtime is linked statically and knows nothing of torch's.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "base/status.h"

namespace pycomm {

inline Status cuda_status(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // or the next launch would report it
  return Status::error(Code::kSystem,
                       what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    status_ = cuda_status(cudaSetDevice(device), format("cudaSetDevice(%d)", device));
  }
  ~DeviceGuard() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Status status() const { return status_.clone(); }

 private:
  int before_ = -1;
  Status status_;
};

}  // namespace pycomm
