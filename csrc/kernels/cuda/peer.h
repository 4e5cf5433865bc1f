// Collectives of 2 to 8 ranks whose GPUs map each other's memory: one kernel a rank does all of a call.
//
// Words. The *staging* of a rank is memory that all ranks map; it has two halves, which calls use in turn. A
// *place* names memory of a rank for its peers: its offset, bit 0 set for a tensor (else it is staging); 0 is
// none. A *slice* is the part of a message that one rank reduces. To *pull* is to read what the owner has
// staged, to *push* is to write into peers' memory, one peer at a time (better over PCIe).
// A *call* is one launch; calls are numbered by the device (so that a graph can replay them), and the number
// must be the same on all ranks: the same calls in the same order, on one stream per rank.
//
// Blocks do not wait for each other, only block b for block b of every peer, so all ranks launch the same
// number of blocks and threads, and a block stages exactly what its peers' same blocks read. A block *meets*
// its peers by writing a flag into each one's memory: phase of the call and a hash of its arguments, so calls
// that differ are seen. Whoever waits looks at PeerWords::abort; whoever gives up says why in PeerWords and
// tells its peers, whose kernels stop too; later calls of a rank that has stopped stop at once.
//
// The result is T over the ranks (docs/numerics.md), with the same bits as reduce() of kernels.h, whatever
// the kind, the number of blocks, and whether data was pulled, pushed or read where it lay. Cost:
// docs/cuda.md.
#pragma once

#include "kernels/cuda/kernels.h"

namespace pycomm::cuda {

inline constexpr int kMaxPeers = 8;
inline constexpr int kMaxPeerBlocks = 36;
inline constexpr unsigned kMaxPeerThreads = 512;

// ---- what lies where

// Of one block of the owner, written by one peer.
struct alignas(64) PeerSlot {
  uint64_t flag;          // ((call + 1) << 2 | phase) << kHashBits | hash
  uint64_t stopped;       // not 0: the peer waits for nobody any more, and blames these
  uint64_t places[2][2];  // [call & 1][in, out]: valid once the flag says that the peer has entered the call
};
inline constexpr int kHashBits = 20;

// At the start of a rank's memory, zero before the first call of any rank.
struct PeerControl {
  PeerSlot slots[kMaxPeerBlocks][kMaxPeers];
  uint64_t calls[kMaxPeerBlocks];  // how many are done; all blocks' are equal between calls
  uint64_t stopped;                // not 0: this rank's calls end at once, and blame these
};

enum class PeerTrouble : uint8_t {
  kNone,
  kAbsent,   // its flag had not come when the host said abort
  kStopped,  // it has given up
  kDiffers,  // it is in a call with other arguments
};

// Whom a block that gives up blames: a set of ranks for each trouble, rank r's bit at 8 * trouble + r. Bit 0
// is always set.
constexpr bool blames(uint64_t blamed, PeerTrouble trouble, int rank) {
  return (blamed >> (8 * static_cast<int>(trouble) + rank) & 1) != 0;
}

// In this rank's pinned host memory: how host and kernels speak. When `stopped` or the `left` of a block is
// read with acquire order, what it blames is there.
struct PeerWords {
  uint64_t abort;                    // by the host: stop waiting
  uint64_t entered[kMaxPeerBlocks];  // call + 1: the block has begun it
  uint64_t left[kMaxPeerBlocks];     // call + 1: the block waits for nobody in it any more
  uint64_t stopped;                  // call + 1 in which a block stopped; 0: none has
  uint64_t label;                    // PeerCall::label of that call
  uint64_t blamed[kMaxPeerBlocks];   // by each block
  uint64_t told[kMaxPeers];          // what a peer that had stopped blamed, 0: it had not, or nobody looked
};

// ---- a call

enum class PeerKind : uint8_t {
  kOneShot,           // all_reduce: every rank reduces everything
  kTwoShot,           // all_reduce: rank r reduces slice r and writes it to all
  kReduceScatter,     // rank r reduces slice r and keeps it
  kAllGather,         // every rank copies everybody's slice
  kBroadcast,         // every rank copies the root's data
  kBroadcastTwoShot,  // rank r copies slice r of the root's data to all
};

struct PeerCall {
  char* bases[kMaxPeers];  // where the memory of every rank is mapped here
  PeerWords* words;        // as the device sees them
  const char* in;          // null where this rank has no input
  char* out;
  uint64_t in_place, out_place;  // where peers find them: 16-byte aligned; 0: they go through the staging
  uint64_t slice_bytes;          // multiple of 16 where total_bytes is cut (two-shot), else what one rank has
  uint64_t total_bytes;          // of all slices; the last ones may be short or empty
  uint64_t in_stride;            // from slice to slice of `in`
  uint64_t out_stride;           // from slice to slice of `out` (kAllGather, two-shot)
  uint64_t staging_stride;       // from slice to slice in the staging: multiple of 16
  uint64_t staging;              // offset of its first half: multiple of 16
  uint64_t half_bytes;
  uint64_t result;  // where in a half peers write results (two-shot)
  uint64_t label;   // for the host's messages
  uint32_t hash;    // of all that must be alike on all ranks, below 2^kHashBits
  int rank, n_ranks, root;
  PeerKind kind;
  bool push;
};

// The number of staged bytes (of a half) that the call needs; result is where its results begin.
constexpr uint64_t peer_staged_bytes(PeerKind kind, bool push, int n_ranks, uint64_t staging_stride,
                                     uint64_t* result) {
  const auto n = static_cast<uint64_t>(n_ranks);
  switch (kind) {
    case PeerKind::kOneShot:
    case PeerKind::kAllGather: return *result = (push ? n : 1) * staging_stride;
    case PeerKind::kBroadcast: return *result = (push ? n : 1) * staging_stride;
    case PeerKind::kReduceScatter: return *result = n * staging_stride;
    case PeerKind::kTwoShot:
    case PeerKind::kBroadcastTwoShot: return (*result = n * staging_stride) + n * staging_stride;
  }
  return *result = 0;
}

// kOneShot, kTwoShot, kReduceScatter. `scalar` as in kernels/reduce.h: avg divides by it.
Status peer_reduce(const PeerCall& call, DType dtype, ReduceOp op, double scalar, unsigned n_blocks,
                   unsigned n_threads, Stream stream);
// kAllGather, kBroadcast, kBroadcastTwoShot: bytes.
Status peer_copy(const PeerCall& call, unsigned n_blocks, unsigned n_threads, Stream stream);

}  // namespace pycomm::cuda
