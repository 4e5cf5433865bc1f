// all_gather and broadcast over peers' memory (peer.h): bytes are copied, and nothing is computed.
//
// all_gather: every rank reads all inputs, its neighbour's first, so that the ranks read from different ones.
// broadcast: every rank reads the root's data, which leaves the root n - 1 times; or, two-shot, rank r reads
// slice r and writes it to all, so that it leaves the root once and every rank writes n - 1 slices. The root
// takes nothing: what it gives is there.
#include "kernels/cuda/chunks.cuh"
#include "kernels/cuda/peer.cuh"

namespace pycomm::cuda {
namespace {

PYCOMM_DEVICE void gather(const PeerCall& call, const PeerShared& shared, uint64_t number) {
  for (int d = 0; d < call.n_ranks; ++d) {
    const int k = (call.rank + 1 + d) % call.n_ranks;
    char* const to = call.out + static_cast<uint64_t>(k) * call.out_stride;
    const char* const from = k == call.rank ? call.in : source(call, shared, number, k, 0);
    if (to != from) copy_part(to, from, slice_length(call, 0));
  }
}

// Slice `rank` of the root's data, to everybody else's result; pushed, to one after another.
PYCOMM_DEVICE void spread(const PeerCall& call, const PeerShared& shared, uint64_t number) {
  if (call.push) {
    const char* const from = source(call, shared, number, call.root, call.rank);
    PYCOMM_NO_UNROLL
    for (int d = 0; d < call.n_ranks; ++d) {
      const int k = (call.rank + d) % call.n_ranks;
      if (k != call.root)
        copy_part(destination(call, shared, k, call.rank), from, slice_length(call, call.rank));
    }
    return;
  }
  const auto to_all = [&](const auto& write) {
    for (int d = 0; d < call.n_ranks; ++d) {
      const int k = (call.rank + d) % call.n_ranks;
      if (k != call.root) write(destination(call, shared, k, call.rank));
    }
  };
  read_part(
      source(call, shared, number, call.root, call.rank), slice_length(call, call.rank),
      [&](uint64_t at, const Pack& pack) { to_all([&](char* to) { store_pack(to + at, pack); }); },
      [&](uint64_t at, char byte) { to_all([&](char* to) { to[at] = byte; }); });
}

__global__ void __launch_bounds__(kMaxPeerThreads, 1)
    peer_copy_kernel(const __grid_constant__ PeerCall call) {
  __shared__ PeerShared shared;
  uint64_t number;
  if (!enter(call, shared, &number)) return;
  stage(call, number);
  if (!meet(call, shared, number, 0)) return;
  if (call.kind == PeerKind::kAllGather) {
    gather(call, shared, number);
  } else if (call.kind == PeerKind::kBroadcastTwoShot) {
    spread(call, shared, number);
  } else if (call.rank != call.root) {
    copy_part(call.out, source(call, shared, number, call.root, 0), slice_length(call, 0));
  }
  finish(call, shared, number);
}

}  // namespace

Status peer_copy(const PeerCall& call, unsigned n_blocks, unsigned n_threads, Stream stream) {
  switch (call.kind) {
    case PeerKind::kAllGather:
    case PeerKind::kBroadcast:
    case PeerKind::kBroadcastTwoShot: break;
    case PeerKind::kOneShot:
    case PeerKind::kTwoShot:
    case PeerKind::kReduceScatter:
      return Status::error(Code::kValue, "cuda peer_copy: not a kind that copies");
  }
  return check_cuda(launch_resident(peer_copy_kernel, n_blocks, n_threads, stream, call), "cuda peer_copy");
}

}  // namespace pycomm::cuda
