// A schedule lowered to NCCL: per round one group of sends and receives, then few batches of local steps.
//
// The steps of a round become as few n-ary reductions as its values need (engine/fuse.h), so that a rank that
// sees all operands rounds once. Words: a *landing* is where a receive puts its data: straight in a chunk
// when nothing else of the round needs what that chunk holds, else in a *staging* place, from where a local
// step takes it. A *batch* is a set of local steps with the same number of sources that do not touch each
// other's memory: one launch. Batches run in order. A reduction of more sources than a kernel takes
// (kMaxReduceSrcs) is *cut* along the canonical tree, and its subtrees' values wait in staging places of
// their own.
//
// A plan holds no pointer, count or dtype, and is cached by what make_round_plan is given. Cost: O(steps of
// all ranks), since whether a reduction is complete depends on what the peers send.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "schedule/catalog.h"

namespace pycomm::cuda {

// A place that a local step reads: a chunk of this rank, or one of the round's landings in staging.
struct Operand {
  bool staged = false;
  uint32_t at = 0;  // chunk, or staging place
  bool operator==(const Operand&) const = default;
};

struct Outgoing {
  int peer;
  uint32_t chunk;
};

struct Landing {
  int peer;
  uint32_t part;
  Operand place;
};

struct LocalStep {
  Operand dst;
  uint32_t part;              // which slice of the vector that is
  std::vector<Operand> srcs;  // one: copy; more: reduced in the canonical tree, in this order
};

struct Batch {
  int n_srcs = 1;
  std::vector<LocalStep> steps;
};

struct PlanRound {
  std::vector<Outgoing> sends;
  std::vector<Landing> recvs;  // as listed: the k-th of a peer is the peer's k-th send
  std::vector<Batch> batches;
};

struct RoundPlan {
  Collective collective = Collective::kAllReduce;
  const char* algorithm = "";
  int rank = 0, n_ranks = 1, root = 0;
  bool in_place = false;
  bool deterministic = false;  // the schedule's tree is T
  bool complete = false;  // on every rank each reduction sees all ranks' inputs: avg can divide inside it
  bool cut = false;  // on some rank a reduction is; so nothing divides inside, and small floats are widened
  uint32_t n_parts = 0, n_in = 0, n_out = 0, n_scratch = 0;
  uint32_t n_staging = 0;      // places that the busiest round needs
  std::vector<uint32_t> part;  // of every chunk
  std::vector<PlanRound> rounds;

  bool reduces() const {
    return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
           collective == Collective::kReduce;
  }
};

// kSchedule when the schedule cannot be built, or may not run in place.
Status make_round_plan(const Algorithm& algorithm, int rank, int n_ranks, int root, int n_chunks,
                       bool in_place, RoundPlan* out);

}  // namespace pycomm::cuda
