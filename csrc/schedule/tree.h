// The binary tree that `tree` and `double_tree` share, and the pipelined walk up and down it.
//
// Positions 0 … n-1 lie in the tree in order: everything left of a node is lower, everything right of it is
// higher. The root of k positions is the (largest power of two <= k)-th of them, so even positions are
// leaves, odd ones are inner nodes with a left child, and the height is floor(log2 n).
//
// A walk reduces parts from the leaves to the root and sends the sums back, part c following part c-1 by one
// round. At height h a node of depth d
//
//   receives part c from its children in round c + h - d - 1   and sends it up in round c + h - d;
//   receives its sum from its parent in round c + h + d - 1    and sends it down in round c + h + d.
//
// So n_parts parts take n_parts + 2h - 1 rounds, and a node sends each part once to each neighbour.
#pragma once

#include "schedule/builder.h"

namespace pycomm {

struct TreeNode {
  int parent = -1, left = -1, right = -1;  // positions; -1: none
  int depth = 0;
};
TreeNode tree_node(int position, int n);
constexpr int tree_height(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }
constexpr int tree_rounds(int n, int n_parts) { return n > 1 ? n_parts + 2 * tree_height(n) - 1 : 0; }

// One rank's walk over the parts first_part … first_part + n_parts - 1, from inputs to outputs. `node` must
// name ranks. Call add_round for every round 0 … tree_rounds - 1.
struct TreeWalk {
  TreeNode node;
  int height, first_part, n_parts;
  void add_round(Builder* b, int round) const;
};

}  // namespace pycomm
