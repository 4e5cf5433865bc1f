// Segments and chunks: how one launch covers many tensors of any length.
//
// A segment is one tensor (or one destination with its sources); a chunk is a fixed number of its elements.
// Blocks take chunks in turn, in a grid-stride loop over the chunks of all segments; end[s] is the number of
// chunks of segments 0 … s. The table travels as a kernel argument (at most 4 KiB), so no copy is needed.
// A chunk is a multiple of 16 bytes of every operand, so its pointers are aligned as the segment's are.
#pragma once

#include <algorithm>
#include <string>

#include "base/status.h"
#include "kernels/cuda/formats.cuh"
#include "kernels/cuda/kernels.h"

namespace pycomm::cuda {

#if defined(PYCOMM_FEW_THREADS)  // cuda.cmake
constexpr unsigned kThreads = 64;
#else
constexpr unsigned kThreads = 256;
#endif
constexpr int kPacksPerThread = 4;  // of the widest operand, in a full chunk
constexpr int kChunkPacks = kPacksPerThread * static_cast<int>(kThreads);

template <int kMaxSegments>
struct Segments {
  int n = 0;
  uint32_t end[kMaxSegments];
  size_t n_elems[kMaxSegments];

  // False when the table or the count of chunks is full. Empty segments take no place.
  bool add(size_t n_in_segment, size_t chunk_elems) {
    const size_t n_chunks = (n_in_segment + chunk_elems - 1) / chunk_elems;
    const size_t before = n == 0 ? 0 : end[n - 1];
    if (n == kMaxSegments || before + n_chunks > 0xffffffffu) return false;
    end[n] = static_cast<uint32_t>(before + n_chunks);
    n_elems[n++] = n_in_segment;
    return true;
  }
  uint32_t n_chunks() const { return n == 0 ? 0 : end[n - 1]; }
};

struct Chunk {
  int segment;
  size_t begin;  // element of the segment
  int n_elems;
};

template <int kMaxSegments>
PYCOMM_DEVICE Chunk find_chunk(const Segments<kMaxSegments>& segments, uint32_t chunk, int chunk_elems) {
  int low = 0, high = segments.n - 1;  // the first segment whose end is above chunk
  while (low < high) {
    const int middle = (low + high) / 2;
    if (segments.end[middle] > chunk) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const uint32_t first = low == 0 ? 0 : segments.end[low - 1];
  const size_t begin = static_cast<size_t>(chunk - first) * static_cast<size_t>(chunk_elems);
  const size_t left = segments.n_elems[low] - begin;
  return {low, begin, left < static_cast<size_t>(chunk_elems) ? static_cast<int>(left) : chunk_elems};
}

// ---- on the host

inline Status check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  return Status::error(Code::kSystem,
                       what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Enough blocks to fill the current device, at most one per chunk.
inline Status blocks_for(uint32_t n_chunks, unsigned* n_blocks) {
  constexpr unsigned kBlocksPerMultiprocessor = 8;
  int device = 0, n_multiprocessors = 0;
  PYCOMM_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  PYCOMM_RETURN_IF_ERROR(
      check_cuda(cudaDeviceGetAttribute(&n_multiprocessors, cudaDevAttrMultiProcessorCount, device),
                 "cudaDeviceGetAttribute"));
  *n_blocks = std::min(n_chunks, kBlocksPerMultiprocessor * static_cast<unsigned>(n_multiprocessors));
  return {};
}

}  // namespace pycomm::cuda
