// The sum of squares of many tensors, and how many of their elements are not finite.
//
// First a partial result for each chunk, then one block adds the partial results. Which thread adds what
// depends on an element's place in its tensor only, never on alignment or grid, so the same values give the
// same bits: thread t of a chunk takes its packs t, t + kThreads, …, lanes in order; the 32 lanes of a warp
// are added as a tree (partner ^ 16, 8, 4, 2, 1), then the warps in order. The last block does the same over
// the chunks. Squares of float32 and narrower are exact in float64. Cost: one read per element.
#include <type_traits>

#include "kernels/cuda/chunks.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kNormSegments = 128;
constexpr unsigned kWarps = kThreads / 32;

struct NormTable {
  Segments<kNormSegments> segments;
  const void* data[kNormSegments];
};

// Per chunk, in the workspace; the sum over the block is in every thread of warp 0.
struct Partial {
  double sum;
  uint64_t n_nonfinite;
};
static_assert(sizeof(Partial) == sizeof(NormResult));

PYCOMM_DEVICE Partial warp_sum(Partial p) {
  PYCOMM_UNROLL
  for (int bits = 16; bits > 0; bits /= 2) {
    p.sum += __shfl_xor_sync(0xffffffffu, p.sum, bits);
    p.n_nonfinite += __shfl_xor_sync(0xffffffffu, p.n_nonfinite, bits);
  }
  return p;
}

// Valid in thread 0. The barrier at the end lets the next call use the shared memory again.
PYCOMM_DEVICE Partial block_sum(Partial mine) {
  __shared__ double sums[kWarps];
  __shared__ uint64_t counts[kWarps];
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = mine.sum;
    counts[threadIdx.x / 32] = mine.n_nonfinite;
  }
  __syncthreads();
  Partial all{0, 0};
  if (threadIdx.x == 0) {
    for (unsigned w = 0; w < kWarps; ++w) {
      all.sum += sums[w];
      all.n_nonfinite += counts[w];
    }
  }
  __syncthreads();
  return all;
}

PYCOMM_DEVICE bool is_finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }
PYCOMM_DEVICE bool is_finite(double v) { return v - v == 0; }

template <class A>
PYCOMM_DEVICE void add_square(Partial& p, A v) {
  p.sum += static_cast<double>(v) * static_cast<double>(v);
  p.n_nonfinite += is_finite(v) ? 0 : 1;
}

template <class F>
__global__ void __launch_bounds__(kThreads, 4)
    norm_kernel(const __grid_constant__ NormTable table, Partial* partials) {
  using S = typename F::Store;
  constexpr int kElemsOfChunk = kChunkPacks * kElems<F>;
  const uint32_t n_chunks = table.segments.end[table.segments.n - 1];
  for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = find_chunk(table.segments, c, kElemsOfChunk);
    const S* const src = static_cast<const S*>(table.data[chunk.segment]) + chunk.begin;
    const bool aligned = reinterpret_cast<uintptr_t>(src) % kPackBytes == 0;
    Partial mine{0, 0};
    PYCOMM_UNROLL
    for (int u = 0; u < kPacksPerThread; ++u) {
      const int first = (u * static_cast<int>(kThreads) + static_cast<int>(threadIdx.x)) * kElems<F>;
      if (aligned && first + kElems<F> <= chunk.n_elems) {
        const Lanes<F> lanes = decode_pack<F>(load_pack(src + first));
        PYCOMM_UNROLL
        for (const auto v : lanes.v) add_square(mine, v);
      } else {
        for (int i = first; i < first + kElems<F> && i < chunk.n_elems; ++i) {
          add_square(mine, F::decode(load_element<S>(src + i)));
        }
      }
    }
    const Partial all = block_sum(mine);
    if (threadIdx.x == 0) partials[c] = all;
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    norm_total_kernel(const Partial* partials, size_t n_partials, NormResult* result) {
  Partial mine{0, 0};
  for (size_t i = threadIdx.x; i < n_partials; i += kThreads) {
    mine.sum += partials[i].sum;
    mine.n_nonfinite += partials[i].n_nonfinite;
  }
  const Partial all = block_sum(mine);
  if (threadIdx.x == 0) *result = {all.sum, all.n_nonfinite};
}

// ---- on the host

struct NormEntry {
  cudaError_t (*launch)(const NormTable& table, unsigned n_blocks, Partial* partials, Stream stream);
  size_t n_lanes;  // per element
  size_t chunk_lanes;
};

template <class F>
NormEntry entry(size_t n_lanes = 1) {
  return {[](const NormTable& table, unsigned n_blocks, Partial* partials, Stream stream) {
            return launch(norm_kernel<F>, n_blocks, kThreads, stream, table, partials);
          },
          n_lanes, static_cast<size_t>(kChunkPacks * kElems<F>)};
}

NormEntry find_norm_entry(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return entry<Plain<double>>();
    case DType::kFloat32: return entry<Plain<float>>();
    case DType::kFloat16: return entry<Float16>();
    case DType::kBFloat16: return entry<BFloat16>();
    case DType::kComplex64: return entry<Plain<float>>(2);
    case DType::kComplex128: return entry<Plain<double>>(2);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8:
    case DType::kBool: return {nullptr, 0, 0};
  }
  return {nullptr, 0, 0};
}

