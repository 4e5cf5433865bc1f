// Fusion: one round's steps on one rank become as few instructions as its values need.
//
// The steps of a round are evaluated symbolically. A value is an expression over *leaves*, places that hold
// what they held before the round: own chunks and, through matched sends, peers' chunks. At the end of the
// round each written chunk gets one instruction dst = T(leaves) when its expression is the canonical tree
// over its leaves in order, else the steps stay one instruction each, in list order.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/plan.h"

namespace pycomm {

// For each ordered pair of ranks, the chunks that are sent, in order: the k-th recv takes the k-th.
class SendTable {
 public:
  explicit SendTable(const std::vector<Schedule>& schedules);
  // The chunk that the k-th message from -> to is read from; false when there is none.
  bool find(int from, int to, size_t k, uint32_t* chunk) const;

 private:
  std::map<std::pair<int, int>, std::vector<uint32_t>> chunks_;
};

// `locations` maps this rank's chunks to memory (in place: input and output of a part are one).
Status fuse(const Schedule& schedule, const SendTable& sends, const std::vector<uint32_t>& locations,
            std::vector<Instr>* out);

}  // namespace pycomm
