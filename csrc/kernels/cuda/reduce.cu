// Reduce: dst[i] = finish(T(srcs[0][i], …, srcs[n-1][i])) for many segments in one launch.
//
// Within a chunk the elements before the first 16-byte boundary and after the last go one by one, the packs
// between by whole threads; a segment whose pointers do not share their remainder modulo 16 goes one by one
// altogether. For the operations of training (sum, avg, premul_sum of float32, float16, bfloat16) and up to 8
// sources the number of sources is known to the compiler: all loads of several packs are under way at once.
// The rest goes through tree_of(), one source after another. A thread loads all sources of an element before
// it stores it, so dst may be a source. Cost: n_srcs reads and one write per element.
#include "kernels/cuda/chunks.cuh"
#include "kernels/cuda/ops_table.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kMaxSegments = 64;
constexpr int kMaxPointers = 352;
constexpr int kMaxUnrolled = 8;  // sources
constexpr int kLevels = 5;       // of tree_of: up to 63 sources
static_assert(kMaxReduceSrcs < 1 << (kLevels + 1) && kMaxReduceSrcs < kMaxPointers);

struct Table {
  Segments<kMaxSegments> segments;
  int n_srcs;
  const void* pointers[kMaxPointers];  // of each segment: dst, then its sources
};
static_assert(sizeof(Table) <= 4000, "kernel arguments are at most 4 KiB");

template <class F>
constexpr int kChunkElems = kChunkPacks* kElems<F>;

// The sources of one segment, from the first element of a chunk on.
template <class S>
struct Sources {
  const void* const* pointers;
  size_t begin;
  PYCOMM_DEVICE const S* at(int k) const { return static_cast<const S*>(pointers[k]) + begin; }
};

template <class O, int N>
PYCOMM_DEVICE void reduce_element(void* dst, const Sources<typename O::Format::Store>& srcs, int n_srcs,
                                  size_t i, const typename O::P& param) {
  using F = typename O::Format;
  using S = typename F::Store;
  const auto load = [&](int k) { return O::prepare(F::decode(load_element<S>(srcs.at(k) + i)), param); };
  const auto v = tree_of<kLevels, typename F::Acc>(N > 0 ? N : n_srcs, load, Combine<O>{param});
  store_element<S>(static_cast<S*>(dst) + i, static_cast<S>(F::encode(O::finish(v, param))));
}

// Packs first, first + kThreads, … below n: U of them are loaded before any is computed.
template <class O, int N, int U>
PYCOMM_DEVICE void reduce_packs(Pack* dst, const Pack* const* srcs, int first, const typename O::P& param) {
  Pack in[U][N];
  PYCOMM_UNROLL
  for (int u = 0; u < U; ++u) {
    PYCOMM_UNROLL
    for (int k = 0; k < N; ++k) in[u][k] = load_pack(srcs[k] + first + u * static_cast<int>(kThreads));
  }
  PYCOMM_UNROLL
  for (int u = 0; u < U; ++u) {
    Kept<O> kept[N];
    PYCOMM_UNROLL
    for (int k = 0; k < N; ++k) kept[k] = prepared<O>(in[u][k], param);
    store_pack(dst + first + u * static_cast<int>(kThreads),
               finished<O>(tree<N>(kept, Combine<O>{param}), param));
  }
}

template <class O, int N>
PYCOMM_DEVICE void reduce_all_packs(void* dst, const Sources<typename O::Format::Store>& srcs, int n_srcs,
                                    int head, int n_packs, const typename O::P& param) {
  using S = typename O::Format::Store;
  Pack* const to = reinterpret_cast<Pack*>(static_cast<S*>(dst) + head);
  int i = static_cast<int>(threadIdx.x);
  if constexpr (N > 0) {
    constexpr int U = N <= 2 ? 4 : N <= 4 ? 2 : 1;
    const Pack* from[N];
    PYCOMM_UNROLL
    for (int k = 0; k < N; ++k) from[k] = reinterpret_cast<const Pack*>(srcs.at(k) + head);
    for (; i + (U - 1) * static_cast<int>(kThreads) < n_packs; i += U * static_cast<int>(kThreads)) {
      reduce_packs<O, N, U>(to, from, i, param);
    }
    for (; i < n_packs; i += static_cast<int>(kThreads)) reduce_packs<O, N, 1>(to, from, i, param);
  } else {
    for (; i < n_packs; i += static_cast<int>(kThreads)) {
      const auto load = [&](int k) {
        return prepared<O>(load_pack(reinterpret_cast<const Pack*>(srcs.at(k) + head) + i), param);
      };
      store_pack(to + i, finished<O>(tree_of<kLevels, Kept<O>>(n_srcs, load, Combine<O>{param}), param));
    }
  }
}

