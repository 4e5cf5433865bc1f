// All-gather by doubling (Bruck's algorithm): what a rank holds doubles each round, for any n.
//
// In the round with distance d = 1, 2, 4, … a rank holds the d parts from its own on (mod n) and receives the
// d behind them, or what is missing to n, from the rank d further on.
//
//   rounds       ceil(log2 n), the least there is
//   parts sent   n-1, the least there is
//
// Parts go straight to their places in the output, so a run that wraps around is two messages and nothing has
// to be rotated at the end.
// Source: Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all communications in
// multiport message-passing systems (1997), section 4.
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule all_gather(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(static_cast<uint32_t>(rank));
  b.add_out(0, static_cast<uint32_t>(n));
  b.copy(0, b.in(0), b.out(rank));
  for (int round = 0, d = 1; d < n; round++, d *= 2) {
    const int count = d < n - d ? d : n - d;
    const int from = (rank + d) % n, to = (rank + n - d) % n;
    if (d == 1) {
      b.send(round, to, b.in(0));
    } else {
      for_each_run(rank, count, n, [&](int first, uint32_t len) { b.send(round, to, b.out(first), len); });
    }
    for_each_run(from, count, n, [&](int first, uint32_t len) { b.recv(round, from, b.out(first), len); });
  }
  return b.finish();
}

int rounds(int n, int) { return ceil_log2(n); }
int64_t parts_sent(int n, int) { return n - 1; }

}  // namespace

const Algorithm kAllGatherDoubling = {
    .collective = Collective::kAllGather,
    .name = "doubling",
    .summary = "what a rank holds doubles each round (Bruck)",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_gather,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
