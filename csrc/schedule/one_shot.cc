// One-shot all_reduce: every rank sends its whole input to all, and every rank combines all inputs itself.
//
// One round, the least there is, for n-1 times the vector sent by each rank: for small messages. Every rank
// combines in the canonical tree, so all get the same bits. Not in place: a rank's input is still being sent
// while its output is written.
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule all_reduce(int rank, int n, int root, int) {
  Builder b(rank, n, root, 1);
  b.add_in(0);
  b.add_out(0);
  for (int i = 0; i < Builder::combine_depth(n); i++) b.add_scratch(0);
  for (int i = 1; i < n; i++) b.send(0, (rank + i) % n, b.in(0));
  b.combine(0, b.in(0), b.out(0));
  return b.finish();
}

int rounds(int n, int) { return n > 1 ? 1 : 0; }
int64_t parts_sent(int n, int) { return n - 1; }

}  // namespace

const Algorithm kAllReduceOneShot = {
    .collective = Collective::kAllReduce,
    .name = "one_shot",
    .summary = "all send everything to all and combine themselves: one round",
    .deterministic = true,
    .in_place = false,
    .default_n_chunks = 1,
    .build = all_reduce,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
