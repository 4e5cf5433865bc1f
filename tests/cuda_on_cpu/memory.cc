// Device memory, pinned host memory, copies, and handles for other processes.
//
// Device memory is a memfd, so that another process can map it through a handle (process id and descriptor);
// it is gone with the last process that maps it. New memory holds 0xa5 in every byte. Behind the last byte
// lie at least 64 guard bytes, which AddressSanitizer watches and cudaFree checks: a kernel that writes over
// the end ends the process with a message. Freed memory is unmapped, so a late access is a segmentation
// fault. Who opens a handle holds a lock on the memfd until it is closed, or the process ends: freeing what
// another process has open ends this one with a message. Copies check that the kind fits the pointers, which
// a GPU with unified addressing does not.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "graph.h"
#include "grid.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_on_cpu {
namespace {

constexpr size_t kGuardBytes = 64;
constexpr size_t kPageBytes = 4096;
constexpr size_t kDeviceBytes = size_t{64} << 30;
constexpr unsigned char kFresh = 0xa5, kGuard = 0xfd;

enum class Kind { kDevice, kPeer, kHost, kRegistered };

struct Allocation {
  size_t n_bytes, n_mapped;
  int fd;
  Kind kind;
  int device;
};

struct Memory {
  std::mutex mutex;
  std::map<char*, Allocation> all;

  // The allocation that holds p, or end().
  std::map<char*, Allocation>::iterator find(const void* p) {
    char* at = static_cast<char*>(const_cast<void*>(p));
    auto it = all.upper_bound(at);
    if (it == all.begin()) return all.end();
    --it;
    return at < it->first + it->second.n_bytes || at == it->first ? it : all.end();
  }
};
Memory& memory() {
  static Memory* const all = new Memory;
  return *all;
}

void watch_guard(char* p, const Allocation& a, bool on) {
  char* guard = p + a.n_bytes;
  const size_t n = a.n_mapped - a.n_bytes;
#if defined(__SANITIZE_ADDRESS__)
  if (!on) __asan_unpoison_memory_region(guard, n);
#endif
  if (on) {
    std::memset(guard, kGuard, n);
  } else {
    for (size_t i = 0; i < n; ++i) {
      if (static_cast<unsigned char>(guard[i]) == kGuard) continue;
      std::fprintf(stderr, "cuda_on_cpu: device memory was written %zu bytes behind the end of %zu bytes\n",
                   i, a.n_bytes);
      std::abort();
    }
  }
#if defined(__SANITIZE_ADDRESS__)
  if (on) __asan_poison_memory_region(guard, n);
#endif
}

// What an IPC handle holds.
struct Handle {
  uint32_t magic;
  int pid, fd, device, bus;
  uint64_t n_bytes, n_mapped;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));
constexpr uint32_t kMagic = 0x63756461;

cudaError_t check_copy(const void* dst, const void* src, size_t n_bytes, cudaMemcpyKind kind) {
  if (n_bytes == 0) return cudaSuccess;
  if (dst == nullptr || src == nullptr) return cudaErrorInvalidValue;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto on_device = [&](const void* p, cudaError_t* error) {
    const auto it = m.find(p);
    if (it == m.all.end()) return false;
    const size_t at = static_cast<size_t>(static_cast<const char*>(p) - it->first);
    if (at + n_bytes > it->second.n_bytes) *error = cudaErrorInvalidValue;
    return it->second.kind == Kind::kDevice || it->second.kind == Kind::kPeer;
  };
  cudaError_t error = cudaSuccess;
  const bool to_device = on_device(dst, &error), from_device = on_device(src, &error);
  if (error != cudaSuccess) return error;
  switch (kind) {
    case cudaMemcpyDefault: return cudaSuccess;
    case cudaMemcpyHostToHost: return to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyHostToDevice: return !to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDeviceToHost: return to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
    case cudaMemcpyDeviceToDevice: return !to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
  }
  return cudaErrorInvalidMemcpyDirection;
}

