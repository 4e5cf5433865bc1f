// Runs: what a lane has of a block, how it reads and writes float32 values and codes.
//
// A run is four consecutive elements. A warp does a block of 256 elements: each lane has kRuns runs, one in
// every 128 elements, so that an instruction of the warp reads or writes whole lines: 16 bytes a lane of
// float32, 4 or 8 of codes. Runs of float32 that are not whole or not aligned to 16 go one by one. Messages:
// kernels.h.
#pragma once

#include <type_traits>

#include "kernels/blocks.h"
#include "kernels/cuda/block_formats.cuh"

namespace pycomm::cuda {

constexpr int kWarp = 32;
constexpr int kRunElems = 4;
constexpr int kRuns = static_cast<int>(kBlockElems) / (kWarp * kRunElems);

struct Run {
  float v[kRunElems];
};

// Where a run is, in a segment of n elements: it may lie beyond the end.
struct Place {
  size_t n, at;
  PYCOMM_DEVICE Place next(int j) const { return {n, at + static_cast<size_t>(j * kWarp * kRunElems)}; }
  PYCOMM_DEVICE size_t n_left() const { return at < n ? n - at : 0; }
  PYCOMM_DEVICE size_t block() const { return at / kBlockElems; }
};

// Zeros beyond the end.
PYCOMM_DEVICE Run load_run(const float* src, const Place& place) {
  const float* const from = src + place.at;
  const size_t n_left = place.n_left();
  Run out;
  if (n_left >= kRunElems && reinterpret_cast<uintptr_t>(from) % kPackBytes == 0) {
    const Pack pack = load_pack(from);
    memcpy(out.v, &pack, sizeof pack);
  } else {
    PYCOMM_UNROLL
    for (int i = 0; i < kRunElems; ++i)
      out.v[i] = static_cast<size_t>(i) < n_left ? load_element<float>(from + i) : 0.0f;
  }
  return out;
}

PYCOMM_DEVICE void store_run(float* dst, const Place& place, const Run& run) {
  float* const to = dst + place.at;
  const size_t n_left = place.n_left();
  if (n_left >= kRunElems && reinterpret_cast<uintptr_t>(to) % kPackBytes == 0) {
    Pack pack;
    memcpy(&pack, run.v, sizeof pack);
    store_pack(to, pack);
  } else {
    PYCOMM_UNROLL
    for (int i = 0; i < kRunElems; ++i) {
      if (static_cast<size_t>(i) < n_left) store_element<float>(to + i, run.v[i]);
    }
  }
}

PYCOMM_DEVICE Run add(const Run& a, const Run& b) {
  Run out;
  PYCOMM_UNROLL
  for (int i = 0; i < kRunElems; ++i) out.v[i] = a.v[i] + b.v[i];
  return out;
}

// A run's codes.
template <class F>
using Word = std::conditional_t<sizeof(typename F::Store) == 1, uint32_t, uint64_t>;

// coded_begin(), on the device.
PYCOMM_DEVICE size_t codes_begin(size_t n) { return (n + 4 * kBlockElems - 1) / (4 * kBlockElems) * 16; }

template <class F>
PYCOMM_DEVICE size_t word_begin(const Place& place) {
  return codes_begin(place.n) + place.at * sizeof(typename F::Store);
}

// A coded source's run, not decoded yet.
template <class F>
struct Coded {
  Word<F> word;
  float maximum;
};

template <class F>
PYCOMM_DEVICE Coded<F> load_coded(const void* message, const Place& place) {
  if (place.at >= place.n) return {};
  const auto* const bytes = static_cast<const unsigned char*>(message);
  return {*reinterpret_cast<const Word<F>*>(bytes + word_begin<F>(place)),
          reinterpret_cast<const float*>(bytes)[place.block()]};
}

// What lies beyond the end is 0, or NaN as all of a block that is not finite.
template <class F>
PYCOMM_DEVICE Run decode(const Coded<F>& coded) {
  const float inverse = block_scale<F>(coded.maximum).inverse;
  typename F::Store codes[kRunElems];
  memcpy(codes, &coded.word, sizeof codes);
  Run out;
  PYCOMM_UNROLL
  for (int i = 0; i < kRunElems; ++i) out.v[i] = F::decode(codes[i]) * inverse;
  return out;
}

}  // namespace pycomm::cuda
