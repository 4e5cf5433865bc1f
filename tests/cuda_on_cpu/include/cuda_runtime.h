// Device code for the CPU: what nvcc builds in, as macros and functions over the fibers of block.h.
//
// __shared__ variables live in the thread-local storage of the OS thread that runs the block (so they are not
// reset between blocks, like on a GPU). Warp operations wait for all lanes of their mask. Atomics are
// relaxed, as CUDA's are. Kernels are started by launch(): <<<>>> does not parse in C++.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "block.h"
#include "cuda_runtime_api.h"
#include "grid.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

#define threadIdx (::cuda_on_cpu::current_thread->thread_idx)
#define blockIdx (::cuda_on_cpu::current_thread->block_idx)
#define blockDim (::cuda_on_cpu::current_thread->block_dim)
#define gridDim (::cuda_on_cpu::current_thread->grid_dim)
#define warpSize 32

inline void __syncthreads() { cuda_on_cpu::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_on_cpu::exchange(mask, 0, true); }
inline void __nanosleep(unsigned) { cuda_on_cpu::spin_point(); }

namespace cuda_on_cpu {
// The value of lane `from`, or one's own where that lane takes no part.
template <class T>
T shuffle(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const Exchange all = exchange(mask, bits, false);
  if (from < 32 && (all.lanes >> from & 1)) std::memcpy(&value, &all.values[from], sizeof(T));
  return value;
}
}  // namespace cuda_on_cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const unsigned group = cuda_on_cpu::lane_index() & ~unsigned(width - 1);
  return cuda_on_cpu::shuffle(mask, value, group + (unsigned(from) & unsigned(width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = cuda_on_cpu::lane_index(), from = lane ^ unsigned(bits);
  const bool inside = (from & ~unsigned(width - 1)) <= lane;
  return cuda_on_cpu::shuffle(mask, value, inside ? from : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = cuda_on_cpu::lane_index(), from = lane + delta;
  const bool inside = (from & ~unsigned(width - 1)) == (lane & ~unsigned(width - 1));
  return cuda_on_cpu::shuffle(mask, value, inside ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = cuda_on_cpu::lane_index();
  const bool inside = (lane & unsigned(width - 1)) >= delta;
  return cuda_on_cpu::shuffle(mask, value, inside ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const cuda_on_cpu::Exchange all = cuda_on_cpu::exchange(mask, predicate != 0, false);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if ((all.lanes >> i & 1) && all.values[i] != 0) votes |= 1u << i;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

inline float __uint_as_float(unsigned bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicExch(unsigned* p, unsigned v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned wanted) {
  __atomic_compare_exchange_n(p, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline unsigned atomicMax(unsigned* p, unsigned v) {
  unsigned old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
// ThreadSanitizer does not model fences: order memory with acquire and release operations instead.
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace cuda_on_cpu {

// Arguments are copied at the call, as by a real launch. Resident: the blocks wait for each other or for
// peers, so all of them run at once.
template <class... P, class... A>
cudaError_t launch(bool resident, void (*kernel)(P...), dim3 grid, dim3 block, size_t n_dynamic_bytes,
                   cudaStream_t stream, A&&... arguments) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<std::remove_cv_t<P>...> arguments;
  };
  auto call = std::make_shared<Call>(Call{kernel, {std::forward<A>(arguments)...}});
  return enqueue_grid({grid, block, n_dynamic_bytes}, resident, stream, call, [](void* c) {
    std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->arguments);
  });
}

}  // namespace cuda_on_cpu
