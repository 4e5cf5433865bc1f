// A schedule lowered to shared memory: who reads what from whom, and which waits that really needs.
//
// In shared memory nobody sends. A rank *publishes* (its entry into a call, then its progress), and its peers
// read straight from its memory. Lowering one schedule for all n ranks at once gives each rank a list of
// *instructions* dst(s) = T(srcs) and, between them, the fewest waits that keep the order of the schedule:
//
//   fuse     the steps of one round that build one value become one n-ary read; a scratch chunk that lives
//            only within the round disappears
//   put      (direct mode) a value that its peers would only copy is written to them as it is made
//   depend   read after write: wait until the peer has made the chunk; write after read: wait until the
//            peers have read it. Every wait names an instruction of an earlier round, so nothing deadlocks.
//
// Two modes. *Tiled*: inputs and shared intermediate values lie in a slot of the owner's stage, the tensors
// themselves are private, and a call is a sequence of tiles. *Direct*: all tensors lie in the arenas and are
// read and written where they are, in one go. Chunks that peers read are *exposed*, and have an index in the
// slot (tiled). A *post* is an instruction after which a peer may wait for us; posts are counted, and that
// count is the rank's progress.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "schedule/catalog.h"

namespace pycomm {

enum class PlanMode : uint8_t { kTiled, kDirect, kDirectInPlace };

// A place: a chunk of some rank.
struct Ref {
  int rank;
  uint32_t chunk;
  friend bool operator==(const Ref&, const Ref&) = default;
};

struct Wait {
  int peer;
  uint32_t post;  // wait until the peer has made that many posts in this tile
};

struct Instr {
  std::vector<Ref> srcs;    // one: copy; more: reduced in the canonical tree, in this order
  std::vector<Ref> dsts;    // dsts[0] is ours; others are puts
  std::vector<Wait> waits;  // before it runs
  uint32_t round = 0;
  bool complete = false;             // reduces every rank's input: avg may divide here
  bool last_write = false;           // no later instruction writes dsts[0] again
  bool own_input_from_slot = false;  // tiled: in place, the tensor's own copy may be overwritten by then
  bool post = false;                 // a peer may be waiting for this one
};

// Where a chunk lives in tiled mode.
struct ChunkPlace {
  uint32_t part = 0;
  int32_t exposed = -1;  // index in the slot, or -1
  bool is_in = false, is_out = false;
  int32_t scratch = -1;  // index in private scratch when not exposed
};

struct RankPlan {
  std::vector<Instr> instrs;
  std::vector<ChunkPlace> chunks;
  uint32_t n_posts = 0;
  uint32_t n_private = 0;        // private scratch chunks
  std::vector<Wait> exit_waits;  // direct mode: peers that still use our memory
};

struct Plan {
  PlanMode mode;
  int rank;
  int n_ranks;
  uint32_t n_parts = 0;
  uint32_t n_rounds = 0;
  uint32_t max_exposed = 1;   // over ranks: how many slices share a slot
  bool one_shot = false;      // tiled: every rank reads all inputs once and is done (one part, no posts)
  bool fused_scale = false;   // every reduction is complete, so avg can divide inside it
  bool direct_ok = true;      // direct: peers read nothing but inputs and outputs
  uint32_t n_stages = 1;      // tiled: 1 one read phase; 2 reads after our last post as well
  uint32_t second_stage = 0;  // first instruction of that phase
  RankPlan own;
  std::vector<std::vector<ChunkPlace>> chunks;  // of every rank
  std::vector<uint32_t> n_posts;                // of every rank
};

// n_chunks = 0 takes the algorithm's default. Fails with kSchedule when the schedule cannot be built, or is
// not allowed in place. Cost: O(total steps of all ranks); callers cache the result.
Status make_plan(const Algorithm& algorithm, int rank, int n_ranks, int root, int n_chunks, PlanMode mode,
                 std::unique_ptr<Plan>* out);

}  // namespace pycomm
