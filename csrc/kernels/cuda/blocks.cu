// Numbers of 8 or 16 bits that share a scale block by block: kernels/blocks.h on the GPU, with the same bits.
//
// A thread does 16 elements, which lie in one block of 256; half a warp finds a block's maximum (as an
// unsigned integer: the order of |x| is that of its bits, and a NaN is the largest). Sixteen elements that
// are whole and aligned move as packs, others one by one. Cost: one read and one write per element and step.
#include "kernels/blocks.h"
#include "kernels/cuda/chunks.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kLaneElems = 16;
constexpr int kBlockLanes = static_cast<int>(kBlockElems) / kLaneElems;
static_assert(kBlockLanes == 16);
constexpr size_t kGridElems = kThreads * kLaneElems;  // what one block of threads does in a turn

struct Scale {
  float multiplier, inverse;
};

// 2^(kTarget - 1) <= M m < 2^kTarget, m a power of two; m and 1/m stay normal.
template <int kTarget>
PYCOMM_DEVICE Scale power_of_two_scale(float maximum) {
  const int exponent = static_cast<int>(__float_as_uint(maximum) >> 23) - 126;  // M < 2^exponent
  int shift = kTarget - exponent;
  shift = shift > 126 ? 126 : shift < -126 ? -126 : shift;
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

struct BlockInt8 {
  using Store = uint8_t;
  using Acc = float;
  using LaneStore = uint8_t;
  static PYCOMM_DEVICE Acc decode(Store v) { return static_cast<float>(static_cast<int8_t>(v)); }
  // Rounded to nearest by adding 1.5 * 2^23, whose last bit is 1; codes are in [-127, 127].
  static PYCOMM_DEVICE Store encode(Acc v) {
    return static_cast<Store>(__float_as_uint(v + 12582912.0f) & 0xff);
  }
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return {127.0f / maximum, maximum / 127.0f}; }
};
struct BlockFloat8 : Float8E4M3 {
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return power_of_two_scale<8>(maximum); }
};
struct BlockFloat16 : Float16 {
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return power_of_two_scale<15>(maximum); }
};
struct BlockBFloat16 : BFloat16 {
  static PYCOMM_DEVICE Scale scale_of(float maximum) { return power_of_two_scale<0>(maximum); }
};

// A multiplier of 0 when the block is not finite (its inverse NaN) or vanishes (0).
template <class F>
PYCOMM_DEVICE Scale block_scale(float maximum) {
  constexpr float kVanishes = 7.888609052210118e-31f;  // 2^-100
  const bool vanishes = maximum < kVanishes;
  constexpr float kOverflows = 1.7014118346046923e38f;  // 2^127
  if (!vanishes && maximum < kOverflows) return F::scale_of(maximum);
  return {0.0f, vanishes ? 0.0f : __uint_as_float(0x7fc00000u)};
}

// 16 elements from src on, decoded; beyond n_left zeros.
template <class F>
PYCOMM_DEVICE void load_lane(const typename F::Store* src, size_t n_left, float (&v)[kLaneElems]) {
  if (n_left >= kLaneElems && reinterpret_cast<uintptr_t>(src) % kPackBytes == 0) {
    PYCOMM_UNROLL
    for (int i = 0; i < kLaneElems / kElems<F>; ++i) {
      const Lanes<F> lanes = decode_pack<F>(load_pack(src + i * kElems<F>));
      PYCOMM_UNROLL
      for (int j = 0; j < kLanes<F>; ++j) v[i * kLanes<F> + j] = lanes.v[j];
    }
  } else {
    PYCOMM_UNROLL
    for (int i = 0; i < kLaneElems; ++i) {
      v[i] = static_cast<size_t>(i) < n_left ? F::decode(load_element<typename F::Store>(src + i)) : 0.0f;
    }
  }
}

template <class F>
PYCOMM_DEVICE void store_lane(typename F::Store* dst, size_t n_left, const float (&v)[kLaneElems]) {
  if (n_left >= kLaneElems && reinterpret_cast<uintptr_t>(dst) % kPackBytes == 0) {
    PYCOMM_UNROLL
    for (int i = 0; i < kLaneElems / kElems<F>; ++i) {
      Lanes<F> lanes;
      PYCOMM_UNROLL
      for (int j = 0; j < kLanes<F>; ++j) lanes.v[j] = v[i * kLanes<F> + j];
      store_pack(dst + i * kElems<F>, encode_pack<F>(lanes));
    }
  } else {
    PYCOMM_UNROLL
    for (int i = 0; i < kLaneElems; ++i) {
      if (static_cast<size_t>(i) < n_left) store_element<typename F::Store>(dst + i, F::encode(v[i]));
    }
  }
}

using F32 = Plain<float>;

