// Direct: everybody sends straight to whoever needs it, in one round; the shared-memory fast path.
//
// Where there is something to reduce, its owner receives from all ranks in that round and combines in the
// canonical tree, so an engine may read all n sources at once and write the result once.
//
//                    rounds      parts sent by the busiest rank
//   all_reduce       2           2(n-1) of 1/n of the vector: to the owners, and from the owner to all
//   reduce_scatter   1           n-1
//   all_gather       1           n-1
//   broadcast        1           (n-1) times all n_chunks parts (root)
//   reduce           1           all n_chunks parts
//   gather           1           1
//   scatter          1           n-1 (root)
//
// all_reduce is the "two-shot" of the CUDA literature. Sends start at the right neighbour, so that the ranks
// do not all address rank 0 first.
#include "schedule/algorithms.h"

namespace pycomm {
namespace {

// Peers in the order rank + 1, rank + 2, …
template <class Fn>
void for_each_peer(int rank, int n, Fn fn) {
  for (int i = 1; i < n; i++) fn((rank + i) % n);
}

// What all_reduce and reduce_scatter begin with: parts to their owners, `target` = T of this rank's part.
void reduce_at_owners(Builder* b, int rank, int n, uint32_t target) {
  for_each_peer(rank, n, [&](int q) { b->send(0, q, b->in(q)); });
  b->combine(0, b->in(rank), target);
}

Schedule all_reduce(int rank, int n, int root, int) {
  const auto n_parts = static_cast<uint32_t>(n);
  Builder b(rank, n, root, n_parts);
  b.add_in(0, n_parts);
  b.add_out(0, n_parts);
  for (int i = 0; i < Builder::combine_depth(n); i++) b.add_scratch(static_cast<uint32_t>(rank));
  reduce_at_owners(&b, rank, n, b.out(rank));
  for_each_peer(rank, n, [&](int q) { b.send(1, q, b.out(rank)); });
  for_each_peer(rank, n, [&](int q) { b.recv(1, q, b.out(q)); });
  return b.finish();
}

Schedule reduce_scatter(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(0, static_cast<uint32_t>(n));
  b.add_out(static_cast<uint32_t>(rank));
  for (int i = 0; i < Builder::combine_depth(n); i++) b.add_scratch(static_cast<uint32_t>(rank));
  reduce_at_owners(&b, rank, n, b.out(0));
  return b.finish();
}

Schedule all_gather(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(static_cast<uint32_t>(rank));
  b.add_out(0, static_cast<uint32_t>(n));
  b.copy(0, b.in(0), b.out(rank));
  for_each_peer(rank, n, [&](int q) { b.send(0, q, b.in(0)); });
  for_each_peer(rank, n, [&](int q) { b.recv(0, q, b.out(q)); });
  return b.finish();
}

Schedule broadcast(int rank, int n, int root, int n_chunks) {
  const auto n_parts = static_cast<uint32_t>(n_chunks);
  Builder b(rank, n, root, n_parts);
  if (rank == root) b.add_in(0, n_parts);
  b.add_out(0, n_parts);
  if (rank == root) {
    b.copy(0, b.in(0), b.out(0), n_parts);
    for_each_peer(rank, n, [&](int q) { b.send(0, q, b.in(0), n_parts); });
  } else {
    b.recv(0, root, b.out(0), n_parts);
  }
  return b.finish();
}

Schedule reduce(int rank, int n, int root, int n_chunks) {
  const auto n_parts = static_cast<uint32_t>(n_chunks);
  Builder b(rank, n, root, n_parts);
  b.add_in(0, n_parts);
  if (rank == root) b.add_out(0, n_parts);
  if (rank != root) {
    for (int c = 0; c < n_chunks; c++) b.send(0, root, b.in(c));
    return b.finish();
  }
  const int depth = Builder::combine_depth(n);
  for (int c = 0; c < n_chunks; c++) {
    for (int i = 0; i < depth; i++) b.add_scratch(static_cast<uint32_t>(c));
  }
  for (int c = 0; c < n_chunks; c++) b.combine(0, b.in(c), b.out(c), c * depth);
  return b.finish();
}

Schedule gather(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  b.add_in(static_cast<uint32_t>(rank));
  if (rank != root) {
    b.send(0, root, b.in(0));
    return b.finish();
  }
  b.add_out(0, static_cast<uint32_t>(n));
  b.copy(0, b.in(0), b.out(rank));
  for_each_peer(rank, n, [&](int q) { b.recv(0, q, b.out(q)); });
  return b.finish();
}

Schedule scatter(int rank, int n, int root, int) {
  Builder b(rank, n, root, static_cast<uint32_t>(n));
  if (rank == root) b.add_in(0, static_cast<uint32_t>(n));
  b.add_out(static_cast<uint32_t>(rank));
  if (rank == root) {
    b.copy(0, b.in(rank), b.out(0));
    for_each_peer(rank, n, [&](int q) { b.send(0, q, b.in(q)); });
  } else {
    b.recv(0, root, b.out(0));
  }
  return b.finish();
}

int one_round(int n, int) { return n > 1 ? 1 : 0; }
int two_rounds(int n, int) { return n > 1 ? 2 : 0; }
int64_t to_each_peer(int n, int) { return n - 1; }
int64_t to_each_peer_twice(int n, int) { return 2 * (n - 1); }
int64_t all_to_each_peer(int n, int n_chunks) { return int64_t{n - 1} * n_chunks; }
int64_t all_once(int n, int n_chunks) { return n > 1 ? n_chunks : 0; }
int64_t one_part(int n, int) { return n > 1 ? 1 : 0; }

}  // namespace

const Algorithm kAllReduceDirect = {
    .collective = Collective::kAllReduce,
    .name = "direct",
    .summary = "reduce each part at its owner, then send it to all (two-shot)",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_reduce,
    .rounds = two_rounds,
    .max_parts_sent = to_each_peer_twice,
};

const Algorithm kReduceScatterDirect = {
    .collective = Collective::kReduceScatter,
    .name = "direct",
    .summary = "every part straight to its owner",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = reduce_scatter,
    .rounds = one_round,
    .max_parts_sent = to_each_peer,
};

const Algorithm kAllGatherDirect = {
    .collective = Collective::kAllGather,
    .name = "direct",
    .summary = "every part straight to all",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = all_gather,
    .rounds = one_round,
    .max_parts_sent = to_each_peer,
};

const Algorithm kBroadcastDirect = {
    .collective = Collective::kBroadcast,
    .name = "direct",
    .summary = "the root sends to all",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = broadcast,
    .rounds = one_round,
    .max_parts_sent = all_to_each_peer,
};

const Algorithm kReduceDirect = {
    .collective = Collective::kReduce,
    .name = "direct",
    .summary = "all send to the root, which combines",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = reduce,
    .rounds = one_round,
    .max_parts_sent = all_once,
};

const Algorithm kGatherDirect = {
    .collective = Collective::kGather,
    .name = "direct",
    .summary = "all send to the root",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = gather,
    .rounds = one_round,
    .max_parts_sent = one_part,
};

const Algorithm kScatterDirect = {
    .collective = Collective::kScatter,
    .name = "direct",
    .summary = "the root sends each part to its owner",
    .deterministic = true,
    .in_place = true,
    .default_n_chunks = 1,
    .build = scatter,
    .rounds = one_round,
    .max_parts_sent = to_each_peer,
};

}  // namespace pycomm
