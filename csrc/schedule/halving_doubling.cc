// Recursive halving-doubling all_reduce: reduce-scatter by halving, all-gather by doubling; any n.
//
// The vector is cut into p parts, p the largest power of two <= n. 2(n - p) ranks first fold into pairs
// (2i, 2i+1) of which the even one acts for both. Then partners v^1, v^2, v^4, … each give the other one half
// of what both still hold, until every virtual rank v owns one part (number v with its bits reversed); the
// same exchanges backwards distribute the results, and the odd ranks are told.
//
//   rounds       2 log2 p, and 2 more if n is no power of two
//   parts sent   2(p-1) of 1/p of the vector, and p more by an acting rank of a pair
//
// The nearest partner comes first and the halves are contiguous, lower ranks left: the canonical tree. (With
// the farthest partner first it would be another tree.)
// Source: Rabenseifner, Optimization of collective reduction operations (2004), section 3.
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule all_reduce(int rank, int n, int root, int) {
  const Fold fold(n);
  const auto p = static_cast<uint32_t>(fold.p());
  Builder b(rank, n, root, p);
  b.add_in(0, p);
  b.add_out(0, p);
  if (n == 1) return b.alone();
  const bool paired = fold.in_pair(rank);
  if (paired && !fold.acts(rank)) {
    b.send(0, rank - 1, b.in(0), p);
    b.recv(2 * ceil_log2(fold.p()) + 1, rank - 1, b.out(0), p);
    return b.finish();
  }
  if (paired) b.recv_reduce(0, rank + 1, b.in(0), b.out(0), Src::kLeft, p);
  int round = fold.any() ? 1 : 0;
  const int v = fold.virtual_rank(rank);

  uint32_t first = 0, n_held = p;  // the parts that are still reduced here
  bool reduced = paired;           // false while they lie in the input
  for (int bit = 1; bit < fold.p(); bit *= 2, round++) {
    const int peer = fold.real_rank(v ^ bit);
    n_held /= 2;
    const uint32_t keep = first + ((v & bit) != 0 ? n_held : 0), give = first + ((v & bit) != 0 ? 0 : n_held);
    b.send(round, peer, reduced ? b.out(0) + give : b.in(0) + give, n_held);
    b.recv_reduce(round, peer, reduced ? b.out(0) + keep : b.in(0) + keep, b.out(0) + keep, side(rank, peer),
                  n_held);
    first = keep;
    reduced = true;
  }
  for (int bit = fold.p() / 2; bit >= 1; bit /= 2, round++) {
    const int peer = fold.real_rank(v ^ bit);
    const uint32_t theirs = (v & bit) != 0 ? first - n_held : first + n_held;
    b.send(round, peer, b.out(0) + first, n_held);
    b.recv(round, peer, b.out(0) + theirs, n_held);
    first = first < theirs ? first : theirs;
    n_held *= 2;
  }
  if (paired) b.send(round, rank + 1, b.out(0), p);
  return b.finish();
}

int rounds(int n, int) {
  const Fold fold(n);
  return 2 * ceil_log2(fold.p()) + (fold.any() ? 2 : 0);
}
int64_t parts_sent(int n, int) {
  const Fold fold(n);
  return 2 * (fold.p() - 1) + (fold.any() ? fold.p() : 0);
}

}  // namespace

const Algorithm kAllReduceHalvingDoubling = {
    .collective = Collective::kAllReduce,
    .name = "halving_doubling",
    .summary = "partners at distance 1, 2, 4, … exchange halves, then back",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_reduce,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
