// Recursive doubling all_reduce: partners v^1, v^2, v^4, … exchange all they have and both add.
//
// The vector is one part. With p the largest power of two <= n: 2(n - p) ranks first fold into pairs (2i,
// 2i+1) of which the even one acts for both, log2 p exchanges follow among p virtual ranks v, and the odd
// ranks are told the result. Lower virtual ranks go left, which makes the canonical tree.
//
//   rounds       log2 p, and 2 more if n is no power of two
//   parts sent   log2 p, and 1 more by an acting rank of a pair
//
// A rank never writes what it is sending: results alternate between two scratch chunks until the last one.
// Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH
// (2005).
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule all_reduce(int rank, int n, int root, int) {
  Builder b(rank, n, root, 1);
  b.add_in(0);
  b.add_out(0);
  if (n == 1) return b.alone();
  b.add_scratch(0, 1);
  b.add_scratch(0, 1);
  const Fold fold(n);
  const bool paired = fold.in_pair(rank);
  uint32_t have = b.in(0);
  int round = 0, n_reduced = 0;
  if (paired && !fold.acts(rank)) {
    b.send(round, rank - 1, have);
    b.recv(ceil_log2(fold.p()) + 1, rank - 1, b.out(0));
    return b.finish();
  }
  if (paired) {
    b.recv_reduce(round, rank + 1, have, b.scratch(0), Src::kLeft);
    have = b.scratch(n_reduced++);
  }
  if (fold.any()) round++;
  const int v = fold.virtual_rank(rank);
  for (int bit = 1; bit < fold.p(); bit *= 2, round++) {
    const int peer = fold.real_rank(v ^ bit);
    // In place the output is the input, which must not be written while it is sent.
    const bool last = 2 * bit == fold.p() && have != b.in(0);
    const uint32_t sum = last ? b.out(0) : b.scratch(n_reduced++ % 2);
    b.send(round, peer, have);
    b.recv_reduce(round, peer, have, sum, side(rank, peer));
    have = sum;
  }
  if (have != b.out(0)) b.copy(round, have, b.out(0));
  if (paired) b.send(round, rank + 1, have);
  return b.finish();
}

int rounds(int n, int) {
  const Fold fold(n);
  return ceil_log2(fold.p()) + (fold.any() ? 2 : 0);
}
int64_t parts_sent(int n, int) {
  const Fold fold(n);
  return ceil_log2(fold.p()) + (fold.any() ? 1 : 0);
}

}  // namespace

const Algorithm kAllReduceRecursiveDoubling = {
    .collective = Collective::kAllReduce,
    .name = "recursive_doubling",
    .summary = "partners at distance 1, 2, 4, … exchange everything",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_reduce,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
