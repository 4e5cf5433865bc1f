// Coded vectors in one pass: decode and reduce n sources, and encode the result, with the bits of
// kernels/blocks.h and kernels/reduce.h.
//
// A warp does a block of 256 elements (block_runs.cuh), which stays in registers from the sources to the
// codes; lanes find its maximum by shuffles (as an unsigned integer: the order of |x| is that of its bits,
// and a NaN is the largest). Four leaves of T and their pairs are loaded before any is decoded, so up to
// eight loads are under way. All of a block is loaded before any of it is stored, so dst may be the source
// that is not coded. Cost: every operand is read once and every result written once.
#include "kernels/blocks.h"
#include "kernels/cuda/block_runs.cuh"
#include "kernels/cuda/chunks.cuh"
#include "kernels/cuda/ops.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kBlockSegments = 64;
constexpr int kMaxPointers = 352;
constexpr int kOwnPointers = 3;  // dst, message and residual, before the sources
constexpr int kChunkElems = kChunkPacks * kRunElems;
constexpr int kGroup = 4;   // leaves of T that are loaded together
constexpr int kLevels = 3;  // of T above the groups
static_assert(kRuns == 2 && kMaxReduceSrcs <= kGroup << kLevels &&
              kMaxReduceSrcs + kOwnPointers <= kMaxPointers);

struct BlockTable {
  Segments<kBlockSegments> segments;
  int n_srcs, plain;
  const void* pointers[kMaxPointers];
};
static_assert(sizeof(BlockTable) <= 4000, "kernel arguments are at most 4 KiB");

// T's leaves: p of them, the largest power of two <= n sources; of the first n - p each is a pair of sources.
template <class F>
struct Leaves {
  const void* const* srcs;
  int p, n_pairs, plain;

  PYCOMM_DEVICE int source_of(int leaf) const { return leaf + (leaf < n_pairs ? leaf : n_pairs); }
  PYCOMM_DEVICE Run value(int leaf, const Coded<F>& first, const Coded<F>& second, const Run& own) const {
    const int k = source_of(leaf);
    const Run v = k == plain ? own : decode<F>(first);
    if (leaf >= n_pairs) return v;
    return add(v, k + 1 == plain ? own : decode<F>(second));
  }
  // The subtree over kGroup leaves, or over all of them.
  PYCOMM_DEVICE Run group(int begin, const Run& own, const Place& place) const {
    Coded<F> first[kGroup]{}, second[kGroup]{};
    PYCOMM_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const int leaf = begin + i, k = source_of(leaf);
      if (leaf < p && k != plain) first[i] = load_coded<F>(srcs[k], place);
      if (leaf < n_pairs && k + 1 != plain) second[i] = load_coded<F>(srcs[k + 1], place);
    }
    Run v[kGroup];
    PYCOMM_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if (i < p) v[i] = value(begin + i, first[i], second[i], own);
    }
    const Run left = p > 1 ? add(v[0], v[1]) : v[0];
    return p > 2 ? add(left, add(v[2], v[3])) : left;
  }
};

// T over n sources: a binary counter over the groups, of which there are a power of two.
template <class F>
PYCOMM_DEVICE Run reduced(const void* const* srcs, int n, int plain, const Run& own, const Place& place) {
  const int p = floor_pow2(n);
  const Leaves<F> leaves{srcs, p, n - p, plain};
  Run stack[kLevels]{};
  Run v{};
  for (int g = 0; g * kGroup < p; ++g) {
    v = leaves.group(g * kGroup, own, place);
    bool carry = true;
    PYCOMM_UNROLL
    for (int level = 0; level < kLevels; ++level) {
      if (!carry) continue;
      if (g >> level & 1) {
        v = add(stack[level], v);
      } else {
        stack[level] = v;
        carry = false;
      }
    }
  }
  return v;
}

// ---- a block, of one warp