template <class O, int N>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Table table, const __grid_constant__ typename O::P param) {
  using F = typename O::Format;
  using S = typename F::Store;
  const uint32_t n_chunks = table.segments.end[table.segments.n - 1];
  const int n_srcs = N > 0 ? N : table.n_srcs;
  for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = find_chunk(table.segments, c, kChunkElems<F>);
    const void* const* pointers = table.pointers + chunk.segment * (table.n_srcs + 1);
    S* const dst = static_cast<S*>(const_cast<void*>(pointers[0])) + chunk.begin;
    const Sources<S> srcs{pointers + 1, chunk.begin};

    const uintptr_t off = reinterpret_cast<uintptr_t>(dst) % kPackBytes;
    bool alike = off % sizeof(S) == 0;
    for (int k = 0; k < n_srcs; ++k) alike &= reinterpret_cast<uintptr_t>(srcs.at(k)) % kPackBytes == off;
    int head = chunk.n_elems, n_packs = 0;
    if (alike) {
      const int to_boundary = static_cast<int>((kPackBytes - off) % kPackBytes / sizeof(S));
      head = to_boundary < chunk.n_elems ? to_boundary : chunk.n_elems;
      n_packs = (chunk.n_elems - head) / kElems<F>;
    }
    reduce_all_packs<O, N>(dst, srcs, n_srcs, head, n_packs, param);
    const int n_in_packs = n_packs * kElems<F>;
    for (int i = static_cast<int>(threadIdx.x); i < chunk.n_elems - n_in_packs;
         i += static_cast<int>(kThreads)) {
      reduce_element<O, N>(dst, srcs, n_srcs, static_cast<size_t>(i < head ? i : i + n_in_packs), param);
    }
  }
}

// ---- on the host

// What serves a (dtype, operation): bytes and lanes are counted in the format's own elements.
struct ReduceEntry {
  cudaError_t (*launch)(const Table& table, unsigned n_blocks, ReduceOp op, double scalar,
                        Stream stream) = nullptr;
  size_t n_lanes = 0;  // of the format, per element
  size_t chunk_lanes = 0;
};

template <class O, int N>
cudaError_t launch_one(const Table& table, unsigned n_blocks, ReduceOp op, double scalar, Stream stream) {
  typename O::P param;
  set_param(param, op, scalar);
  return launch(reduce_kernel<O, N>, n_blocks, kThreads, stream, table, param);
}

template <class O>
cudaError_t launch_any(const Table& table, unsigned n_blocks, ReduceOp op, double scalar, Stream stream) {
  return launch_one<O, 0>(table, n_blocks, op, scalar, stream);
}

template <class O>
cudaError_t launch_hot(const Table& table, unsigned n_blocks, ReduceOp op, double scalar, Stream stream) {
  constexpr decltype(&launch_one<O, 0>) kBySources[kMaxUnrolled + 1] = {
      launch_one<O, 0>, launch_one<O, 1>, launch_one<O, 2>, launch_one<O, 3>, launch_one<O, 4>,
      launch_one<O, 5>, launch_one<O, 6>, launch_one<O, 7>, launch_one<O, 8>};
  return kBySources[table.n_srcs <= kMaxUnrolled ? table.n_srcs : 0](table, n_blocks, op, scalar, stream);
}

struct Maker {
  using Entry = ReduceEntry;
  template <class O>
  static Entry make(size_t n_lanes) {
    constexpr auto kChunkLanes = static_cast<size_t>(kChunkElems<typename O::Format>);
    if constexpr (kIsTrainingSum<O>) {
      return {launch_hot<O>, n_lanes, kChunkLanes};
    } else {
      return {launch_any<O>, n_lanes, kChunkLanes};
    }
  }
};

ReduceEntry find_entry(DType dtype, ReduceOp op) { return OpTable<Maker>::find(dtype, op); }

}  // namespace

bool reduce_supported(DType dtype, ReduceOp op) { return find_entry(dtype, op).launch != nullptr; }

Status reduce(DType dtype, ReduceOp op, std::span<const ReduceSegment> segments, int n_srcs, double scalar,
              Stream stream) {
  const ReduceEntry entry = find_entry(dtype, op);
  if (entry.launch == nullptr) {
    return Status::error(
        Code::kValue, format("cuda reduce: %s is not defined for %s", reduce_op_name(op), dtype_name(dtype)));
  }
  if (n_srcs < 1 || n_srcs > kMaxReduceSrcs) {
    return Status::error(Code::kValue,
                         format("cuda reduce: %d sources; expected 1 to %d", n_srcs, kMaxReduceSrcs));
  }
  const auto enqueue = [&](const Table& table) -> Status {
    unsigned n_blocks = 0;
    PYCOMM_RETURN_IF_ERROR(blocks_for(table.segments.n_chunks(), &n_blocks));
    return check_cuda(entry.launch(table, n_blocks, op, scalar, stream),
                      format("cuda reduce: %s of %s", reduce_op_name(op), dtype_name(dtype)));
  };
  Table table;
  table.n_srcs = n_srcs;
  for (const ReduceSegment& segment : segments) {
    if (segment.n_elems == 0) continue;
    const size_t n_lanes = segment.n_elems * entry.n_lanes;
    const bool room = (table.segments.n + 1) * (n_srcs + 1) <= kMaxPointers;
    if (!room || !table.segments.add(n_lanes, entry.chunk_lanes)) {
      if (table.segments.n > 0) PYCOMM_RETURN_IF_ERROR(enqueue(table));
      table.segments.n = 0;
      if (!table.segments.add(n_lanes, entry.chunk_lanes)) {
        return Status::error(Code::kValue,
                             format("cuda reduce: a segment of %zu elements is too long", segment.n_elems));
      }
    }
    const void** pointers = table.pointers + (table.segments.n - 1) * (n_srcs + 1);
    *pointers++ = segment.dst;
    for (int k = 0; k < n_srcs; ++k) *pointers++ = segment.srcs[k];
  }
  return table.segments.n > 0 ? enqueue(table) : Status();
}

}  // namespace pycomm::cuda
