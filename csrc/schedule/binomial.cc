// Binomial trees for one root: broadcast, reduce, gather, scatter in ceil(log2 n) rounds.
//
// broadcast, gather and scatter number the ranks from the root, v = rank - root (mod n). In broadcast the
// number of ranks that have the vector doubles each round; in gather and scatter rank v stands for the ranks
// v … v + 2^k - 1 while it holds their parts. reduce keeps real rank order, folded to a power of two p, and
// in each pair of partners v, v^2^k the one on the root's side keeps the sum, lower ranks left: the canonical
// tree, for any root, without a last hop to it.
//
//               parts sent by the busiest rank
//   broadcast   ceil(log2 n)                  (root)
//   reduce      1
//   gather      max(n - h, h/2), h the largest power of two < n
//   scatter     n-1                           (root)
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule broadcast(int rank, int n, int root, int) {
  Builder b(rank, n, root, 1);
  if (rank == root) b.add_in(0);
  b.add_out(0);
  const int v = (rank - root + n) % n;
  if (v == 0) b.copy(0, b.in(0), b.out(0));
  for (int k = 0; (1 << k) < n; k++) {
    const int distance = 1 << k;
    if (v < distance && v + distance < n) b.send(k, (rank + distance) % n, v == 0 ? b.in(0) : b.out(0));
    if (v >= distance && v < 2 * distance) b.recv(k, (rank - distance + n) % n, b.out(0));
  }
  return b.finish();
}

Schedule reduce(int rank, int n, int root, int) {
  Builder b(rank, n, root, 1);
  b.add_in(0);
  if (rank == root) b.add_out(0);
  if (n == 1) return b.alone();
  if (rank != root) b.add_scratch(0);
  const uint32_t sum = rank == root ? b.out(0) : b.scratch(0);
  const Fold fold(n);
  // The root acts for its pair, whichever half it is.
  const auto actor = [&](int v) { return v == fold.virtual_rank(root) ? root : fold.real_rank(v); };
  uint32_t have = b.in(0);
  const int v = fold.virtual_rank(rank), toward = fold.virtual_rank(root);
  if (fold.in_pair(rank)) {
    const int other = rank ^ 1;
    if (actor(v) != rank) {
      b.send(0, other, have);
      return b.finish();
    }
    b.recv_reduce(0, other, have, sum, side(rank, other));
    have = sum;
  }
  int round = fold.any() ? 1 : 0;
  for (int bit = 1; bit < fold.p(); bit *= 2, round++) {
    const int peer = actor(v ^ bit);
    if (((v ^ toward) & bit) != 0) {
      b.send(round, peer, have);
      return b.finish();
    }
    b.recv_reduce(round, peer, have, sum, side(rank, peer));
    have = sum;
  }
  return b.finish();
}

Schedule gather(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  const int v = (rank - root + n) % n, below = binomial_subtree(v, n);
  const auto part = [&](int w) { return (w + root) % n; };
  b.add_in(static_cast<uint32_t>(rank));
  if (v == 0) b.add_out(0, static_cast<uint32_t>(n));
  for (int w = v + 1; v != 0 && w < v + below; w++) b.add_scratch(static_cast<uint32_t>(part(w)));
  const auto place = [&](int w) { return v == 0 ? b.out(part(w)) : w == v ? b.in(0) : b.scratch(w - v - 1); };
  if (v == 0) b.copy(0, b.in(0), b.out(rank));
  for (int round = 0; (1 << round) < n; round++) {
    const int distance = 1 << round;
    if ((v & distance) != 0) {
      for (int w = v; w < v + below; w++) b.send(round, part(v - distance), place(w));
      break;
    }
    const int from = v + distance;
    if (from >= n) continue;
    for (int w = from; w < from + binomial_subtree(from, n); w++) b.recv(round, part(from), place(w));
  }
  return b.finish();
}

Schedule scatter(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  const int v = (rank - root + n) % n, below = binomial_subtree(v, n);
  const auto part = [&](int w) { return (w + root) % n; };
  if (v == 0) b.add_in(0, static_cast<uint32_t>(n));
  b.add_out(static_cast<uint32_t>(rank));
  for (int w = v + 1; v != 0 && w < v + below; w++) b.add_scratch(static_cast<uint32_t>(part(w)));
  const auto place = [&](int w) { return v == 0 ? b.in(part(w)) : w == v ? b.out(0) : b.scratch(w - v - 1); };
  if (v == 0) b.copy(0, b.in(rank), b.out(0));
  const int n_rounds = ceil_log2(n);
  for (int round = 0; round < n_rounds; round++) {
    const int distance = 1 << (n_rounds - 1 - round);
    if (v % (2 * distance) == distance) {
      for (int w = v; w < v + below; w++) b.recv(round, part(v - distance), place(w));
    } else if (v % (2 * distance) == 0 && v + distance < n) {
      const int to = v + distance;
      for (int w = to; w < to + binomial_subtree(to, n); w++) b.send(round, part(to), place(w));
    }
  }
  return b.finish();
}

int rounds(int n, int) { return ceil_log2(n); }
int64_t broadcast_parts(int n, int) { return ceil_log2(n); }
int64_t reduce_parts(int n, int) { return n > 1 ? 1 : 0; }
int64_t gather_parts(int n, int) {
  if (n == 1) return 0;
  const int h = 1 << (ceil_log2(n) - 1);
  return n - h > h / 2 ? n - h : h / 2;
}
int64_t scatter_parts(int n, int) { return n - 1; }

}  // namespace

const Algorithm kBroadcastBinomial = {
    .collective = Collective::kBroadcast,
    .name = "binomial",
    .summary = "the ranks that have it double each round",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = broadcast,
    .rounds = rounds,
    .max_parts_sent = broadcast_parts,
};

const Algorithm kReduceBinomial = {
    .collective = Collective::kReduce,
    .name = "binomial",
    .summary = "partners at distance 1, 2, 4, …: the one nearer to the root adds",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = reduce,
    .rounds = rounds,
    .max_parts_sent = reduce_parts,
};

const Algorithm kGatherBinomial = {
    .collective = Collective::kGather,
    .name = "binomial",
    .summary = "collected in groups of 2, 4, 8, … ranks",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = gather,
    .rounds = rounds,
    .max_parts_sent = gather_parts,
};

const Algorithm kScatterBinomial = {
    .collective = Collective::kScatter,
    .name = "binomial",
    .summary = "handed out in halves",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = scatter,
    .rounds = rounds,
    .max_parts_sent = scatter_parts,
};

}  // namespace pycomm
