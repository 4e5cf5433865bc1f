// Broadcast as scatter + all-gather: large vectors in logarithmically many rounds at twice the bytes of one.
//
// The vector is cut into n parts; ranks are numbered from the root, v = rank - root (mod n), and part v is
// v's. A binomial tree hands the parts out in halves (as binomial.cc's scatter), then they are gathered by
// doubling (as doubling.cc). After the scatter v holds the parts of its whole subtree, so whatever it would
// receive of those is left out: the root receives nothing.
//
//   rounds       2 ceil(log2 n)
//   parts sent   2(n-1) of 1/n of the vector (root), where a binomial tree sends ceil(log2 n) whole vectors
//
// Source: Barnett, Gupta, Payne, Shuler, van de Geijn and Watts, Interprocessor collective communication
// library (1994); Bruck et al. (1997) for the second half.
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule broadcast(int rank, int n, int root, int) {
  const auto n_parts = static_cast<uint32_t>(n);
  Builder b(rank, n, root, n_parts);
  if (rank == root) b.add_in(0, n_parts);
  b.add_out(0, n_parts);
  const int v = (rank - root + n) % n, n_halvings = ceil_log2(n);
  const auto real = [&](int w) { return (w + root) % n; };
  const auto place = [&](int part) { return v == 0 ? b.in(part) : b.out(part); };
  if (v == 0) b.copy(0, b.in(0), b.out(0), n_parts);
  int round = 0;
  for (; round < n_halvings; round++) {
    const int distance = 1 << (n_halvings - 1 - round);
    if (v % (2 * distance) == distance) {
      b.recv(round, real(v - distance), b.out(v), static_cast<uint32_t>(binomial_subtree(v, n)));
    } else if (v % (2 * distance) == 0 && v + distance < n) {
      const int to = v + distance;
      b.send(round, real(to), place(to), static_cast<uint32_t>(binomial_subtree(to, n)));
    }
  }
  for (int d = 1; d < n; round++, d *= 2) {
    const int count = d < n - d ? d : n - d;
    const auto needs = [&](int w) { return binomial_subtree(w, n) < d + count; };
    const int from = (v + d) % n, to = (v + n - d) % n;
    if (needs(to)) {
      for_each_run(v, count, n, [&](int first, uint32_t len) { b.send(round, real(to), place(first), len); });
    }
    if (needs(v)) {
      for_each_run(from, count, n,
                   [&](int first, uint32_t len) { b.recv(round, real(from), b.out(first), len); });
    }
  }
  return b.finish();
}

int rounds(int n, int) { return 2 * ceil_log2(n); }
int64_t parts_sent(int n, int) { return 2 * (n - 1); }

}  // namespace

const Algorithm kBroadcastScatterAllGather = {
    .collective = Collective::kBroadcast,
    .name = "scatter_allgather",
    .summary = "hand the parts out in halves, then gather by doubling",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = broadcast,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
