// Formats: how the elements of a dtype become numbers to compute with, and back. The words are those of
// kernels/convert.h: Store lies in memory, Acc is computed with, decode and encode go between the two.
//
// A Pack is 16 bytes, the unit of the fast paths; Lanes are what it decodes to. kLanes is 16 / sizeof(Store),
// except for Bits, whose packs are taken as four 32-bit words. Loads and stores of packs need alignment to
// 16; those of single elements none.
#pragma once

#include <type_traits>

#include "kernels/cuda/platform.cuh"

namespace pycomm::cuda {

constexpr int kPackBytes = 16;

struct alignas(16) Pack {
  uint32_t word[4];
};

PYCOMM_DEVICE Pack load_pack(const void* p) {
  require_aligned_16(p);
  const uint4 v = *static_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
PYCOMM_DEVICE void store_pack(void* p, const Pack& v) {
  require_aligned_16(p);
  *static_cast<uint4*>(p) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

template <class S>
PYCOMM_DEVICE S load_element(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(S) == 0) return *static_cast<const S*>(p);
  S v;
  for (size_t i = 0; i < sizeof(S); ++i) {
    reinterpret_cast<unsigned char*>(&v)[i] = static_cast<const unsigned char*>(p)[i];
  }
  return v;
}
template <class S>
PYCOMM_DEVICE void store_element(void* p, S v) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(S) == 0) {
    *static_cast<S*>(p) = v;
    return;
  }
  for (size_t i = 0; i < sizeof(S); ++i) {
    static_cast<unsigned char*>(p)[i] = reinterpret_cast<const unsigned char*>(&v)[i];
  }
}

// T is a machine type; A, if another, is wider.
template <class T, class A = T>
struct Plain {
  using Store = T;
  using Acc = A;
  using LaneStore = T;
  static PYCOMM_DEVICE A decode(T v) { return static_cast<A>(v); }
  static PYCOMM_DEVICE T encode(A v) { return static_cast<T>(v); }
};

// Any nonzero byte is true; results are 0 or 1.
struct Bool {
  using Store = uint8_t;
  using Acc = uint32_t;
  using LaneStore = uint8_t;
  static PYCOMM_DEVICE Acc decode(Store v) { return v != 0; }
  static PYCOMM_DEVICE Store encode(Acc v) { return static_cast<Store>(v); }
};

// Bytes of any dtype, for bitwise operations and copies.
struct Bits {
  using Store = uint8_t;
  using Acc = uint32_t;
  using LaneStore = uint32_t;
  static PYCOMM_DEVICE Acc decode(uint32_t v) { return v; }
  static PYCOMM_DEVICE uint32_t encode(Acc v) { return v; }
};

struct Float16 {
  using Store = uint16_t;
  using Acc = float;
  using LaneStore = uint16_t;
  static PYCOMM_DEVICE Acc decode(Store v) { return float_from_half(v); }
  static PYCOMM_DEVICE Store encode(Acc v) { return half_from_float(v); }
};

struct BFloat16 {
  using Store = uint16_t;
  using Acc = float;
  using LaneStore = uint16_t;
  static PYCOMM_DEVICE Acc decode(Store v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }
  static PYCOMM_DEVICE Store encode(Acc v) { return bfloat16_from_float(v); }
};

struct Float8E4M3 {
  using Store = uint8_t;
  using Acc = float;
  using LaneStore = uint8_t;
  static PYCOMM_DEVICE Acc decode(Store v) { return float_from_e4m3(v); }
  static PYCOMM_DEVICE Store encode(Acc v) { return e4m3_from_float(v); }
};

struct Float8E5M2 {  // the upper byte of a float16
  using Store = uint8_t;
  using Acc = float;
  using LaneStore = uint8_t;
  static PYCOMM_DEVICE Acc decode(Store v) { return float_from_half(static_cast<uint16_t>(v << 8)); }
  static PYCOMM_DEVICE Store encode(Acc v) { return static_cast<Store>(encode_small<5, 2, 0x7f>(v)); }
};

template <class T>
struct Complex {
  T re, im;
};
template <class T>
struct ComplexFormat {
  using Store = Complex<T>;
  using Acc = Complex<T>;
  using LaneStore = Complex<T>;
  static PYCOMM_DEVICE Acc decode(const Store& v) { return v; }
  static PYCOMM_DEVICE Store encode(const Acc& v) { return v; }
};

template <class F>
constexpr int kElems = kPackBytes / static_cast<int>(sizeof(typename F::Store));
template <class F>
constexpr int kLanes = kPackBytes / static_cast<int>(sizeof(typename F::LaneStore));

template <class F>
struct Lanes {
  typename F::Acc v[kLanes<F>];
};

template <class F>
PYCOMM_DEVICE Lanes<F> decode_pack(const Pack& pack) {
  typename F::LaneStore stored[kLanes<F>];
  static_assert(sizeof stored == sizeof pack);
  memcpy(stored, &pack, sizeof pack);
  Lanes<F> out;
  PYCOMM_UNROLL
  for (int i = 0; i < kLanes<F>; ++i) out.v[i] = F::decode(stored[i]);
  return out;
}

// Word by word, which takes fewer registers than an array of bytes.
template <class F>
PYCOMM_DEVICE Pack encode_pack(const Lanes<F>& lanes) {
  using S = typename F::LaneStore;
  Pack pack;
  if constexpr (sizeof(S) < 4) {
    constexpr int n = 4 / static_cast<int>(sizeof(S));
    PYCOMM_UNROLL
    for (int w = 0; w < 4; ++w) {
      pack.word[w] = 0;
      PYCOMM_UNROLL
      for (int i = 0; i < n; ++i) {
        const auto code = static_cast<std::make_unsigned_t<S>>(F::encode(lanes.v[w * n + i]));
        pack.word[w] |= uint32_t{code} << (32 / n * i);
      }
    }
  } else {
    S stored[kLanes<F>];
    PYCOMM_UNROLL
    for (int i = 0; i < kLanes<F>; ++i) stored[i] = F::encode(lanes.v[i]);
    memcpy(&pack, stored, sizeof pack);
  }
  return pack;
}

}  // namespace pycomm::cuda
