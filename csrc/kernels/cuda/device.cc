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

}  // namespace pycomm::cuda
