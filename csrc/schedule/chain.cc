// Chain broadcast: the root starts, every rank passes each part on to the next; pipelined.
//
// The vector is cut into n_chunks parts. Virtual rank v = rank - root (mod n) receives part c in round v - 1
// + c and sends it on in the next, so that all links are busy once the pipeline is full.
//
//   rounds       n_chunks + n - 2
//   parts sent   n_chunks of 1/n_chunks of the vector
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

Schedule broadcast(int rank, int n, int root, int n_chunks) {
  const auto n_parts = static_cast<uint32_t>(n_chunks);
  Builder b(rank, n, root, n_parts);
  if (rank == root) b.add_in(0, n_parts);
  b.add_out(0, n_parts);
  const int v = (rank - root + n) % n;
  const int next = (rank + 1) % n, before = (rank + n - 1) % n;
  if (v == 0) b.copy(0, b.in(0), b.out(0), n_parts);
  for (int round = v - 1; round <= v - 1 + n_chunks; round++) {
    const int arrives = round - (v - 1), leaves = arrives - 1;
    if (v < n - 1 && leaves >= 0) b.send(round, next, v == 0 ? b.in(leaves) : b.out(leaves));
    if (v > 0 && arrives < n_chunks) b.recv(round, before, b.out(arrives));
  }
  return b.finish();
}

int rounds(int n, int n_chunks) { return n > 1 ? n_chunks + n - 2 : 0; }
int64_t parts_sent(int n, int n_chunks) { return n > 1 ? n_chunks : 0; }

}  // namespace

const Algorithm kBroadcastChain = {
    .collective = Collective::kBroadcast,
    .name = "chain",
    .summary = "each rank passes every part on to the next, pipelined",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 8,
    .build = broadcast,
    .rounds = rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
