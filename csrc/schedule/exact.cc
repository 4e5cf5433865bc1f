// The schedule between hosts: partials to the owner of each part, combined there in the order of T.
#include "schedule/exact.h"

namespace pycomm {

namespace {

struct Between {
  const PlacementTree& tree;
  int host;
  uint32_t n_parts;

  // The chunk of a subtree's partial (counted over this host's), of one part.
  uint32_t partial(const Builder& b, int subtree, int part) const {
    return b.in(subtree * static_cast<int>(n_parts) + part);
  }

  void declare_inputs(Builder* b) const {
    for (int s = 0; s < tree.n_subtrees(host); s++) b->add_in(0, n_parts);
  }

  void send_partials(Builder* b, int to, int part) const {
    for (int s = 0; s < tree.n_subtrees(host); s++) b->send(0, to, partial(*b, s, part));
  }

  // out = T of this part, over the partials of all hosts.
  void combine(Builder* b, int part, uint32_t out) const {
    std::vector<uint32_t> slots = {out};
    for (int i = 1; i < combine_slots(tree.n_ranks()); i++) slots.push_back(b->scratch(i - 1));
    const std::vector<int>& mine = tree.of_host[static_cast<size_t>(host)];
    const LeafOf leaf = [&](int lo, int hi) -> Leaf {
      const int there = tree.host_of_all(lo, hi);
      if (there < 0) return {};
      if (there != host) return {Leaf::From::kPeer, 0, there};
      int s = 0;
      while (tree.subtrees[static_cast<size_t>(mine[static_cast<size_t>(s)])].lo != lo) s++;
      return {Leaf::From::kOwn, partial(*b, s, part), 0};
    };
    combine_tree(b, 0, 0, tree.n_ranks(), leaf, slots);
  }

  void add_slots(Builder* b, int part) const {
    for (int i = 1; i < combine_slots(tree.n_ranks()); i++) b->add_scratch(static_cast<uint32_t>(part));
  }
};

// Sends start at the next host, so that not all address host 0 first.
template <class Fn>
void for_each_other(int host, int n, Fn fn) {
  for (int i = 1; i < n; i++) fn((host + i) % n);
}

Schedule scattered(const PlacementTree& tree, int host, bool gather) {
  const int n = tree.n_hosts();
  const Between between{tree, host, static_cast<uint32_t>(n)};
  Builder b(host, n, 0, static_cast<uint32_t>(n));
  between.declare_inputs(&b);
  if (gather) {
    b.add_out(0, static_cast<uint32_t>(n));
  } else {
    b.add_out(static_cast<uint32_t>(host));
  }
  between.add_slots(&b, host);
  const uint32_t mine = b.out(gather ? host : 0);
  for_each_other(host, n, [&](int h) { between.send_partials(&b, h, h); });
  between.combine(&b, host, mine);
  if (gather) {
    for_each_other(host, n, [&](int h) { b.send(1, h, mine); });
    for_each_other(host, n, [&](int h) { b.recv(1, h, b.out(h)); });
  }
  return b.finish();
}

Schedule reduced(const PlacementTree& tree, int host, int root_host) {
  const Between between{tree, host, 1};
  Builder b(host, tree.n_hosts(), root_host, 1);
  between.declare_inputs(&b);
  if (host != root_host) {
    between.send_partials(&b, root_host, 0);
    return b.finish();
  }
  b.add_out(0);
  between.add_slots(&b, 0);
  between.combine(&b, 0, b.out(0));
  return b.finish();
}

}  // namespace

Schedule exact_between(Collective c, const PlacementTree& tree, int host, int root_host) {
  switch (c) {
    case Collective::kAllReduce: return scattered(tree, host, true);
    case Collective::kReduceScatter: return scattered(tree, host, false);
    case Collective::kReduce: return reduced(tree, host, root_host);
    case Collective::kAllGather:
    case Collective::kBroadcast:
    case Collective::kGather:
    case Collective::kScatter: break;
  }
  return Schedule();
}

}  // namespace pycomm
