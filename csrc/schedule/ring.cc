// Ring: every rank sends to its right neighbour only, one part a round.
//
// The vector is cut into n parts. Reduce-scatter: a part starts at one rank and travels once around the ring,
// each rank adding its own input, until it is complete at its owner. All-gather: the complete parts travel
// around once more. All ranks send and receive in every round, so the links are always full.
//
//                    rounds      parts sent by each rank (of 1/n of the vector)
//   all_reduce       2(n-1)      2(n-1): the least there is
//   reduce_scatter   n-1         n-1
//   all_gather       n-1         n-1
//
// A part's sum starts at a rank that depends on the part, so the order is fixed but is not the canonical
// tree. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4.
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

struct Ring {
  int rank, n;
  int right() const { return (rank + 1) % n; }
  int left() const { return (rank + n - 1) % n; }
  int part(int i) const { return ((i % n) + n) % n; }
};

Schedule all_reduce(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(0, static_cast<uint32_t>(n));
  b.add_out(0, static_cast<uint32_t>(n));
  if (n == 1) return b.alone();
  const Ring ring{rank, n};
  int round = 0;
  for (int k = 0; k < n - 1; k++, round++) {  // part rank - k leaves, part rank - k - 1 arrives and grows
    const int leaves = ring.part(rank - k), arrives = ring.part(rank - k - 1);
    b.send(round, ring.right(), k == 0 ? b.in(leaves) : b.out(leaves));
    b.recv_reduce(round, ring.left(), b.in(arrives), b.out(arrives));
  }
  for (int k = 0; k < n - 1; k++, round++) {  // this rank now owns part rank + 1
    b.send(round, ring.right(), b.out(ring.part(rank + 1 - k)));
    b.recv(round, ring.left(), b.out(ring.part(rank - k)));
  }
  return b.finish();
}

Schedule reduce_scatter(int rank, int n, int root, int) {
  const Ring ring{rank, n};
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(0, static_cast<uint32_t>(n));
  b.add_out(static_cast<uint32_t>(rank));
  if (n == 1) return b.alone();
  // What arrives in round k is part rank - k - 2; the last to arrive is this rank's own.
  for (int k = 0; k < n - 2; k++) b.add_scratch(static_cast<uint32_t>(ring.part(rank - k - 2)));
  for (int k = 0; k < n - 1; k++) {
    b.send(k, ring.right(), k == 0 ? b.in(ring.left()) : b.scratch(k - 1));
    b.recv_reduce(k, ring.left(), b.in(ring.part(rank - k - 2)), k == n - 2 ? b.out(0) : b.scratch(k));
  }
  return b.finish();
}

Schedule all_gather(int rank, int n, int root, int) {
  const Ring ring{rank, n};
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(static_cast<uint32_t>(rank));
  b.add_out(0, static_cast<uint32_t>(n));
  b.copy(0, b.in(0), b.out(rank));
  for (int k = 0; k < n - 1; k++) {
    b.send(k, ring.right(), k == 0 ? b.in(0) : b.out(ring.part(rank - k)));
    b.recv(k, ring.left(), b.out(ring.part(rank - k - 1)));
  }
  return b.finish();
}

int once_around(int n, int) { return n - 1; }
int twice_around(int n, int) { return 2 * (n - 1); }
int64_t parts_once(int n, int) { return n - 1; }
int64_t parts_twice(int n, int) { return 2 * (n - 1); }

}  // namespace

const Algorithm kAllReduceRing = {
    .collective = Collective::kAllReduce,
    .name = "ring",
    .summary = "reduce-scatter, then all-gather around a ring: least bytes, most rounds",
    .deterministic = false,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_reduce,
    .rounds = twice_around,
    .max_parts_sent = parts_twice,
};

const Algorithm kReduceScatterRing = {
    .collective = Collective::kReduceScatter,
    .name = "ring",
    .summary = "each part travels once around a ring and grows",
    .deterministic = false,
    .in_place = true,
    .default_n_chunks = 1,
    .build = reduce_scatter,
    .rounds = once_around,
    .max_parts_sent = parts_once,
};

const Algorithm kAllGatherRing = {
    .collective = Collective::kAllGather,
    .name = "ring",
    .summary = "each part travels once around a ring",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_gather,
    .rounds = once_around,
    .max_parts_sent = parts_once,
};

}  // namespace pycomm
