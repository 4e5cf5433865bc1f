// Double binary tree all_reduce: two trees, half of the vector each; a leaf of one works in the other.
//
// The vector is cut into 2 n_chunks parts. The first half walks the tree of tree.h with rank = position; the
// second half walks the same tree with the ranks mirrored (n even) or shifted by one (n odd), so that no rank
// is an inner node of both. Both walks share their rounds.
//
//   rounds       n_chunks + 2 floor(log2 n) - 1
//   parts sent   min(n, 4) n_chunks of 1/(2 n_chunks) of the vector: twice the vector, as a ring, but in
//                logarithmically many rounds
//
// The order of summation is fixed, the same on all ranks, and not the canonical tree.
// Source: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan
// (2009), section 3; NCCL's trees are the same.
#include "schedule/algorithms.h"
#include "schedule/tree.h"

namespace pycomm {
namespace {

TreeNode second_tree(int rank, int n) {
  const bool mirrored = n % 2 == 0;
  TreeNode node = tree_node(mirrored ? n - 1 - rank : (rank + n - 1) % n, n);
  for (int* position : {&node.parent, &node.left, &node.right}) {
    if (*position >= 0) *position = mirrored ? n - 1 - *position : (*position + 1) % n;
  }
  return node;
}

Schedule all_reduce(int rank, int n, int root, int n_chunks) {
  const auto n_parts = static_cast<uint32_t>(2 * n_chunks);
  Builder b(rank, n, root, n_parts);
  b.add_in(0, n_parts);
  b.add_out(0, n_parts);
  if (n == 1) return b.alone();
  const int height = tree_height(n);
  const TreeWalk first{tree_node(rank, n), height, 0, n_chunks};
  const TreeWalk second{second_tree(rank, n), height, n_chunks, n_chunks};
  for (int round = 0; round < tree_rounds(n, n_chunks); round++) {
    first.add_round(&b, round);
    second.add_round(&b, round);
  }
  return b.finish();
}

int64_t parts_sent(int n, int n_chunks) { return n == 1 ? 0 : int64_t{n < 4 ? n : 4} * n_chunks; }

}  // namespace

const Algorithm kAllReduceDoubleTree = {
    .collective = Collective::kAllReduce,
    .name = "double_tree",
    .summary = "two pipelined binary trees, half of the vector each",
    .deterministic = false,
    .in_place = true,
    .default_n_chunks = 4,
    .build = all_reduce,
    .rounds = tree_rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
