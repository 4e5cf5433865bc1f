// all_reduce and reduce_scatter over peers' memory (peer.h): T over the ranks' elements, in rank order.
//
// What differs between the kinds is which slice a rank reduces and to whom it writes it. For the sums of
// training the number of ranks is known to the compiler, so that the loads of all peers are under way
// together; the rest takes one rank after another through tree_of(). Sources are aligned to 16 bytes (staged
// data and places are), `out` may lie anywhere. Cost: n reads and one write per element of the slice,
// two-shot n writes.
#include "kernels/cuda/chunks.cuh"
#include "kernels/cuda/ops_table.cuh"
#include "kernels/cuda/peer.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kLevels = 3;  // of tree_of: up to 15 sources
static_assert(kMaxPeers < 1 << (kLevels + 1));

struct Pointers {
  const char* sources[kMaxPeers];
  char* destinations[kMaxPeers];
  int n_destinations;
};

// By one thread per rank; the caller synchronises the block.
PYCOMM_DEVICE void find_pointers(const PeerCall& call, const PeerShared& shared, uint64_t number,
                                 Pointers& pointers) {
  const int k = static_cast<int>(threadIdx.x);
  if (k >= call.n_ranks) return;
  const int slice = call.kind == PeerKind::kOneShot ? 0 : call.rank;
  pointers.sources[k] = source(call, shared, number, k, slice);
  const bool to_all = call.kind == PeerKind::kTwoShot && !call.push;  // pushed, finish() hands it out
  if (to_all) {
    // The neighbour first: the ranks write to different ones.
    const int to = (call.rank + 1 + k) % call.n_ranks;
    pointers.destinations[k] = destination(call, shared, to, slice);
  } else if (k == 0) {
    const bool two_shot = call.kind == PeerKind::kTwoShot;
    pointers.destinations[0] = two_shot ? destination(call, shared, call.rank, slice) : call.out;
  }
  if (k == 0) pointers.n_destinations = to_all ? call.n_ranks : 1;
}

PYCOMM_DEVICE void write_pack(const Pointers& pointers, uint64_t at, const Pack& pack) {
  PYCOMM_NO_UNROLL
  for (int d = 0; d < pointers.n_destinations; ++d) store_anywhere(pointers.destinations[d] + at, pack);
}

template <class O>
PYCOMM_DEVICE void reduce_element(const Pointers& pointers, int n, uint64_t at, const typename O::P& param) {
  using F = typename O::Format;
  using S = typename F::Store;
  const auto load = [&](int k) {
    return O::prepare(F::decode(load_element<S>(pointers.sources[k] + at)), param);
  };
  const auto v = tree_of<kLevels, typename F::Acc>(n, load, Combine<O>{param});
  const auto element = static_cast<S>(F::encode(O::finish(v, param)));
  PYCOMM_NO_UNROLL
  for (int d = 0; d < pointers.n_destinations; ++d) store_element<S>(pointers.destinations[d] + at, element);
}

// Packs p, p + stride, …: U of them are loaded before any is computed.
template <class O, int N, int U>
PYCOMM_DEVICE void reduce_packs(const Pointers& pointers, uint64_t p, uint64_t stride,
                                const typename O::P& param) {
  Pack in[U][N];
  PYCOMM_UNROLL
  for (int u = 0; u < U; ++u) {
    PYCOMM_UNROLL
    for (int k = 0; k < N; ++k) {
      in[u][k] = load_pack(pointers.sources[k] + (p + static_cast<uint64_t>(u) * stride) * kPackBytes);
    }
  }
  PYCOMM_UNROLL
  for (int u = 0; u < U; ++u) {
    Kept<O> kept[N];
    PYCOMM_UNROLL
    for (int k = 0; k < N; ++k) kept[k] = prepared<O>(in[u][k], param);
    write_pack(pointers, (p + static_cast<uint64_t>(u) * stride) * kPackBytes,
               finished<O>(tree<N>(kept, Combine<O>{param}), param));
  }
}

