// What this process has of CUDA.
#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels.h"

namespace pycomm::cuda {

// Any error means none: without a driver CUDA returns cudaErrorInsufficientDriver and leaves the count alone.
int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  (void)cudaGetLastError();  // or the next launch would report it
  return 0;
}

Status on_device(int device, Stream stream, const std::function<Status()>& enqueue) {
  int before = -1;
  cudaError_t e = cudaGetDevice(&before);
  if (e == cudaSuccess) e = cudaSetDevice(device);
  if (e != cudaSuccess) {
    (void)cudaGetLastError();
    return Status::error(Code::kSystem, format("cuda:%d: %s", device, cudaGetErrorString(e)));
  }
  Status s = enqueue();
#if defined(PYCOMM_CUDA_EMULATED)
  if (s.ok() && (e = cudaStreamSynchronize(stream)) != cudaSuccess)
    s = Status::error(Code::kSystem, format("cuda:%d: %s", device, cudaGetErrorString(e)));
#else
  (void)stream;
#endif
  (void)cudaSetDevice(before);
  return s;
}

}  // namespace pycomm::cuda
