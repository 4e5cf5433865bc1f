// The collectives that peers' memory has not, made of those that it has, with more traffic than NCCL's: what
// serves where there is no NCCL, several ranks share a GPU, or messages are small.
//
//   reduce           an all_reduce whose result only the root keeps
//   gather, scatter  an all_gather that only the root keeps; a broadcast of which each rank keeps its part
//   uneven parts     equal ones of the longest's length, copied in and out
#include "engine/cuda/device_impl.h"
#include "engine/cuda/rounds_binding.h"

namespace pycomm {

size_t DeviceEngine::Impl::staged_bytes(const Call& call) const {
  const size_t size = dtype_size(call.sig.dtype);
  const CallParts parts(call, link.n_ranks);
  const bool root = link.rank == call.sig.root;
  const uint64_t longest = cuda::aligned(parts.longest * size);
  const uint64_t all = parts.longest * size * static_cast<uint64_t>(link.n_ranks);
  switch (call.sig.kind) {
    case CallKind::kReduce: return root ? 0 : call.sig.count * size;
    case CallKind::kReduceScatter: return parts.equal ? 0 : cuda::aligned(all) + longest;
    case CallKind::kAllGather: return parts.equal ? 0 : longest + all;
    case CallKind::kGather: return root && parts.equal ? 0 : longest + all;
    case CallKind::kScatter: return root ? 0 : call.sig.count * size;
    case CallKind::kAllReduce:
    case CallKind::kBroadcast:
    case CallKind::kAllToAll:
    case CallKind::kBarrier:
    case CallKind::kRefused: break;
  }
  return 0;
}

Status DeviceEngine::Impl::by_peers(const Call& call, const Plain& plain, std::byte* scratch) {
  const Signature& sig = call.sig;
  const size_t size = dtype_size(sig.dtype);
  const bool root = link.rank == sig.root;
  const CallParts parts(call, link.n_ranks);
  const auto mine = static_cast<size_t>(link.rank);
  const uint64_t n = sig.count, part = parts.longest, part_bytes = part * size;
  const double scalar = sig.op == ReduceOp::kAvg ? link.n_ranks : call.scalar;
  const PeerWay way = sig.algorithm == static_cast<uint8_t>(DeviceWay::kPeerOneShot)   ? PeerWay::kOneShot
                      : sig.algorithm == static_cast<uint8_t>(DeviceWay::kPeerTwoShot) ? PeerWay::kTwoShot
                                                                                       : PeerWay::kAuto;
  const auto each = [&](const auto& fn) {  // of the ranks: where its part lies among unequal and equal ones
    for (size_t q = 0; q < parts.len.size(); q++)
      PYCOMM_RETURN_IF_ERROR(fn(parts.start[q] * size, q * part_bytes, parts.len[q] * size));
    return Status();
  };
  switch (sig.kind) {
    case CallKind::kAllReduce:
      return peers->all_reduce(plain.in, plain.out, n, sig.dtype, sig.op, scalar, way, stream());
    case CallKind::kReduce:
      return peers->all_reduce(plain.in, root ? plain.out : scratch, n, sig.dtype, sig.op, scalar, way,
                               stream());
    case CallKind::kReduceScatter: {
      if (parts.equal)
        return peers->reduce_scatter(plain.in, plain.out, part, sig.dtype, sig.op, scalar, stream());
      std::byte* const own = scratch + cuda::aligned(part_bytes * parts.len.size());
      PYCOMM_RETURN_IF_ERROR(each([&](uint64_t uneven, uint64_t even, uint64_t n_bytes) {
        return copy(scratch + even, plain.in + uneven, n_bytes);
      }));
      PYCOMM_RETURN_IF_ERROR(peers->reduce_scatter(scratch, own, part, sig.dtype, sig.op, scalar, stream()));
      return copy(plain.out, own, parts.len[mine] * size);
    }
    case CallKind::kAllGather:
    case CallKind::kGather: {
      const bool keep = sig.kind == CallKind::kAllGather || root;
      if (parts.equal && keep) return peers->all_gather(plain.in, plain.out, part_bytes, stream());
      std::byte* const all = scratch + cuda::aligned(part_bytes);
      PYCOMM_RETURN_IF_ERROR(copy(scratch, plain.in, parts.len[mine] * size));
      PYCOMM_RETURN_IF_ERROR(peers->all_gather(scratch, all, part_bytes, stream()));
      if (!keep) return Status();
      return each([&](uint64_t uneven, uint64_t even, uint64_t n_bytes) {
        return copy(plain.out + uneven, all + even, n_bytes);
      });
    }
    case CallKind::kScatter: {
      std::byte* const whole = root ? const_cast<std::byte*>(plain.in) : scratch;
      PYCOMM_RETURN_IF_ERROR(peers->broadcast(whole, n * size, sig.root, PeerWay::kAuto, stream()));
      return copy(plain.out, whole + parts.start[mine] * size, parts.len[mine] * size);
    }
    case CallKind::kBroadcast:
      if (root) PYCOMM_RETURN_IF_ERROR(copy(plain.out, plain.in, n * size));
      return peers->broadcast(plain.out, n * size, sig.root, way, stream());
    case CallKind::kAllToAll:
    case CallKind::kBarrier:
    case CallKind::kRefused: break;
  }
  return Status::error(Code::kSystem, "not a collective of peers' memory");
}

}  // namespace pycomm