cudaError_t free_allocation(void* p, Kind kind) {
  if (p == nullptr) return cudaSuccess;
  const cudaError_t refused = check_unsafe_call();
  if (refused != cudaSuccess) return report(refused);
  synchronize_device();  // as cudaFree does
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto it = m.all.find(static_cast<char*>(p));
  if (it == m.all.end() || it->second.kind != kind) return report(cudaErrorInvalidValue);
  const Allocation a = it->second;
  if (kind == Kind::kDevice && flock(a.fd, LOCK_EX | LOCK_NB) != 0) {
    std::fprintf(stderr, "cuda_on_cpu: cudaFree of %zu bytes that another process has open\n", a.n_bytes);
    std::abort();
  }
  m.all.erase(it);
  if (kind == Kind::kDevice || kind == Kind::kHost) watch_guard(static_cast<char*>(p), a, false);
  if (kind != Kind::kRegistered) munmap(p, a.n_mapped);
  if (a.fd >= 0) close(a.fd);
  return cudaSuccess;
}

cudaError_t allocate(void** p, size_t n_bytes, Kind kind) {
  *p = nullptr;
  need_context();
  const cudaError_t refused = check_unsafe_call();
  if (refused != cudaSuccess) return report(refused);
  const size_t n_mapped = (n_bytes + kGuardBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (n_mapped < n_bytes) return report(cudaErrorMemoryAllocation);
  const int fd = memfd_create("cuda_on_cpu", MFD_CLOEXEC);
  if (fd < 0) return report(cudaErrorMemoryAllocation);
  if (ftruncate(fd, static_cast<off_t>(n_mapped)) != 0 ||
      posix_fallocate(fd, 0, static_cast<off_t>(n_mapped)) != 0) {
    close(fd);
    return report(cudaErrorMemoryAllocation);
  }
  void* at = mmap(nullptr, n_mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    close(fd);
    return report(cudaErrorMemoryAllocation);
  }
  std::memset(at, kFresh, n_bytes);
  const Allocation a{n_bytes, n_mapped, fd, kind, current_device()};
  watch_guard(static_cast<char*>(at), a, true);
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  m.all[static_cast<char*>(at)] = a;
  *p = at;
  return cudaSuccess;
}

}  // namespace
}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaMemGetInfo(size_t* n_free, size_t* n_total) {
  need_context();
  const char* const text = std::getenv("CUDA_ON_CPU_MEMORY");
  *n_total = text != nullptr ? std::strtoull(text, nullptr, 10) : kDeviceBytes;
  size_t n_used = 0;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  for (const auto& [p, a] : m.all) {
    if (a.kind == Kind::kDevice && a.device == current_device()) n_used += a.n_bytes;
  }
  *n_free = *n_total - std::min(*n_total, n_used);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t n_bytes) {
  *p = nullptr;
  if (n_bytes == 0) return cudaSuccess;
  int device = -1;
  size_t most = 0;
  const char* const limit = std::getenv("CUDA_ON_CPU_LARGEST");
  if (limit != nullptr && std::sscanf(limit, "%d:%zu", &device, &most) == 2 && device == current_device() &&
      n_bytes > most) {
    return report(cudaErrorMemoryAllocation);
  }
  size_t n_free = 0, n_total = 0;
  (void)cudaMemGetInfo(&n_free, &n_total);
  if (n_bytes > n_free) return report(cudaErrorMemoryAllocation);
  return allocate(p, n_bytes, Kind::kDevice);
}
cudaError_t cudaFree(void* p) { return free_allocation(p, Kind::kDevice); }

cudaError_t cudaHostAlloc(void** p, size_t n_bytes, unsigned int) {
  return allocate(p, n_bytes, Kind::kHost);
}
cudaError_t cudaMallocHost(void** p, size_t n_bytes) { return allocate(p, n_bytes, Kind::kHost); }
cudaError_t cudaFreeHost(void* p) { return free_allocation(p, Kind::kHost); }

