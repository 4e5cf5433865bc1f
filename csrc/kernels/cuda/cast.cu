// Cast, pack and unpack: many tensors, cast and scaled, in one launch. See kernels.h and kernels/cast.h.
//
// A step is as many elements as 16 bytes of the narrower side hold, so both sides move in whole packs: one on
// the narrow side, up to four (eight for float64) on the wide. It needs both pointers at a multiple of 16 at
// the same element; where no such element exists the segment goes one by one. Equal dtypes with a scale of 1
// are copied as bytes. Cost: one read and one write per element.
#include "kernels/cuda/chunks.cuh"
#include "kernels/cuda/ops.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kCastSegments = 128;

struct CastTable {
  Segments<kCastSegments> segments;
  void* dst[kCastSegments];
  const void* src[kCastSegments];
};
static_assert(sizeof(CastTable) <= 4000, "kernel arguments are at most 4 KiB");

template <class Dst, class Src>
struct CastShape {
  using D = typename Dst::Store;
  using S = typename Src::Store;
  static constexpr int kWide = sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S);
  static constexpr int kNarrow = sizeof(D) < sizeof(S) ? sizeof(D) : sizeof(S);
  static constexpr int kStep = kPackBytes / kNarrow;  // elements
  static constexpr int kDstPacks = kStep * static_cast<int>(sizeof(D)) / kPackBytes;
  static constexpr int kSrcPacks = kStep * static_cast<int>(sizeof(S)) / kPackBytes;
  static constexpr int kStepsPerThread = kWide == kNarrow ? kPacksPerThread : 1;  // in a full chunk
  static constexpr int kChunkElems = kStep * static_cast<int>(kThreads) * kStepsPerThread;
};

// How many elements to go before both pointers are at a multiple of 16; n if they never are, or not by then.
template <class D, class S>
PYCOMM_DEVICE int head_of(const D* dst, const S* src, int n) {
  for (int i = 0; i < kPackBytes && i < n; ++i) {
    if (reinterpret_cast<uintptr_t>(dst + i) % kPackBytes == 0 &&
        reinterpret_cast<uintptr_t>(src + i) % kPackBytes == 0) {
      return i;
    }
  }
  return n;
}

// Steps first, first + kThreads, …: U of them are loaded before any is stored.
template <class Dst, class Src, int U>
PYCOMM_DEVICE void cast_steps(Pack* dst, const Pack* src, int first, typename Src::Acc scale) {
  using Shape = CastShape<Dst, Src>;
  constexpr int kNext = static_cast<int>(kThreads);
  Pack in[U][Shape::kSrcPacks];
  PYCOMM_UNROLL
  for (int u = 0; u < U; ++u) {
    PYCOMM_UNROLL
    for (int i = 0; i < Shape::kSrcPacks; ++i)
      in[u][i] = load_pack(src + (first + u * kNext) * Shape::kSrcPacks + i);
  }
  PYCOMM_UNROLL
  for (int u = 0; u < U; ++u) {
    typename Src::Acc v[Shape::kStep];
    PYCOMM_UNROLL
    for (int i = 0; i < Shape::kSrcPacks; ++i) {
      const Lanes<Src> lanes = decode_pack<Src>(in[u][i]);
      PYCOMM_UNROLL
      for (int j = 0; j < kLanes<Src>; ++j) v[i * kLanes<Src> + j] = lanes.v[j] * scale;
    }
    PYCOMM_UNROLL
    for (int i = 0; i < Shape::kDstPacks; ++i) {
      Lanes<Dst> lanes;
      PYCOMM_UNROLL
      for (int j = 0; j < kLanes<Dst>; ++j) lanes.v[j] = v[i * kLanes<Dst> + j];
      store_pack(dst + (first + u * kNext) * Shape::kDstPacks + i, encode_pack<Dst>(lanes));
    }
  }
}

