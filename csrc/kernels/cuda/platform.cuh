// The one place where device code differs between nvcc and the CPU shim (tests/cuda_on_cpu).
//
// launch(): a kernel on a stream; <<<>>> does not parse in C++. Conversions of elements: instructions of the
// GPU where it has them, integer arithmetic (small_float.cuh) where it has not, which is what the shim runs;
// both give the same bits (NaN payloads aside). Words that other GPUs or the host read and write meanwhile:
// loads and stores of system scope. Everything here is one instruction or one call: what is longer belongs
// elsewhere, where the shim executes it.
#pragma once

#include <tuple>
#include <utility>

#include "kernels/cuda/platform_base.cuh"
#include "kernels/cuda/small_float.cuh"

#if !defined(PYCOMM_CUDA_EMULATED)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace pycomm::cuda {

#if defined(PYCOMM_CUDA_EMULATED)

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), unsigned n_blocks, unsigned n_threads, cudaStream_t stream,
                   A&&... arguments) {
  return cuda_on_cpu::launch(false, kernel, dim3(n_blocks), dim3(n_threads), 0, stream,
                             std::forward<A>(arguments)...);
}

template <class... P, class... A>
cudaError_t launch_resident(void (*kernel)(P...), unsigned n_blocks, unsigned n_threads, cudaStream_t stream,
                            A&&... arguments) {
  return cuda_on_cpu::launch(true, kernel, dim3(n_blocks), dim3(n_threads), 0, stream,
                             std::forward<A>(arguments)...);
}

#else

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), unsigned n_blocks, unsigned n_threads, cudaStream_t stream,
                   A&&... arguments) {
  std::tuple<std::remove_cv_t<P>...> copies(std::forward<A>(arguments)...);
  return std::apply(
      [&](auto&... each) {
        void* pointers[] = {static_cast<void*>(&each)...};
        return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(n_blocks), dim3(n_threads),
                                pointers, 0, stream);
      },
      copies);
}

// Blocks that wait for others: all of them must find room at once, so the caller launches no more than the
// device has multiprocessors.
template <class... P, class... A>
cudaError_t launch_resident(void (*kernel)(P...), unsigned n_blocks, unsigned n_threads, cudaStream_t stream,
                            A&&... arguments) {
  return launch(kernel, n_blocks, n_threads, stream, std::forward<A>(arguments)...);
}

#endif

// ---- words that others read and write meanwhile: peers' kernels, the host

PYCOMM_DEVICE uint64_t load_acquire_system(const uint64_t* p) {
#if defined(PYCOMM_CUDA_EMULATED)
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#else
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
#endif
}

PYCOMM_DEVICE void store_release_system(uint64_t* p, uint64_t v) {
#if defined(PYCOMM_CUDA_EMULATED)
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
#else
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#endif
}

PYCOMM_DEVICE uint64_t load_relaxed_system(const uint64_t* p) {
#if defined(PYCOMM_CUDA_EMULATED)
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#else
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
#endif
}

PYCOMM_DEVICE void store_relaxed_system(uint64_t* p, uint64_t v) {
#if defined(PYCOMM_CUDA_EMULATED)
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
#else
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#endif
}

// Between two polls of such a word: at once at first, since a peer is usually there within microseconds.
PYCOMM_DEVICE void pause_polling([[maybe_unused]] uint32_t n_polls) {
#if defined(PYCOMM_CUDA_EMULATED)
  cuda_on_cpu::spin_point();
#else
  if (n_polls > 1000) __nanosleep(100);
#endif
}

// A GPU faults on a misaligned access of 16 bytes; most CPUs do not.
PYCOMM_DEVICE void require_aligned_16([[maybe_unused]] const void* p) {
#if defined(PYCOMM_CUDA_EMULATED)
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) cuda_on_cpu::fail("a misaligned access of 16 bytes");
#endif
}

PYCOMM_DEVICE float float_from_half(uint16_t code) {
#if defined(PYCOMM_CUDA_EMULATED)
  return decode_small<5, 10, 0x7e00>(code);
#else
  return __half2float(__ushort_as_half(code));
#endif
}

PYCOMM_DEVICE uint16_t half_from_float(float v) {
#if defined(PYCOMM_CUDA_EMULATED)
  return static_cast<uint16_t>(encode_small<5, 10, 0x7e00>(v));
#else
  return __half_as_ushort(__float2half_rn(v));
#endif
}

PYCOMM_DEVICE uint16_t bfloat16_from_float(float v) {
#if defined(PYCOMM_CUDA_EMULATED)
  const uint32_t bits = __float_as_uint(v);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(v != v ? (bits >> 16) | 0x40 : rounded);
#else
  return __bfloat16_as_ushort(__float2bfloat16_rn(v));
#endif
}

PYCOMM_DEVICE float float_from_e4m3(uint8_t code) {
#if !defined(PYCOMM_CUDA_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
#else
  return decode_small<4, 3, 0x7f>(code);
#endif
}

PYCOMM_DEVICE uint8_t e4m3_from_float(float v) {
#if !defined(PYCOMM_CUDA_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
#else
  return static_cast<uint8_t>(encode_small<4, 3, 0x7f>(v));
#endif
}

}  // namespace pycomm::cuda
