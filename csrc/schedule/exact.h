// Reductions over hosts in exactly the canonical tree T, wherever the ranks are.
//
// Between hosts (`exact_between`) each host's partials (placement_tree.h) go straight to the host that owns
// the part, which combines them as T says; all_reduce then sends the result straight to all. A schedule of
// one *share* (engine/hierarchy.h): its ranks are the hosts, its inputs the partials of this host's subtrees,
// each of all parts, one subtree behind the other, so several inputs hold the same part.
//
//                    rounds   parts sent by host h, of 1/H of the share (reduce: of the share); s = its
//                    subtrees
//   all_reduce       2        (s + 1) (H - 1)
//   reduce_scatter   1        s (H - 1)
//   reduce           1        s, the root's host none
//
// Over all ranks (`Across`) it is one schedule of n ranks, with the steps inside the hosts before and behind:
// inputs to the owner of each share, which makes the partials; results from there. `verify_across` proves
// that one, with T as the claim, and counts what leaves each host. Where the placement keeps_order(), the
// hosts' schedule is the catalog's, as in the engine.
#pragma once

#include "schedule/placement_tree.h"
#include "schedule/verify.h"

namespace pycomm {

// `root_host`: for reduce. Collectives that do not reduce have no such schedule: an empty one.
Schedule exact_between(Collective c, const PlacementTree& tree, int host, int root_host);

// The whole of it for every rank. What a part is: all_reduce, one of the H of each of K shares;
// reduce_scatter, what rank q ends with; reduce, a share.
Status across_schedules(Collective c, const PlacementTree& tree, int root, std::vector<Schedule>* out);

struct AcrossProof {
  Proof proof;
  std::string between;                   // the hosts' schedule: "exact", or a name of the catalog
  uint32_t n_parts = 0;                  // the vector is cut into so many
  std::vector<int> n_subtrees;           // of each host
  std::vector<int64_t> n_parts_leaving;  // each host
};

inline constexpr int kMaxAcrossRanks = 256;

// kValue for a list that is no placement on several hosts or a collective that does not reduce; kSchedule for
// a violation, also of the closed forms above.
Status verify_across(Collective c, std::span<const int> host_of, int root, bool in_place, AcrossProof* out);

}  // namespace pycomm
