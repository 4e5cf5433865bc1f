#include "transport/cuda/device_memory.h"

#include <atomic>

#include "transport/cuda/peer_memory.h"
#include "transport/cuda/runtime.h"

namespace pycomm {

namespace {
std::atomic<void (*)()> free_torchs{nullptr};
}

void set_free_cached(void (*free_cached)()) { free_torchs.store(free_cached); }

Status device_malloc(int device, size_t wanted, size_t least, const std::string& what, void** p,
                     size_t* got) {
  cudaError_t error = cudaMalloc(p, *got = wanted);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    PeerMemory::free_retired(device);
    if (void (*const free_cached)() = free_torchs.load()) free_cached();
    error = cudaMalloc(p, *got = least);
    if (error == cudaErrorMemoryAllocation) (void)cudaGetLastError();
  }
  return cuda_status(error, format("cudaMalloc of %zu bytes of %s on CUDA device %d, beside what torch and "
                                   "others use",
                                   *got, what.c_str(), device));
}

}  // namespace pycomm
