// The verifier: runs the schedules of all ranks on symbols instead of numbers, and so proves them.
//
// What is proved, in this order, and reported by the first step that breaks it:
//   form     every step's op, peer and chunks exist, rounds rise, inputs are never written, data stays in its
//            part
//   pairing  the k-th send p->q meets the k-th recv at q from p, in the same round, with the same parts
//   races    within a round no place is both sent from and written (in place, input and output are one place)
//   values   nothing unwritten is read, no input is counted twice, and every output ends with what the
//            collective promises: each rank's input exactly once, in the same reduction tree on all ranks,
//            which is the canonical tree T where that is claimed
//   cost     rounds and the busiest rank's bytes equal the algorithm's closed form
//
// A value is a node of a reduction tree; equal trees are one node (hash-consing), so "the same bits on every
// rank" is a comparison of numbers. Cost: time and memory in proportion to all steps of all ranks, times n/64
// words for the set of inputs under each node; 100 ranks take milliseconds, 1024 ranks seconds.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "schedule/catalog.h"

namespace pycomm {

// What a set of schedules is claimed to do.
struct Claim {
  Collective collective = Collective::kAllReduce;
  int root = 0;
  bool in_place = false;
  bool deterministic = false;  // reductions are the canonical tree
};

struct Violation {
  int rank = -1;   // -1: no single rank
  int index = -1;  // of the step in the rank's list; -1: no single step
  int round = -1;
  std::string step;  // the step, printed
  std::string what;  // what is wrong
  std::string text() const;
};

struct Proof {
  bool ok = false;
  Violation violation;  // when not ok
  int rounds = 0;       // rounds in which something is sent
  int64_t max_parts_sent = 0;
  int64_t n_steps = 0;
  int64_t n_parts_sent = 0;  // over all ranks
};

inline constexpr int kMaxVerifyRanks = 1024;

// Proves the schedules of ranks 0 … n-1, given in that order. Never fails on bad schedules, however mangled:
// those give a Proof with a violation.
Proof verify_schedules(std::span<const Schedule> schedules, const Claim& claim);

// Builds the schedules of all ranks and proves them, closed forms included. kSchedule for a violation (the
// message names it) and for arguments that cannot be built; `proof` may be null.
Status verify(const Algorithm& a, int n_ranks, int root, int n_chunks, bool in_place, Proof* proof);

}  // namespace pycomm