// The first element of this thread, and the step to its next 16.
PYCOMM_DEVICE size_t first_element() {
  return (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * kLaneElems;
}
PYCOMM_DEVICE size_t grid_step() { return static_cast<size_t>(gridDim.x) * kGridElems; }

__global__ void __launch_bounds__(kThreads, 4)
    block_maxima_kernel(const float* src, size_t n, float* maxima) {
  // All threads stay until the last block is done: the lanes of a warp shuffle together.
  const size_t last = (n + kGridElems - 1) / kGridElems * kGridElems;
  for (size_t at = first_element(); at < last; at += grid_step()) {
    float x[kLaneElems];
    load_lane<F32>(src + (at < n ? at : 0), at < n ? n - at : 0, x);
    uint32_t largest = 0;
    PYCOMM_UNROLL
    for (const float v : x) {
      const uint32_t magnitude = __float_as_uint(v) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    PYCOMM_UNROLL
    for (int bits = kBlockLanes / 2; bits > 0; bits /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, bits);
      largest = other > largest ? other : largest;
    }
    if (largest > 0x7f800000u) largest = 0x7f800000u;  // NaN counts as infinity
    if (threadIdx.x % kBlockLanes == 0 && at < n) maxima[at / kBlockElems] = __uint_as_float(largest);
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_kernel(typename F::Store* codes, float* src, size_t n, const float* maxima, bool feedback) {
  for (size_t at = first_element(); at < n; at += grid_step()) {
    const Scale s = block_scale<F>(maxima[at / kBlockElems]);
    float x[kLaneElems], scaled[kLaneElems];
    load_lane<F32>(src + at, n - at, x);
    PYCOMM_UNROLL
    for (int i = 0; i < kLaneElems; ++i) scaled[i] = s.multiplier == 0.0f ? 0.0f : x[i] * s.multiplier;
    store_lane<F>(codes + at, n - at, scaled);
    if (!feedback) continue;
    const bool not_finite = s.inverse != s.inverse;
    PYCOMM_UNROLL
    for (int i = 0; i < kLaneElems; ++i) {
      const float lost = s.multiplier == 0.0f ? x[i] : x[i] - F::decode(F::encode(scaled[i])) * s.inverse;
      x[i] = not_finite ? 0.0f : lost;
    }
    store_lane<F32>(src + at, n - at, x);
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads, 4)
    dequantize_kernel(float* dst, const typename F::Store* codes, size_t n, const float* maxima) {
  for (size_t at = first_element(); at < n; at += grid_step()) {
    const float inverse = block_scale<F>(maxima[at / kBlockElems]).inverse;
    float v[kLaneElems];
    load_lane<F>(codes + at, n - at, v);
    PYCOMM_UNROLL
    for (float& x : v) x *= inverse;
    store_lane<F32>(dst + at, n - at, v);
  }
}

// ---- on the host

Status grid_for(size_t n_elems, unsigned* n_blocks) {
  const size_t n = (n_elems + kGridElems - 1) / kGridElems;
  return blocks_for(static_cast<uint32_t>(std::min<size_t>(n, 0xffffffffu)), n_blocks);
}

// fn<F>(n_blocks) for the format of the codes, unless there is nothing to do.
template <class Fn>
Status with_format(const char* what, DType code, size_t n_elems, const float* maxima, const Fn& fn) {
  if (!cuda::blocks_supported(code)) {
    return Status::error(
        Code::kValue, format("cuda %s: codes of %s; expected int8, float8_e4m3fn, float16 or bfloat16", what,
                             dtype_name(code)));
  }
  if (reinterpret_cast<uintptr_t>(maxima) % alignof(float) != 0) {
    return Status::error(Code::kValue, format("cuda %s: maxima must be aligned to 4 bytes", what));
  }
  if (n_elems == 0) return {};
  unsigned n_blocks = 0;
  PYCOMM_RETURN_IF_ERROR(grid_for(n_elems, &n_blocks));
  const cudaError_t error = code == DType::kInt8         ? fn.template operator()<BlockInt8>(n_blocks)
                            : code == DType::kFloat8E4M3 ? fn.template operator()<BlockFloat8>(n_blocks)
                            : code == DType::kFloat16    ? fn.template operator()<BlockFloat16>(n_blocks)
                                                         : fn.template operator()<BlockBFloat16>(n_blocks);
  return check_cuda(error, format("cuda %s: %s", what, dtype_name(code)));
}

}  // namespace

bool blocks_supported(DType code) {
  return code == DType::kInt8 || code == DType::kFloat8E4M3 || code == DType::kFloat16 ||
         code == DType::kBFloat16;
}

Status block_maxima(const float* src, size_t n_elems, float* maxima, Stream stream) {
  if (reinterpret_cast<uintptr_t>(maxima) % alignof(float) != 0) {
    return Status::error(Code::kValue, "cuda block_maxima: maxima must be aligned to 4 bytes");
  }
  if (n_elems == 0) return {};
  unsigned n_blocks = 0;
  PYCOMM_RETURN_IF_ERROR(grid_for(n_elems, &n_blocks));
  return check_cuda(launch(block_maxima_kernel, n_blocks, kThreads, stream, src, n_elems, maxima),
                    "cuda block_maxima");
}

Status quantize(DType code, void* codes, float* src, size_t n_elems, const float* maxima, bool feedback,
                Stream stream) {
  return with_format("quantize", code, n_elems, maxima, [&]<class F>(unsigned n_blocks) {
    return launch(quantize_kernel<F>, n_blocks, kThreads, stream, static_cast<typename F::Store*>(codes), src,
                  n_elems, maxima, feedback);
  });
}

Status dequantize(DType code, float* dst, const void* codes, size_t n_elems, const float* maxima,
                  Stream stream) {
  return with_format("dequantize", code, n_elems, maxima, [&]<class F>(unsigned n_blocks) {
    return launch(dequantize_kernel<F>, n_blocks, kThreads, stream, dst,
                  static_cast<const typename F::Store*>(codes), n_elems, maxima);
  });
}

}  // namespace pycomm::cuda