// This block's part of the slice. Every thread loads all sources of an element before it stores it, so a
// destination may be a source.
template <class O, int N>
PYCOMM_DEVICE void reduce_part(const Pointers& pointers, int n_ranks, uint64_t n_bytes,
                               const typename O::P& param) {
  const uint64_t n_packs = n_bytes / kPackBytes, stride = uint64_t{gridDim.x} * blockDim.x;
  uint64_t p = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if constexpr (N > 0) {
    constexpr int U = N <= 2 ? 4 : N <= 4 ? 2 : 1;
    PYCOMM_NO_UNROLL
    for (; p + (U - 1) * stride < n_packs; p += U * stride) reduce_packs<O, N, U>(pointers, p, stride, param);
    if constexpr (U > 1) {
      PYCOMM_NO_UNROLL
      for (; p < n_packs; p += stride) reduce_packs<O, N, 1>(pointers, p, stride, param);
    }
  } else {
    PYCOMM_NO_UNROLL
    for (; p < n_packs; p += stride) {
      const auto load = [&](int k) {
        return prepared<O>(load_pack(pointers.sources[k] + p * kPackBytes), param);
      };
      write_pack(pointers, p * kPackBytes,
                 finished<O>(tree_of<kLevels, Kept<O>>(n_ranks, load, Combine<O>{param}), param));
    }
  }
  if (p == n_packs) {
    constexpr uint64_t kStep = sizeof(typename O::Format::Store);
    PYCOMM_NO_UNROLL
    for (uint64_t at = n_packs * kPackBytes; at < n_bytes; at += kStep) {
      reduce_element<O>(pointers, n_ranks, at, param);
    }
  }
}

template <class O, int N>
__global__ void __launch_bounds__(kMaxPeerThreads, 1)
    peer_reduce_kernel(const __grid_constant__ PeerCall call, const __grid_constant__ typename O::P param) {
  __shared__ PeerShared shared;
  __shared__ Pointers pointers;
  uint64_t number;
  if (!enter(call, shared, &number)) return;
  stage(call, number);
  if (!meet(call, shared, number, 0)) return;
  find_pointers(call, shared, number, pointers);
  __syncthreads();
  reduce_part<O, N>(pointers, N > 0 ? N : call.n_ranks,
                    slice_length(call, call.kind == PeerKind::kOneShot ? 0 : call.rank), param);
  finish(call, shared, number);
}

// ---- on the host

struct PeerEntry {
  cudaError_t (*launch)(const PeerCall& call, ReduceOp op, double scalar, unsigned n_blocks,
                        unsigned n_threads, Stream stream) = nullptr;
};

template <class O, int N>
cudaError_t launch_one(const PeerCall& call, ReduceOp op, double scalar, unsigned n_blocks,
                       unsigned n_threads, Stream stream) {
  typename O::P param;
  set_param(param, op, scalar);
  return launch_resident(peer_reduce_kernel<O, N>, n_blocks, n_threads, stream, call, param);
}

template <class O>
cudaError_t launch_hot(const PeerCall& call, ReduceOp op, double scalar, unsigned n_blocks,
                       unsigned n_threads, Stream stream) {
  constexpr decltype(&launch_one<O, 0>) kByRanks[kMaxPeers + 1] = {
      launch_one<O, 0>, launch_one<O, 0>, launch_one<O, 2>, launch_one<O, 3>, launch_one<O, 4>,
      launch_one<O, 5>, launch_one<O, 6>, launch_one<O, 7>, launch_one<O, 8>};
  return kByRanks[call.n_ranks](call, op, scalar, n_blocks, n_threads, stream);
}

struct Maker {
  using Entry = PeerEntry;
  template <class O>
  static Entry make(size_t) {
    if constexpr (kIsTrainingSum<O>) {
      return {launch_hot<O>};
    } else {
      return {launch_one<O, 0>};
    }
  }
};

}  // namespace

Status peer_reduce(const PeerCall& call, DType dtype, ReduceOp op, double scalar, unsigned n_blocks,
                   unsigned n_threads, Stream stream) {
  const PeerEntry entry = OpTable<Maker>::find(dtype, op);
  if (entry.launch == nullptr) {
    return Status::error(Code::kValue, format("cuda peer_reduce: %s is not defined for %s",
                                              reduce_op_name(op), dtype_name(dtype)));
  }
  switch (call.kind) {
    case PeerKind::kOneShot:
    case PeerKind::kTwoShot:
    case PeerKind::kReduceScatter: break;
    case PeerKind::kAllGather:
    case PeerKind::kBroadcast:
    case PeerKind::kBroadcastTwoShot:
      return Status::error(Code::kValue, "cuda peer_reduce: not a kind that reduces");
  }
  return check_cuda(entry.launch(call, op, scalar, n_blocks, n_threads, stream),
                    format("cuda peer_reduce: %s of %s", reduce_op_name(op), dtype_name(dtype)));
}

}  // namespace pycomm::cuda