// The largest magnitude, in all lanes; a NaN counts as infinity.
PYCOMM_DEVICE float block_maximum(const Run (&runs)[kRuns]) {
  uint32_t largest = 0;
  PYCOMM_UNROLL
  for (const Run& run : runs) {
    PYCOMM_UNROLL
    for (const float v : run.v) {
      const uint32_t magnitude = __float_as_uint(v) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  PYCOMM_UNROLL
  for (int bits = kWarp / 2; bits > 0; bits /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, bits);
    largest = other > largest ? other : largest;
  }
  return __uint_as_float(largest > 0x7f800000u ? 0x7f800000u : largest);
}

struct Operands {
  float* dst;
  void* message;
  float* residual;
  const void* const* srcs;
};

// Writes the message, what it does not say, and what it says.
template <class F>
PYCOMM_DEVICE void encode(const Operands& to, const Run (&runs)[kRuns], const Place& first) {
  const float maximum = block_maximum(runs);
  auto* const bytes = static_cast<unsigned char*>(to.message);
  if (first.at % kBlockElems == 0) reinterpret_cast<float*>(bytes)[first.block()] = maximum;
  const Scale s = block_scale<F>(maximum);
  const bool not_finite = s.inverse != s.inverse;
  PYCOMM_UNROLL
  for (int j = 0; j < kRuns; ++j) {
    const Place place = first.next(j);
    typename F::Store codes[kRunElems];
    Run said, lost;
    PYCOMM_UNROLL
    for (int i = 0; i < kRunElems; ++i) {
      const float x = runs[j].v[i];
      codes[i] = F::encode(s.multiplier == 0.0f ? 0.0f : x * s.multiplier);
      said.v[i] = F::decode(codes[i]) * s.inverse;
      lost.v[i] = not_finite ? 0.0f : x - said.v[i];
    }
    if (place.at >= place.n) continue;
    Word<F> word;
    memcpy(&word, codes, sizeof word);
    *reinterpret_cast<Word<F>*>(bytes + word_begin<F>(place)) = word;
    if (to.residual != nullptr) store_run(to.residual, place, lost);
    if (to.dst != nullptr) store_run(to.dst, place, said);
  }
}

// There is a kernel for a sum of one source that is not coded and is encoded, one for a sum of one source
// that is decoded, and one for the rest.
enum class Pass { kEncode, kDecode, kReduce };

template <class F>
PYCOMM_DEVICE Run reduced_run(const BlockTable& table, const Operands& operands, const Place& place,
                              const Param<float>& param) {
  Run own{}, before{};
  if (table.plain >= 0) own = load_run(static_cast<const float*>(operands.srcs[table.plain]), place);
  if (operands.residual != nullptr) before = load_run(operands.residual, place);
  Run v = reduced<F>(operands.srcs, table.n_srcs, table.plain, own, place);
  PYCOMM_UNROLL
  for (float& x : v.v) x = ScaledSum<Plain<float>>::finish(x, param);
  return operands.residual != nullptr ? add(before, v) : v;
}

template <class F, Pass kPass>
PYCOMM_DEVICE void load_block(const BlockTable& table, const Operands& operands, const Place& first,
                              const Param<float>& param, Run (&runs)[kRuns]) {
  if constexpr (kPass == Pass::kDecode) {
    Coded<F> coded[kRuns];
    PYCOMM_UNROLL
    for (int j = 0; j < kRuns; ++j) coded[j] = load_coded<F>(operands.srcs[0], first.next(j));
    PYCOMM_UNROLL
    for (int j = 0; j < kRuns; ++j) runs[j] = decode<F>(coded[j]);
  } else if constexpr (kPass == Pass::kEncode) {
    PYCOMM_UNROLL
    for (int j = 0; j < kRuns; ++j)
      runs[j] = load_run(static_cast<const float*>(operands.srcs[0]), first.next(j));
    if (operands.residual == nullptr) return;
    PYCOMM_UNROLL
    for (int j = 0; j < kRuns; ++j) runs[j] = add(load_run(operands.residual, first.next(j)), runs[j]);
  } else {
    // One after the other, for half the registers; shifted, since registers have no index.
    PYCOMM_NO_UNROLL
    for (int j = 0; j < kRuns; ++j) {
      runs[0] = runs[1];
      runs[1] = reduced_run<F>(table, operands, first.next(j), param);
    }
  }
}

template <class F, Pass kPass>
PYCOMM_DEVICE void do_block(const BlockTable& table, const Operands& operands, const Place& first,
                            const Param<float>& param) {
  Run runs[kRuns]{};
  load_block<F, kPass>(table, operands, first, param, runs);
  if (kPass != Pass::kDecode && operands.message != nullptr) {
    encode<F>(operands, runs, first);
  } else {
    PYCOMM_UNROLL
    for (int j = 0; j < kRuns; ++j) store_run(operands.dst, first.next(j), runs[j]);
  }
}

template <class F, Pass kPass>
PYCOMM_DEVICE void do_table(const BlockTable& table, const Param<float>& param) {
  constexpr int kBlock = static_cast<int>(kBlockElems);
  const uint32_t n_chunks = table.segments.end[table.segments.n - 1];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = find_chunk(table.segments, c, kChunkElems);
    const void* const* const pointers = table.pointers + chunk.segment * (kOwnPointers + table.n_srcs);
    const Operands operands{static_cast<float*>(const_cast<void*>(pointers[0])),
                            const_cast<void*>(pointers[1]),
                            static_cast<float*>(const_cast<void*>(pointers[2])), pointers + kOwnPointers};
    // A warp's lanes stay together, since they shuffle.
    for (int at = warp * kBlock; at < chunk.n_elems; at += static_cast<int>(kThreads) / kWarp * kBlock) {
      const Place first{table.segments.n_elems[chunk.segment],
                        chunk.begin + static_cast<size_t>(at + lane * kRunElems)};
      do_block<F, kPass>(table, operands, first, param);
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads, 3)
    encode_kernel(const __grid_constant__ BlockTable table, const __grid_constant__ Param<float> param) {
  do_table<F, Pass::kEncode>(table, param);
}
template <class F>
__global__ void __launch_bounds__(kThreads, 4)
    decode_kernel(const __grid_constant__ BlockTable table, const __grid_constant__ Param<float> param) {
  do_table<F, Pass::kDecode>(table, param);
}
template <class F>
__global__ void __launch_bounds__(kThreads, 2)
    decode_reduce_kernel(const __grid_constant__ BlockTable table,
                         const __grid_constant__ Param<float> param) {
  do_table<F, Pass::kReduce>(table, param);
}

// ---- on the host

using Kernel = void (*)(BlockTable, Param<float>);

template <class F>
Kernel kernel_for(Pass pass) {
  switch (pass) {
    case Pass::kEncode: return encode_kernel<F>;
    case Pass::kDecode: return decode_kernel<F>;
    case Pass::kReduce: return decode_reduce_kernel<F>;
  }
  return nullptr;
}

Kernel find_kernel(DType code, ReduceOp op, std::span<const CodedSegment> segments, int n_srcs, int plain) {
  const auto is_encoded = [](const CodedSegment& s) { return s.message != nullptr; };
  Pass pass = Pass::kReduce;
  const bool of_one = op == ReduceOp::kSum && n_srcs == 1;
  if (of_one && plain == 0 && std::all_of(segments.begin(), segments.end(), is_encoded)) pass = Pass::kEncode;
  if (of_one && plain < 0 && std::none_of(segments.begin(), segments.end(), is_encoded)) pass = Pass::kDecode;
  return code == DType::kInt8         ? kernel_for<BlockInt8>(pass)
         : code == DType::kFloat8E4M3 ? kernel_for<BlockFloat8>(pass)
         : code == DType::kFloat16    ? kernel_for<BlockFloat16>(pass)
                                      : kernel_for<BlockBFloat16>(pass);
}

Status refuse(const std::string& why) { return Status::error(Code::kValue, "cuda reduce_coded: " + why); }

Status check(DType code, ReduceOp op, std::span<const CodedSegment> segments, int n_srcs, int plain) {
  if (!cuda::blocks_supported(code)) {
    return refuse(format("codes of %s; expected int8, float8_e4m3fn, float16 or bfloat16", dtype_name(code)));
  }
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg)
    return refuse(format("%s; expected sum or avg", reduce_op_name(op)));
  if (n_srcs < 1 || n_srcs > kMaxReduceSrcs)
    return refuse(format("%d sources; expected 1 to %d", n_srcs, kMaxReduceSrcs));
  if (plain < -1 || plain >= n_srcs)
    return refuse(format("source %d of %d is not coded; expected one of them, or -1", plain, n_srcs));
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kPackBytes == 0; };
  for (const CodedSegment& s : segments) {
    bool all = is_aligned(s.message);
    for (int k = 0; k < n_srcs; ++k) all &= k == plain || is_aligned(s.srcs[k]);
    if (!all) return refuse("messages must be aligned to 16 bytes");
    if (s.message == nullptr && s.residual != nullptr) return refuse("a residual goes with a message only");
  }
  return {};
}

}  // namespace

