// What the kernels of peer.h share: meeting the peers, finding their memory, copying a block's part.
//
// A part: packs of 16 bytes are dealt to threads in turn, pack p to block (p / threads) % blocks, the same
// for every copy and reduction of a call on every rank; the incomplete pack at the end goes to the thread
// whose turn it is. So what a block reads of a peer was written by the peer's block of the same number, and
// meeting that one block is enough. Places are aligned to 16 bytes, the caller's tensors need not be.
//
// Order. The writes of a block's threads come before the flag (__syncthreads, then a release of system scope
// by one thread per peer); the reads of the peer's threads after it (acquire, then __syncthreads). Halves of
// the staging need no second meeting: who writes a half again, two calls later, has met every peer in the
// call between, which the peer entered after its kernel of the call before had ended.
#pragma once

#include "kernels/cuda/formats.cuh"
#include "kernels/cuda/peer.h"

namespace pycomm::cuda {

constexpr uint32_t kPollsPerLook = 64;  // at abort, which lies behind PCIe

struct PeerShared {
  uint64_t places[kMaxPeers][2];  // in, out
  unsigned blamed;                // not 0: the block gives up
};

PYCOMM_DEVICE PeerControl& control_of(const PeerCall& call, int rank) {
  return *reinterpret_cast<PeerControl*>(call.bases[rank]);
}

// ---- places

PYCOMM_DEVICE bool is_tensor(uint64_t place) { return (place & 1) != 0; }

PYCOMM_DEVICE char* at_place(const PeerCall& call, int rank, uint64_t place) {
  return call.bases[rank] + (place & ~uint64_t{1});
}

PYCOMM_DEVICE uint64_t half_offset(const PeerCall& call, uint64_t number) {
  return call.staging + (number & 1) * call.half_bytes;
}

PYCOMM_DEVICE char* half_of(const PeerCall& call, int rank, uint64_t number) {
  return call.bases[rank] + half_offset(call, number);
}

PYCOMM_DEVICE uint64_t slice_length(const PeerCall& call, int slice) {
  const uint64_t begin = static_cast<uint64_t>(slice) * call.slice_bytes;
  if (begin >= call.total_bytes) return 0;
  return call.total_bytes - begin < call.slice_bytes ? call.total_bytes - begin : call.slice_bytes;
}

// Where this rank reads a slice of rank k's input, after the first meeting.
PYCOMM_DEVICE const char* source(const PeerCall& call, const PeerShared& shared, uint64_t number, int k,
                                 int slice) {
  if (call.push) {
    return half_of(call, call.rank, number) + static_cast<uint64_t>(k) * call.staging_stride;
  }
  const uint64_t place = shared.places[k][0];
  const uint64_t stride = is_tensor(place) ? call.in_stride : call.staging_stride;
  return at_place(call, k, place) + static_cast<uint64_t>(slice) * stride;
}

// Where this rank writes a slice of rank k's result (two-shot), after the first meeting.
PYCOMM_DEVICE char* destination(const PeerCall& call, const PeerShared& shared, int k, int slice) {
  return at_place(call, k, shared.places[k][1]) + static_cast<uint64_t>(slice) * call.slice_bytes;
}

// ---- entering, meeting, leaving: all threads of a block

// Never 0, which is what a slot holds at first.
PYCOMM_DEVICE uint64_t flag_of(const PeerCall& call, uint64_t number, int phase) {
  return ((number + 1) << 2 | static_cast<uint64_t>(phase)) << kHashBits | call.hash;
}

// Waits until a peer's flag is at or behind `wanted`.
PYCOMM_DEVICE PeerTrouble wait_for(const PeerSlot& peer, uint64_t wanted, const uint64_t* abort) {
  for (uint32_t n_polls = 1;; ++n_polls) {
    const uint64_t seen = load_acquire_system(&peer.flag);
    if (seen >> kHashBits >= wanted >> kHashBits) {
      // A peer that is in a later call has compared this one.
      const bool same_call = seen >> (kHashBits + 2) == wanted >> (kHashBits + 2);
      const uint64_t mask = (uint64_t{1} << kHashBits) - 1;
      return same_call && (seen & mask) != (wanted & mask) ? PeerTrouble::kDiffers : PeerTrouble::kNone;
    }
    if (n_polls % kPollsPerLook == 0) {
      if (load_relaxed_system(&peer.stopped) != 0) return PeerTrouble::kStopped;
      if (load_relaxed_system(abort) != 0) return PeerTrouble::kAbsent;
    }
    pause_polling(n_polls);
  }
}

// Peers that wait for this block, or for those of other launches that would have had its number, give up too.
// `left` is a release, so that the host sees who is blamed.
PYCOMM_DEVICE void give_up(const PeerCall& call, uint64_t number, unsigned blamed) {
  const int k = static_cast<int>(threadIdx.x);
  if (k < call.n_ranks && k != call.rank) {
    PYCOMM_NO_UNROLL
    for (unsigned b = blockIdx.x; b < kMaxPeerBlocks; b += gridDim.x) {
      store_relaxed_system(&control_of(call, k).slots[b][call.rank].stopped, blamed);
    }
  }
  if (threadIdx.x == 0) store_release_system(&call.words->left[blockIdx.x], number + 1);
}

// And this rank's later calls end at once.
PYCOMM_DEVICE void stop(const PeerCall& call, uint64_t number, unsigned blamed) {
  if (threadIdx.x == 0) {
    store_relaxed_system(&control_of(call, call.rank).stopped, blamed);
    store_relaxed_system(&call.words->blamed[blockIdx.x], blamed);
    store_relaxed_system(&call.words->label, call.label);
    store_release_system(&call.words->stopped, number + 1);
  }
  give_up(call, number, blamed);
}

// False: this rank has stopped in an earlier call.
PYCOMM_DEVICE bool enter(const PeerCall& call, PeerShared& shared, uint64_t* number) {
  PeerControl& own = control_of(call, call.rank);
  *number = own.calls[blockIdx.x];
  if (threadIdx.x == 0) {
    shared.blamed = static_cast<unsigned>(load_relaxed_system(&own.stopped));
    store_relaxed_system(&call.words->entered[blockIdx.x], *number + 1);
  }
  __syncthreads();
  if (shared.blamed == 0) return true;
  give_up(call, *number, shared.blamed);
  return false;
}

// Every peer's block of this number has come here, and what its threads wrote before can be read. In phase 0
// places are exchanged. False: the call is over.
PYCOMM_DEVICE_CALL bool meet(const PeerCall& call, PeerShared& shared, uint64_t number, int phase) {
  __syncthreads();
  const int k = static_cast<int>(threadIdx.x);
  if (k < call.n_ranks) {
    const uint64_t half = half_offset(call, number);
    const uint64_t in = call.in_place != 0 ? call.in_place : half;
    const uint64_t out = call.out_place != 0 ? call.out_place : half + call.result;
    if (k == call.rank) {
      shared.places[k][0] = in;
      shared.places[k][1] = out;
    } else {
      PeerSlot& theirs = control_of(call, k).slots[blockIdx.x][call.rank];
      PeerSlot& ours = control_of(call, call.rank).slots[blockIdx.x][k];
      if (phase == 0) {
        theirs.places[number & 1][0] = in;
        theirs.places[number & 1][1] = out;
      }
      store_release_system(&theirs.flag, flag_of(call, number, phase));
      const PeerTrouble trouble = wait_for(ours, flag_of(call, number, phase), &call.words->abort);
      if (trouble != PeerTrouble::kNone) {
        if (trouble == PeerTrouble::kStopped) {
          store_relaxed_system(&call.words->told[k], load_relaxed_system(&ours.stopped));
        }
        atomicOr(&shared.blamed, 1u | 1u << (8 * static_cast<int>(trouble) + k));
      } else if (phase == 0) {
        shared.places[k][0] = ours.places[number & 1][0];
        shared.places[k][1] = ours.places[number & 1][1];
      }
    }
  }
  __syncthreads();
  if (shared.blamed == 0) return true;
  stop(call, number, shared.blamed);
  return false;
}

// Does somebody read a tensor where it lies? Then nobody may go on before all have read.
PYCOMM_DEVICE bool reads_tensors(const PeerCall& call, const PeerShared& shared) {
  bool any = false;
  PYCOMM_NO_UNROLL
  for (int k = 0; k < call.n_ranks; ++k) any |= is_tensor(shared.places[k][0]);
  return any;
}

// Blocks that this launch does not have are counted by those that it has.
PYCOMM_DEVICE void leave(const PeerCall& call, uint64_t number) {
  if (threadIdx.x != 0) return;
  PeerControl& own = control_of(call, call.rank);
  PYCOMM_NO_UNROLL
  for (unsigned b = blockIdx.x; b < kMaxPeerBlocks; b += gridDim.x) own.calls[b] = number + 1;
  store_relaxed_system(&call.words->left[blockIdx.x], number + 1);
}

// ---- copies

// 16 bytes in pieces of the largest unit that the address allows.
template <class U>
PYCOMM_DEVICE Pack load_pieces(const char* p) {
  U pieces[kPackBytes / sizeof(U)];
  PYCOMM_UNROLL
  for (size_t i = 0; i < kPackBytes / sizeof(U); ++i) pieces[i] = reinterpret_cast<const U*>(p)[i];
  Pack pack;
  memcpy(&pack, pieces, sizeof pack);
  return pack;
}
PYCOMM_DEVICE bool aligned_to(const void* p, size_t n_bytes) {
  return reinterpret_cast<uintptr_t>(p) % n_bytes == 0;
}

PYCOMM_DEVICE Pack load_anywhere(const char* p) {
  if (aligned_to(p, 16)) return load_pack(p);
  if (aligned_to(p, 4)) return load_pieces<uint32_t>(p);
  if (aligned_to(p, 2)) return load_pieces<uint16_t>(p);
  return load_pieces<uint8_t>(p);
}
// Called, since it is rare: every kernel of peer_reduce.cu has several.
PYCOMM_DEVICE_CALL void store_misaligned(char* p, Pack rest) {
  PYCOMM_NO_UNROLL
  for (int i = 0; i < 4; ++i, p += 4) {
    const uint32_t word = rest.word[0];  // not word[i], for which it would have to lie in memory
    rest = {{rest.word[1], rest.word[2], rest.word[3], 0}};
    if (aligned_to(p, 4)) {
      *reinterpret_cast<uint32_t*>(p) = word;
    } else if (aligned_to(p, 2)) {
      reinterpret_cast<uint16_t*>(p)[0] = static_cast<uint16_t>(word);
      reinterpret_cast<uint16_t*>(p)[1] = static_cast<uint16_t>(word >> 16);
    } else {
      PYCOMM_UNROLL
      for (int k = 0; k < 4; ++k) p[k] = static_cast<char>(word >> 8 * k);
    }
  }
}
PYCOMM_DEVICE void store_anywhere(char* p, const Pack& pack) {
  if (aligned_to(p, 16)) return store_pack(p, pack);
  store_misaligned(p, pack);
}

// This block's part of a copy; write(at, pack) stores 16 bytes at that offset, write_byte(at, byte) one.
template <class Write, class WriteByte>
PYCOMM_DEVICE void read_part(const char* src, uint64_t n_bytes, const Write& write,
                             const WriteByte& write_byte) {
  constexpr uint64_t kAtOnce = 4;
  const uint64_t n_packs = n_bytes / kPackBytes, stride = uint64_t{gridDim.x} * blockDim.x;
  uint64_t p = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (aligned_to(src, kPackBytes)) {
    PYCOMM_NO_UNROLL
    for (; p + (kAtOnce - 1) * stride < n_packs; p += kAtOnce * stride) {
      Pack packs[kAtOnce];
      PYCOMM_UNROLL
      for (uint64_t u = 0; u < kAtOnce; ++u) packs[u] = load_pack(src + (p + u * stride) * kPackBytes);
      PYCOMM_UNROLL
      for (uint64_t u = 0; u < kAtOnce; ++u) write((p + u * stride) * kPackBytes, packs[u]);
    }
  }
  PYCOMM_NO_UNROLL
  for (; p < n_packs; p += stride) write(p * kPackBytes, load_anywhere(src + p * kPackBytes));
  if (p == n_packs) {
    PYCOMM_NO_UNROLL
    for (uint64_t i = n_packs * kPackBytes; i < n_bytes; ++i) write_byte(i, src[i]);
  }
}

PYCOMM_DEVICE_CALL void copy_part(char* dst, const char* src, uint64_t n_bytes) {
  read_part(
      src, n_bytes, [&](uint64_t at, const Pack& pack) { store_anywhere(dst + at, pack); },
      [&](uint64_t at, char byte) { dst[at] = byte; });
}

// ---- before the first meeting, and after the last

PYCOMM_DEVICE bool cuts_input(PeerKind kind) {  // each rank gets another slice
  switch (kind) {
    case PeerKind::kTwoShot:
    case PeerKind::kReduceScatter:
    case PeerKind::kBroadcastTwoShot: return true;
    case PeerKind::kOneShot:
    case PeerKind::kAllGather:
    case PeerKind::kBroadcast: return false;
  }
  return false;
}

PYCOMM_DEVICE bool is_two_shot(PeerKind kind) {
  return kind == PeerKind::kTwoShot || kind == PeerKind::kBroadcastTwoShot;
}

PYCOMM_DEVICE_CALL void stage(const PeerCall& call, uint64_t number) {
  if (call.in == nullptr) return;
  if (!call.push && call.in_place != 0) return;
  const bool cut = cuts_input(call.kind);
  const int n_copies = call.push || cut ? call.n_ranks : 1;
  PYCOMM_NO_UNROLL
  for (int d = 0; d < n_copies; ++d) {  // pushed to one rank after another, or all to our own staging
    const int k = (call.rank + 1 + d) % call.n_ranks;
    const int to = call.push ? k : call.rank, at = call.push ? call.rank : cut ? d : 0;
    const int slice = !cut ? 0 : call.push ? k : d;
    copy_part(half_of(call, to, number) + static_cast<uint64_t>(at) * call.staging_stride,
              call.in + static_cast<uint64_t>(slice) * call.in_stride, slice_length(call, slice));
  }
}

// Pushed, two-shot: this rank's slice of the result, which lies in its own place, to one peer after another.
// Each thread takes what it wrote itself (see the first lines).
PYCOMM_DEVICE void hand_out(const PeerCall& call, const PeerShared& shared) {
  const char* const mine = destination(call, shared, call.rank, call.rank);
  PYCOMM_NO_UNROLL
  for (int d = 1; d < call.n_ranks; ++d) {
    const int k = (call.rank + d) % call.n_ranks;
    copy_part(destination(call, shared, k, call.rank), mine, slice_length(call, call.rank));
  }
}

// The second meeting, where the call needs one, and what peers have written into the staging: to `out`.
PYCOMM_DEVICE_CALL void finish(const PeerCall& call, PeerShared& shared, uint64_t number) {
  const bool two_shot = is_two_shot(call.kind);
  if (call.push && call.kind == PeerKind::kTwoShot) hand_out(call, shared);
  if (two_shot || reads_tensors(call, shared)) {
    if (!meet(call, shared, number, 1)) return;
  }
  leave(call, number);
  if (!two_shot || call.out == nullptr || call.out_place != 0) return;
  PYCOMM_NO_UNROLL
  for (int slice = 0; slice < call.n_ranks; ++slice) {
    copy_part(call.out + static_cast<uint64_t>(slice) * call.slice_bytes,
              destination(call, shared, call.rank, slice), slice_length(call, slice));
  }
}

}  // namespace pycomm::cuda
