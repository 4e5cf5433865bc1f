// Vectors of the width of the instruction set that this file is compiled for.
//
// Vec<T, L> is a GCC/Clang vector of L lanes of T: operators work lane by lane, comparisons give masks of -1
// and 0 in integer lanes, `mask ? a : b` selects. kVecBytes is 16 (baseline), 32 (AVX2) or 64 (AVX-512).
// Loads and stores need no alignment; the partial ones touch exactly the first n lanes in memory, and a
// partial load leaves zeros in the others. narrow() drops the upper bits of 32-bit lanes, which must be zero.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PYCOMM_INLINE inline __attribute__((always_inline))

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

template <class T, int L>
struct VecOf {
  typedef T type __attribute__((vector_size(L * sizeof(T))));
};
template <class T, int L>
using Vec = typename VecOf<T, L>::type;

template <class V>
PYCOMM_INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
PYCOMM_INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

template <size_t kLimit>
PYCOMM_INLINE void copy_pieces(char* dst, const char* src, size_t n) {
  if constexpr (kLimit > 1) {
    constexpr size_t kPiece = kLimit / 2;
    const bool take = n & kPiece;
    if (take) __builtin_memcpy(dst, src, kPiece);
    copy_pieces<kPiece>(dst + (take ? kPiece : 0), src + (take ? kPiece : 0), n);
  }
}

// Copies n < kLimit bytes in pieces that are powers of two: a few branches, no loop. A call of its own:
// inlined into every reduction it was half of the kernels' code, and a third of the time to compile them.
template <size_t kLimit>
__attribute__((noinline)) void copy_bytes(char* dst, const char* src, size_t n) {
  copy_pieces<kLimit>(dst, src, n);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
PYCOMM_INLINE uint64_t low_bits(size_t n_bytes) { return ~uint64_t{0} >> (64 - n_bytes); }  // 1..64
#endif

template <class V>
PYCOMM_INLINE V load_partial(const void* p, size_t n_bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi8(low_bits(n_bytes), p);
  if constexpr (sizeof(V) == 32) return (V)_mm256_maskz_loadu_epi8(low_bits(n_bytes), p);
  if constexpr (sizeof(V) == 16) return (V)_mm_maskz_loadu_epi8(low_bits(n_bytes), p);
#endif
  V v = {};
  copy_bytes<sizeof(V)>(reinterpret_cast<char*>(&v), static_cast<const char*>(p), n_bytes);
  return v;
}

template <class V>
PYCOMM_INLINE void store_partial(void* p, V v, size_t n_bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(V) == 64) return _mm512_mask_storeu_epi8(p, low_bits(n_bytes), (__m512i)v);
  if constexpr (sizeof(V) == 32) return _mm256_mask_storeu_epi8(p, low_bits(n_bytes), (__m256i)v);
  if constexpr (sizeof(V) == 16) return _mm_mask_storeu_epi8(p, low_bits(n_bytes), (__m128i)v);
#endif
  copy_bytes<sizeof(V)>(static_cast<char*>(p), reinterpret_cast<const char*>(&v), n_bytes);
}

// 32-bit lanes that hold at most 16 (or 8) bits -> 16-bit (or 8-bit) lanes. The compiler's own conversion
// would do, but on x86-64 GCC 12 takes some lanes apart one by one; and it warns of its own header's
// undefined vector in AVX-512 intrinsics without a mask, hence the masks of ones.
template <class S, int L>
PYCOMM_INLINE Vec<S, L> narrow(Vec<uint32_t, L> v) {
#if defined(__AVX512BW__)
  if constexpr (L == 16 && sizeof(S) == 2) return (Vec<S, L>)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v);
  if constexpr (L == 16 && sizeof(S) == 1) return (Vec<S, L>)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v);
#elif defined(__AVX2__)
  if constexpr (L == 8) {
    const __m256i w = (__m256i)v;
    const __m128i lo = _mm256_castsi256_si128(w), hi = _mm256_extracti128_si256(w, 1);
    const __m128i words = _mm_packus_epi32(lo, hi);
    if constexpr (sizeof(S) == 2) return (Vec<S, L>)words;
    if constexpr (sizeof(S) == 1) return (Vec<S, L>)_mm_cvtsi128_si64(_mm_packus_epi16(words, words));
  }
#elif defined(__SSE2__)
  if constexpr (L == 4) {
    const __m128i sign_extended = _mm_srai_epi32(_mm_slli_epi32((__m128i)v, 16), 16);
    const __m128i words = _mm_packs_epi32(sign_extended, sign_extended);
    if constexpr (sizeof(S) == 2) return (Vec<S, L>)_mm_cvtsi128_si64(words);
    if constexpr (sizeof(S) == 1) return (Vec<S, L>)_mm_cvtsi128_si32(_mm_packus_epi16(words, words));
  }
#endif
  return __builtin_convertvector(v, Vec<S, L>);
}

// 8-bit or 16-bit lanes -> 32-bit lanes, zeros above.
template <class S, int L>
PYCOMM_INLINE Vec<uint32_t, L> widen(Vec<S, L> v) {
#if defined(__AVX512BW__)
  if constexpr (L == 16 && sizeof(S) == 2) {
    return (Vec<uint32_t, L>)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
  }
  if constexpr (L == 16 && sizeof(S) == 1) {
    return (Vec<uint32_t, L>)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)v);
  }
#elif defined(__AVX2__)
  if constexpr (L == 8 && sizeof(S) == 2) return (Vec<uint32_t, L>)_mm256_cvtepu16_epi32((__m128i)v);
  if constexpr (L == 8 && sizeof(S) == 1) {
    return (Vec<uint32_t, L>)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v));
  }
#elif defined(__SSE2__)
  if constexpr (L == 4) {
    const __m128i zero = _mm_setzero_si128();
    if constexpr (sizeof(S) == 2) {
      return (Vec<uint32_t, L>)_mm_unpacklo_epi16(_mm_cvtsi64_si128((long long)v), zero);
    }
    if constexpr (sizeof(S) == 1) {
      const __m128i words = _mm_unpacklo_epi8(_mm_cvtsi32_si128((int)v), zero);
      return (Vec<uint32_t, L>)_mm_unpacklo_epi16(words, zero);
    }
  }
#endif
  return __builtin_convertvector(v, Vec<uint32_t, L>);
}

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