template <class Dst, class Src>
__global__ void __launch_bounds__(kThreads, 4)
    cast_kernel(const __grid_constant__ CastTable table, typename Src::Acc scale) {
  using Shape = CastShape<Dst, Src>;
  using D = typename Dst::Store;
  using S = typename Src::Store;
  const uint32_t n_chunks = table.segments.end[table.segments.n - 1];
  for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = find_chunk(table.segments, c, Shape::kChunkElems);
    D* const dst = static_cast<D*>(table.dst[chunk.segment]) + chunk.begin;
    const S* const src = static_cast<const S*>(table.src[chunk.segment]) + chunk.begin;
    const int head = head_of(dst, src, chunk.n_elems);
    const int n_steps = (chunk.n_elems - head) / Shape::kStep;
    Pack* const to = reinterpret_cast<Pack*>(dst + head);
    const Pack* const from = reinterpret_cast<const Pack*>(src + head);
    int i = static_cast<int>(threadIdx.x);
    constexpr int U = Shape::kStepsPerThread;
    for (; i + (U - 1) * static_cast<int>(kThreads) < n_steps; i += U * static_cast<int>(kThreads)) {
      cast_steps<Dst, Src, U>(to, from, i, scale);
    }
    for (; i < n_steps; i += static_cast<int>(kThreads)) cast_steps<Dst, Src, 1>(to, from, i, scale);
    const int n_in_steps = n_steps * Shape::kStep;
    for (i = static_cast<int>(threadIdx.x); i < chunk.n_elems - n_in_steps; i += static_cast<int>(kThreads)) {
      const int at = i < head ? i : i + n_in_steps;
      store_element<D>(dst + at, Dst::encode(Src::decode(load_element<S>(src + at)) * scale));
    }
  }
}

// The sides of a cast between float32 and float64, computed in float64.
struct Float32AsDouble {
  using Store = float;
  using Acc = double;
  using LaneStore = float;
  static PYCOMM_DEVICE double decode(float v) { return static_cast<double>(v); }
  static PYCOMM_DEVICE float encode(double v) { return static_cast<float>(v); }
};

__global__ void __launch_bounds__(kThreads, 4) copy_kernel(const __grid_constant__ CastTable table) {
  constexpr int kChunkBytes = kChunkPacks * kPackBytes;
  const uint32_t n_chunks = table.segments.end[table.segments.n - 1];
  for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = find_chunk(table.segments, c, kChunkBytes);
    char* const dst = static_cast<char*>(table.dst[chunk.segment]) + chunk.begin;
    const char* const src = static_cast<const char*>(table.src[chunk.segment]) + chunk.begin;
    const int head = head_of(dst, src, chunk.n_elems);
    const int n_packs = (chunk.n_elems - head) / kPackBytes;
    Pack* const to = reinterpret_cast<Pack*>(dst + head);
    const Pack* const from = reinterpret_cast<const Pack*>(src + head);
    int i = static_cast<int>(threadIdx.x);
    for (; i + (kPacksPerThread - 1) * static_cast<int>(kThreads) < n_packs; i += kChunkPacks) {
      Pack pack[kPacksPerThread];
      PYCOMM_UNROLL
      for (int u = 0; u < kPacksPerThread; ++u)
        pack[u] = load_pack(from + i + u * static_cast<int>(kThreads));
      PYCOMM_UNROLL
      for (int u = 0; u < kPacksPerThread; ++u) store_pack(to + i + u * static_cast<int>(kThreads), pack[u]);
    }
    for (; i < n_packs; i += static_cast<int>(kThreads)) store_pack(to + i, load_pack(from + i));
    const int n_in_packs = n_packs * kPackBytes;
    for (i = static_cast<int>(threadIdx.x); i < chunk.n_elems - n_in_packs; i += static_cast<int>(kThreads)) {
      const int at = i < head ? i : i + n_in_packs;
      dst[at] = src[at];
    }
  }
}

// ---- on the host

struct CastEntry {
  cudaError_t (*launch)(const CastTable& table, unsigned n_blocks, float scale, Stream stream);
  size_t n_lanes;  // per element
  size_t chunk_lanes;
};
constexpr CastEntry kNone{nullptr, 0, 0};

template <class Dst, class Src>
CastEntry entry(size_t n_lanes = 1) {
  return {[](const CastTable& table, unsigned n_blocks, float scale, Stream stream) {
            return launch(cast_kernel<Dst, Src>, n_blocks, kThreads, stream, table,
                          static_cast<typename Src::Acc>(scale));
          },
          n_lanes, static_cast<size_t>(CastShape<Dst, Src>::kChunkElems)};
}

template <class F>
CastEntry small_entry(DType t, DType dst, DType src) {  // one side at least is t
  if (dst == DType::kFloat32) return entry<Plain<float>, F>();
  if (src == DType::kFloat32) return entry<F, Plain<float>>();
  return dst == src && dst == t ? entry<F, F>() : kNone;
}

CastEntry find_cast_entry(DType dst, DType src) {
  using enum DType;
  if (dst == src) {
    if (dst == kFloat32) return entry<Plain<float>, Plain<float>>();
    if (dst == kFloat64) return entry<Plain<double>, Plain<double>>();
    if (dst == kComplex64) return entry<Plain<float>, Plain<float>>(2);
    if (dst == kComplex128) return entry<Plain<double>, Plain<double>>(2);
  }
  if (dst == kFloat32 && src == kFloat64) return entry<Float32AsDouble, Plain<double>>();
  if (dst == kFloat64 && src == kFloat32) return entry<Plain<double>, Float32AsDouble>();
  for (const DType t : {kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2}) {
    const DType other = dst == t ? src : dst;
    if ((dst != t && src != t) || (other != t && other != kFloat32)) continue;
    if (t == kFloat16) return small_entry<Float16>(t, dst, src);
    if (t == kBFloat16) return small_entry<BFloat16>(t, dst, src);
    if (t == kFloat8E4M3) return small_entry<Float8E4M3>(t, dst, src);
    return small_entry<Float8E5M2>(t, dst, src);
  }
  return kNone;
}

