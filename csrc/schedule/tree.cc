// Binary tree all_reduce: sums climb to the root and come back, pipelined; few rounds at any size.
//
// The vector is cut into n_chunks parts (the depth of the pipeline). Ranks lie in the tree in rank order
// (tree.h), so a node adds its left child, itself and its right child in rank order; that is not the
// canonical tree, which has ranks at its leaves only.
//
//   rounds       n_chunks + 2 floor(log2 n) - 1
//   parts sent   min(n-1, 3) n_chunks of 1/n_chunks of the vector (an inner node: up once, down twice)
//
// Half of the ranks are leaves and send only a third of that: double_tree.cc cures it.
// Source: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan
// (2009), section 2.
#include "schedule/tree.h"

#include "schedule/algorithms.h"

namespace pycomm {

TreeNode tree_node(int position, int n) {
  TreeNode node;
  // The node's range is [lo, lo + size); descend until its root is `position`.
  int lo = 0, size = n;
  const auto root_of = [](int first, int count) {
    return first + static_cast<int>(std::bit_floor(static_cast<unsigned>(count))) - 1;
  };
  int at = root_of(lo, size);
  while (at != position) {
    node.parent = at;
    node.depth++;
    if (position < at) {
      size = at - lo;
    } else {
      size = lo + size - (at + 1);
      lo = at + 1;
    }
    at = root_of(lo, size);
  }
  if (at > lo) node.left = root_of(lo, at - lo);
  if (at + 1 < lo + size) node.right = root_of(at + 1, lo + size - (at + 1));
  return node;
}

void TreeWalk::add_round(Builder* b, int round) const {
  const auto has = [&](int part) { return part >= 0 && part < n_parts; };
  const bool is_leaf = node.left < 0;  // an only child is a left one
  const int sum = round - (height - node.depth - 1), rises = sum - 1;
  if (!is_leaf && has(sum)) {
    const int c = first_part + sum;
    b->recv_reduce(round, node.left, b->in(c), b->out(c));
    if (node.right >= 0) b->recv_reduce(round, node.right, b->out(c), b->out(c), Src::kLeft);
  }
  if (node.parent >= 0 && has(rises)) {
    const int c = first_part + rises;
    b->send(round, node.parent, is_leaf ? b->in(c) : b->out(c));
  }
  const int arrives = round - (height + node.depth - 1), falls = arrives - 1;
  if (node.parent >= 0 && has(arrives)) b->recv(round, node.parent, b->out(first_part + arrives));
  for (int child : {node.left, node.right}) {
    if (child >= 0 && has(falls)) b->send(round, child, b->out(first_part + falls));
  }
}

namespace {

Schedule all_reduce(int rank, int n, int root, int n_chunks) {
  const auto n_parts = static_cast<uint32_t>(n_chunks);
  Builder b(rank, n, root, n_parts);
  b.add_in(0, n_parts);
  b.add_out(0, n_parts);
  if (n == 1) return b.alone();
  const TreeWalk walk{tree_node(rank, n), tree_height(n), 0, n_chunks};
  for (int round = 0; round < tree_rounds(n, n_chunks); round++) walk.add_round(&b, round);
  return b.finish();
}

int64_t parts_sent(int n, int n_chunks) { return int64_t{n - 1 < 3 ? n - 1 : 3} * n_chunks; }

}  // namespace

const Algorithm kAllReduceTree = {
    .collective = Collective::kAllReduce,
    .name = "tree",
    .summary = "up a binary tree and down again, pipelined",
    .deterministic = false,
    .in_place = true,
    .default_n_chunks = 8,
    .build = all_reduce,
    .rounds = tree_rounds,
    .max_parts_sent = parts_sent,
};

}  // namespace pycomm
