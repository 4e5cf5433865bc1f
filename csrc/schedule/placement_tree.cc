// The maximal subtrees of T on each host, and the steps that combine their values.
#include "schedule/placement_tree.h"

#include <algorithm>
#include <map>

namespace pycomm {

std::vector<int> number_hosts(std::span<const int> host_of) {
  std::map<int, int> number;
  std::vector<int> out;
  for (const int h : host_of) out.push_back(number.emplace(h, static_cast<int>(number.size())).first->second);
  return out;
}

bool keeps_order(std::span<const int> host_of) {
  const auto n = static_cast<size_t>(std::count(host_of.begin(), host_of.end(), 0));
  if (!std::has_single_bit(n) || host_of.size() % n != 0) return false;
  for (size_t q = 0; q < host_of.size(); q++) {
    if (host_of[q] != static_cast<int>(q / n)) return false;
  }
  return true;
}

namespace {
void find_subtrees(PlacementTree* t, int lo, int hi) {
  const int host = t->host_of_all(lo, hi);
  if (host >= 0) {
    t->of_host[static_cast<size_t>(host)].push_back(static_cast<int>(t->subtrees.size()));
    t->subtrees.push_back({lo, hi, host});
    return;
  }
  const int mid = lo + canonical_left(hi - lo);
  find_subtrees(t, lo, mid);
  find_subtrees(t, mid, hi);
}
}  // namespace

PlacementTree::PlacementTree(std::span<const int> hosts) : host_of(number_hosts(hosts)) {
  for (size_t q = 0; q < host_of.size(); q++) {
    const auto h = static_cast<size_t>(host_of[q]);
    if (h == ranks.size()) ranks.emplace_back();
    ranks[h].push_back(static_cast<int>(q));
  }
  of_host.resize(ranks.size());
  if (!host_of.empty()) find_subtrees(this, 0, n_ranks());
}

int PlacementTree::n_owners() const {
  size_t n = host_of.size();
  for (const std::vector<int>& there : ranks) n = std::min(n, there.size());
  return static_cast<int>(n);
}

int PlacementTree::host_of_all(int lo, int hi) const {
  const auto first = host_of.begin() + lo, last = host_of.begin() + hi;
  return std::all_of(first, last, [&](int h) { return h == *first; }) ? *first : -1;
}

void combine_tree(Builder* b, int round, int lo, int hi, const LeafOf& leaf,
                  std::span<const uint32_t> slots) {
  using From = Leaf::From;
  const Leaf whole = leaf(lo, hi);
  if (whole.from == From::kOwn) return b->copy(round, whole.chunk, slots[0]);
  if (whole.from == From::kPeer) return b->recv(round, whole.peer, slots[0]);
  const int mid = lo + canonical_left(hi - lo);
  const Leaf left = leaf(lo, mid), right = leaf(mid, hi);
  if (left.from == From::kOwn && right.from == From::kPeer)
    return b->recv_reduce(round, right.peer, left.chunk, slots[0], Src::kLeft);
  if (left.from == From::kPeer && right.from == From::kOwn)
    return b->recv_reduce(round, left.peer, right.chunk, slots[0], Src::kRight);
  if (left.from == From::kOwn && right.from == From::kHalves) {
    combine_tree(b, round, mid, hi, leaf, slots);
    return b->reduce(round, left.chunk, slots[0], Src::kLeft);
  }
  combine_tree(b, round, lo, mid, leaf, slots);
  switch (right.from) {
    case From::kOwn: return b->reduce(round, right.chunk, slots[0]);
    case From::kPeer: return b->recv_reduce(round, right.peer, slots[0], slots[0], Src::kLeft);
    case From::kHalves: break;
  }
  combine_tree(b, round, mid, hi, leaf, slots.subspan(1));
  b->reduce(round, slots[1], slots[0]);
}

}  // namespace pycomm