CastEntry copy_entry(size_t elem_bytes) {
  return {[](const CastTable& table, unsigned n_blocks, float, Stream stream) {
            return launch(copy_kernel, n_blocks, kThreads, stream, table);
          },
          elem_bytes, static_cast<size_t>(kChunkPacks * kPackBytes)};
}

// Collects segments and enqueues a launch whenever the table is full.
class Batch {
 public:
  Batch(DType dst, DType src, float scale, Stream stream) : scale_(scale), stream_(stream) {
    entry_ = dst == src && scale == 1.0f ? copy_entry(dtype_size(dst)) : find_cast_entry(dst, src);
    what_ = format("cuda cast: %s to %s", dtype_name(src), dtype_name(dst));
  }
  Status check() const {
    if (entry_.launch != nullptr) return {};
    return Status::error(
        Code::kValue, what_ + format(" times %g; casts are between float32 and float64, float16, bfloat16, "
                                     "float8_e4m3fn or float8_e5m2, and between equal dtypes, of which "
                                     "integers and bool take no scale",
                                     scale_));
  }
  Status add(void* dst, const void* src, size_t n_elems) {
    if (n_elems == 0) return {};
    const size_t n_lanes = n_elems * entry_.n_lanes;
    if (!table_.segments.add(n_lanes, entry_.chunk_lanes)) {
      PYCOMM_RETURN_IF_ERROR(enqueue());
      if (!table_.segments.add(n_lanes, entry_.chunk_lanes)) {
        return Status::error(Code::kValue, what_ + format(": a tensor of %zu elements is too long", n_elems));
      }
    }
    table_.dst[table_.segments.n - 1] = dst;
    table_.src[table_.segments.n - 1] = src;
    return {};
  }
  Status enqueue() {
    if (table_.segments.n == 0) return {};
    unsigned n_blocks = 0;
    PYCOMM_RETURN_IF_ERROR(blocks_for(table_.segments.n_chunks(), &n_blocks));
    PYCOMM_RETURN_IF_ERROR(check_cuda(entry_.launch(table_, n_blocks, scale_, stream_), what_));
    table_.segments.n = 0;
    return {};
  }

 private:
  CastEntry entry_;
  std::string what_;
  CastTable table_;
  float scale_;
  Stream stream_;
};

}  // namespace

bool scale_supported(DType dst, DType src) { return find_cast_entry(dst, src).launch != nullptr; }
bool cast_supported(DType dst, DType src) { return dst == src || cuda::scale_supported(dst, src); }

Status cast(DType dst_dtype, DType src_dtype, std::span<const CastSegment> segments, float scale,
            Stream stream) {
  Batch batch(dst_dtype, src_dtype, scale, stream);
  PYCOMM_RETURN_IF_ERROR(batch.check());
  for (const CastSegment& s : segments) PYCOMM_RETURN_IF_ERROR(batch.add(s.dst, s.src, s.n_elems));
  return batch.enqueue();
}

Status pack(DType dst_dtype, void* dst, DType src_dtype, std::span<const ConstBlock> srcs, float scale,
            Stream stream) {
  Batch batch(dst_dtype, src_dtype, scale, stream);
  PYCOMM_RETURN_IF_ERROR(batch.check());
  char* at = static_cast<char*>(dst);
  for (const ConstBlock& s : srcs) {
    PYCOMM_RETURN_IF_ERROR(batch.add(at, s.data, s.n_elems));
    at += s.n_elems * dtype_size(dst_dtype);
  }
  return batch.enqueue();
}

Status unpack(DType dst_dtype, std::span<const Block> dsts, DType src_dtype, const void* src, float scale,
              Stream stream) {
  Batch batch(dst_dtype, src_dtype, scale, stream);
  PYCOMM_RETURN_IF_ERROR(batch.check());
  const char* at = static_cast<const char*>(src);
  for (const Block& d : dsts) {
    PYCOMM_RETURN_IF_ERROR(batch.add(d.data, at, d.n_elems));
    at += d.n_elems * dtype_size(src_dtype);
  }
  return batch.enqueue();
}

}  // namespace pycomm::cuda
