// Where the canonical tree T (docs/numerics.md) lies when its ranks are on several hosts.
//
// Words: a *subtree* here is a maximal one: a node of T all of whose ranks are on one host, while its
// parent's are not. Its host computes it alone, and sends its value, a *partial*: less cannot be sent, since
// every node above mixes hosts. The subtrees of all hosts, in order of ranks, cut the ranks into runs; the
// nodes above them say how the partials are combined, lower ranks left (`combine_tree`).
//
//   hosts 0 0 1 1   two subtrees, (0+1) and (2+3)
//   hosts 0 1 1 1   three: 0, 1 and (2+3)
//   hosts 0 1 0 1   four single ranks
//
// Pure functions of the list of hosts; source: docs/numerics.md. Cost: O(n).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "schedule/builder.h"

namespace pycomm {

// Hosts are numbered in the order of their lowest rank, whatever their numbers were.
std::vector<int> number_hosts(std::span<const int> host_of);

// Whether the hosts (numbered so) hold equal blocks of consecutive ranks, a power of two in each. Reducing
// within each host and then over the hosts as if they were ranks is T then.
bool keeps_order(std::span<const int> host_of);

struct Subtree {
  int lo, hi;  // ranks lo … hi - 1
  int host;
  friend bool operator==(const Subtree&, const Subtree&) = default;
};

struct PlacementTree {
  explicit PlacementTree(std::span<const int> hosts);

  int n_ranks() const { return static_cast<int>(host_of.size()); }
  int n_hosts() const { return static_cast<int>(ranks.size()); }
  int n_subtrees(int host) const { return static_cast<int>(of_host[static_cast<size_t>(host)].size()); }
  int n_owners() const;  // the fewest ranks that any host has
  // The host of all ranks lo … hi - 1; -1 when they are on several.
  int host_of_all(int lo, int hi) const;

  std::vector<int> host_of;               // of each rank, as number_hosts() says
  std::vector<std::vector<int>> ranks;    // of each host
  std::vector<Subtree> subtrees;          // in order of ranks
  std::vector<std::vector<int>> of_host;  // of each host: which of the subtrees are its
};

// What a node of T is to the rank that combines it: a value that it has or gets, or one to be made of both
// halves.
struct Leaf {
  enum class From : uint8_t { kHalves, kOwn, kPeer } from = From::kHalves;
  uint32_t chunk = 0;  // kOwn
  int peer = 0;        // kPeer: what comes next from there
};
using LeafOf = std::function<Leaf(int lo, int hi)>;

// In one round: slots[0] = T(lo, hi). Uses combine_slots(hi - lo) slots, all of the same part; no leaf of
// this rank's own may lie in one of them. Receives are listed in the order of ranks.
void combine_tree(Builder* b, int round, int lo, int hi, const LeafOf& leaf, std::span<const uint32_t> slots);
constexpr int combine_slots(int n) { return n <= 2 ? 1 : ceil_log2(n); }

}  // namespace pycomm
