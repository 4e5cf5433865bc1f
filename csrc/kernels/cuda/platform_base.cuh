// The headers and the few words that all device code starts from; platform.cuh is what it includes.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define PYCOMM_DEVICE __device__ __forceinline__
#define PYCOMM_DEVICE_CALL static __device__ __noinline__  // what many kernels of a file do once
#if defined(PYCOMM_CUDA_EMULATED)
#define PYCOMM_UNROLL  // on the CPU only the time to compile would grow
#define PYCOMM_NO_UNROLL
#else
#define PYCOMM_UNROLL _Pragma("unroll")
#define PYCOMM_NO_UNROLL _Pragma("unroll 1")
#endif
