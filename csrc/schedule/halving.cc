// Recursive halving reduce_scatter; any n, in the canonical order.
//
// With p the largest power of two <= n, 2(n - p) ranks first fold into pairs (2i, 2i+1) of which the even one
// acts for both. Then partners v^1, v^2, v^4, … among p virtual ranks each give the other the parts whose
// owner lies on the other's side, by that bit of the owner's virtual rank. What is left after log2 p rounds
// is a rank's own part (an acting rank of a pair has two, and hands the odd one over).
//
//   rounds       log2 p, and 2 more if n is no power of two
//   parts sent   n-1 of 1/n of the vector; n by the odd rank of a pair, which gives away all it has
//
// The nearest partner comes first, lower ranks left: the canonical tree. Choosing parts by bits of their
// owner, not by contiguous halves, leaves every part with its owner, where halves would leave it at the rank
// with the bits reversed.
// Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH
// (2005), section 4.3.
#include <vector>

#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule reduce_scatter(int rank, int n, int root, int) {
  const auto n_parts = static_cast<uint32_t>(n);
  Builder b(rank, n, root, n_parts);
  b.add_in(0, n_parts);
  b.add_out(static_cast<uint32_t>(rank));
  if (n == 1) return b.alone();
  const Fold fold(n);
  const int n_exchanges = ceil_log2(fold.p()), v = fold.virtual_rank(rank);
  const bool paired = fold.in_pair(rank);
  if (paired && !fold.acts(rank)) {
    b.send(0, rank - 1, b.in(0), n_parts);
    b.recv(n_exchanges + 1, rank - 1, b.out(0));
    return b.finish();
  }
  // A part's sums lie in scratch until the last exchange; `where` is its newest place.
  std::vector<uint32_t> where(n_parts), scratch(n_parts);
  for (int q = 0, n_scratch = 0; q < n; q++) {
    const bool is_kept = paired || ((fold.virtual_rank(q) ^ v) & 1) == 0;
    where[q] = b.in(q);
    if (!is_kept) continue;
    b.add_scratch(static_cast<uint32_t>(q));
    scratch[q] = b.scratch(n_scratch++);
  }
  if (paired) {
    b.recv_reduce(0, rank + 1, b.in(0), scratch[0], Src::kLeft, n_parts);
    where = scratch;
  }
  int round = fold.any() ? 1 : 0;
  for (int bit = 1; bit < fold.p(); bit *= 2, round++) {
    const int peer = fold.real_rank(v ^ bit);
    for (int q = 0; q < n; q++) {
      const int differs = fold.virtual_rank(q) ^ v;
      if ((differs & (bit - 1)) != 0) continue;  // given away before
      if ((differs & bit) != 0) {
        b.send(round, peer, where[q]);
        continue;
      }
      const bool is_done = q == rank && 2 * bit == fold.p();
      const uint32_t sum = is_done ? b.out(0) : scratch[q];
      b.recv_reduce(round, peer, where[q], sum, side(rank, peer));
      where[q] = sum;
    }
  }
  if (paired) b.send(round, rank + 1, where[rank + 1]);
  return b.finish();
}

int rounds(int n, int) {
  const Fold fold(n);
  return ceil_log2(fold.p()) + (fold.any() ? 2 : 0);
}
int64_t parts_sent(int n, int) { return Fold(n).any() ? n : n - 1; }

}  // namespace

const Algorithm kReduceScatterHalving = {
    .collective = Collective::kReduceScatter,
    .name = "halving",
    .summary = "partners at distance 1, 2, 4, … exchange what the other's side owns",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = reduce_scatter,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