size_t n_chunks_of(const NormEntry& entry, std::span<const ConstBlock> tensors) {
  size_t n = 0;
  for (const ConstBlock& t : tensors)
    n += (t.n_elems * entry.n_lanes + entry.chunk_lanes - 1) / entry.chunk_lanes;
  return n;
}

}  // namespace

bool norm_supported(DType dtype) { return find_norm_entry(dtype).launch != nullptr; }

size_t norm_workspace_bytes(DType dtype, std::span<const ConstBlock> tensors) {
  const NormEntry entry = find_norm_entry(dtype);
  return entry.launch == nullptr ? 0 : n_chunks_of(entry, tensors) * sizeof(Partial);
}

Status norm(DType dtype, std::span<const ConstBlock> tensors, void* workspace, NormResult* result,
            Stream stream) {
  const NormEntry entry = find_norm_entry(dtype);
  const std::string what = format("cuda norm: %s", dtype_name(dtype));
  if (entry.launch == nullptr) {
    return Status::error(Code::kValue,
                         what + "; expected float64, float32, float16, bfloat16, complex64 or complex128");
  }
  if (reinterpret_cast<uintptr_t>(workspace) % alignof(Partial) != 0 ||
      reinterpret_cast<uintptr_t>(result) % alignof(NormResult) != 0) {
    return Status::error(Code::kValue, what + ": workspace and result must be aligned to 8 bytes");
  }
  Partial* const partials = static_cast<Partial*>(workspace);
  size_t n_done = 0;  // chunks enqueued
  NormTable table;
  const auto enqueue = [&]() -> Status {
    unsigned n_blocks = 0;
    PYCOMM_RETURN_IF_ERROR(blocks_for(table.segments.n_chunks(), &n_blocks));
    PYCOMM_RETURN_IF_ERROR(check_cuda(entry.launch(table, n_blocks, partials + n_done, stream), what));
    n_done += table.segments.n_chunks();
    table.segments.n = 0;
    return {};
  };
  for (const ConstBlock& t : tensors) {
    if (t.n_elems == 0) continue;
    if (!table.segments.add(t.n_elems * entry.n_lanes, entry.chunk_lanes)) {
      if (table.segments.n > 0) PYCOMM_RETURN_IF_ERROR(enqueue());
      if (!table.segments.add(t.n_elems * entry.n_lanes, entry.chunk_lanes)) {
        return Status::error(Code::kValue,
                             what + format(": a tensor of %zu elements is too long", t.n_elems));
      }
    }
    table.data[table.segments.n - 1] = t.data;
  }
  if (table.segments.n > 0) PYCOMM_RETURN_IF_ERROR(enqueue());
  return check_cuda(
      launch(norm_total_kernel, 1, kThreads, stream, static_cast<const Partial*>(partials), n_done, result),
      what);
}

}  // namespace pycomm::cuda