bool blocks_supported(DType code) {
  return code == DType::kInt8 || code == DType::kFloat8E4M3 || code == DType::kFloat16 ||
         code == DType::kBFloat16;
}

Status reduce_coded(DType code, ReduceOp op, std::span<const CodedSegment> segments, int n_srcs, int plain,
                    double scalar, Stream stream) {
  PYCOMM_RETURN_IF_ERROR(check(code, op, segments, n_srcs, plain));
  const Kernel kernel = find_kernel(code, op, segments, n_srcs, plain);
  const auto enqueue = [&](const BlockTable& table) -> Status {
    unsigned n_blocks = 0;
    PYCOMM_RETURN_IF_ERROR(blocks_for(table.segments.n_chunks(), &n_blocks));
    return check_cuda(launch(kernel, n_blocks, kThreads, stream, table, make_param<float>(op, scalar)),
                      format("cuda reduce_coded: %s", dtype_name(code)));
  };
  BlockTable table;
  table.n_srcs = n_srcs;
  table.plain = plain;
  for (const CodedSegment& s : segments) {
    if (s.n_elems == 0) continue;
    const bool room = (table.segments.n + 1) * (n_srcs + kOwnPointers) <= kMaxPointers;
    if (!room || !table.segments.add(s.n_elems, kChunkElems)) {
      if (table.segments.n > 0) PYCOMM_RETURN_IF_ERROR(enqueue(table));
      table.segments.n = 0;
      if (!table.segments.add(s.n_elems, kChunkElems))
        return refuse(format("a segment of %zu elements is too long", s.n_elems));
    }
    const void** pointers = table.pointers + (table.segments.n - 1) * (n_srcs + kOwnPointers);
    *pointers++ = s.dst;
    *pointers++ = s.message;
    *pointers++ = s.residual;
    for (int k = 0; k < n_srcs; ++k) *pointers++ = s.srcs[k];
  }
  return table.segments.n > 0 ? enqueue(table) : Status();
}

}  // namespace pycomm::cuda