cudaError_t cudaHostRegister(void* p, size_t n_bytes, unsigned int) {
  need_context();
  const cudaError_t refused = check_unsafe_call();
  if (refused != cudaSuccess) return report(refused);
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  if (p == nullptr || n_bytes == 0 || m.find(p) != m.all.end()) return report(cudaErrorInvalidValue);
  m.all[static_cast<char*>(p)] = {n_bytes, n_bytes, -1, Kind::kRegistered, current_device()};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) { return free_allocation(p, Kind::kRegistered); }

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto it = m.find(host);
  if (it == m.all.end() || (it->second.kind != Kind::kHost && it->second.kind != Kind::kRegistered)) {
    return report(cudaErrorInvalidValue);
  }
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto it = m.find(p);
  void* at = const_cast<void*>(p);
  *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, at};
  if (it == m.all.end()) return cudaSuccess;
  const bool on_device = it->second.kind == Kind::kDevice || it->second.kind == Kind::kPeer;
  *attributes = {on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost, it->second.device, at,
                 on_device ? nullptr : at};
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const cudaError_t error = check_copy(dst, src, n_bytes, kind);
  if (error != cudaSuccess) return report(error);
  return report(enqueue(stream, [=] { std::memmove(dst, src, n_bytes); }));
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t n_bytes, cudaMemcpyKind kind) {
  const cudaError_t refused = check_synchronous_copy();
  if (refused != cudaSuccess) return report(refused);
  const cudaError_t error = cudaMemcpyAsync(dst, src, n_bytes, kind, nullptr);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* dst, int value, size_t n_bytes, cudaStream_t stream) {
  return report(enqueue(stream, [=] { std::memset(dst, value, n_bytes); }));
}
cudaError_t cudaMemset(void* dst, int value, size_t n_bytes) {
  const cudaError_t refused = check_synchronous_copy();
  if (refused != cudaSuccess) return report(refused);
  const cudaError_t error = cudaMemsetAsync(dst, value, n_bytes, nullptr);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}

// The handle is that of the whole allocation, wherever in it p points; opening gives its first byte.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* p) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto it = m.find(p);
  if (it == m.all.end() || it->second.kind != Kind::kDevice) return report(cudaErrorInvalidValue);
  const Allocation& a = it->second;
  const Handle h{kMagic, getpid(), a.fd, a.device, bus_of(a.device), a.n_bytes, a.n_mapped};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &h, sizeof h);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t handle, unsigned int) {
  need_context();
  const cudaError_t refused = check_unsafe_call();
  if (refused != cudaSuccess) return report(refused);
  Handle h;
  std::memcpy(&h, &handle, sizeof h);
  if (h.magic != kMagic) return report(cudaErrorInvalidResourceHandle);
  if (h.pid == getpid()) return report(cudaErrorDeviceUninitialized);  // as on a GPU
  if (h.bus != bus_of(current_device()) && !devices_reach_each_other()) {
    return report(cudaErrorPeerAccessUnsupported);
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return report(cudaErrorMapBufferObjectFailed);
  const bool broken = std::getenv("CUDA_ON_CPU_PEER_BROKEN") != nullptr;
  void* at = mmap(nullptr, h.n_mapped, PROT_READ | PROT_WRITE,
                  broken ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, broken ? -1 : fd, 0);
  if (at == MAP_FAILED || flock(fd, LOCK_SH) != 0) {  // until it is closed, or the process ends
    close(fd);
    return report(cudaErrorMapBufferObjectFailed);
  }
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  m.all[static_cast<char*>(at)] = {h.n_bytes, h.n_mapped, fd, Kind::kPeer, h.device};
  *p = at;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* p) { return free_allocation(p, Kind::kPeer); }

}  // extern "C"
