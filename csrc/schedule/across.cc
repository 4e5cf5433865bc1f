// The schedule of all ranks on all hosts, around the schedule between hosts; and its proof (exact.h).
//
// A *unit* is what one owner of each host carries between hosts in one run of the hosts' schedule: which part
// of the whole vector each of that schedule's parts stands for. all_reduce and reduce have a unit for each
// owner. reduce_scatter has one for each local rank of the largest host, carried by the owners in turn, since
// a symbolic part cannot be cut as the engine cuts a host's block; the bytes between hosts are the same.
//
// Rounds: 0 inputs to the owners, which make the partials; then those of the hosts' schedule; last the
// results to the ranks of each host.
#include <algorithm>
#include <array>

#include "schedule/exact.h"

namespace pycomm {

namespace {

struct Unit {
  int owner;                 // local rank, on every host
  std::vector<int> part_of;  // of each part of the hosts' schedule; -1: there is none
};

const char* name_between(Collective c, const PlacementTree& tree) {
  if (!keeps_order(tree.host_of)) return "exact";
  switch (c) {
    case Collective::kAllReduce: return "halving_doubling";
    case Collective::kReduceScatter: return "halving";
    case Collective::kReduce: return "binomial";
    case Collective::kAllGather:
    case Collective::kBroadcast:
    case Collective::kGather:
    case Collective::kScatter: break;
  }
  return "";
}

Status build_between(Collective c, const PlacementTree& tree, int host, int root_host, Schedule* out) {
  const std::string name = name_between(c, tree);
  if (name == "exact") {
    *out = exact_between(c, tree, host, root_host);
    return Status();
  }
  return build_schedule(*find_algorithm(c, name), host, tree.n_hosts(), root_host, 1, out);
}

std::vector<Unit> make_units(Collective c, const PlacementTree& tree, int n_parts_between) {
  const int k = tree.n_owners();
  std::vector<Unit> units;
  if (c != Collective::kReduceScatter) {
    for (int i = 0; i < k; i++) {
      units.push_back({i, {}});
      for (int p = 0; p < n_parts_between; p++) units.back().part_of.push_back(i * n_parts_between + p);
    }
    return units;
  }
  size_t largest = 0;
  for (const std::vector<int>& there : tree.ranks) largest = std::max(largest, there.size());
  for (size_t j = 0; j < largest; j++) {
    units.push_back({static_cast<int>(j) % k, {}});
    for (const std::vector<int>& there : tree.ranks)
      units.back().part_of.push_back(j < there.size() ? there[j] : -1);
  }
  return units;
}

// Builds one rank's schedule.
class Embedding {
 public:
  Embedding(Collective c, const PlacementTree& tree, int rank, int root, const Schedule& between)
      : c_(c),
        tree_(tree),
        rank_(rank),
        root_(root),
        between_(between),
        here_(tree.ranks[static_cast<size_t>(tree.host_of[static_cast<size_t>(rank)])]),
        units_(make_units(c, tree, static_cast<int>(between.n_parts))),
        b_(rank, tree.n_ranks(), root, n_parts()) {}

  Schedule run() {
    declare();
    to_owners();
    int last = 0;
    for (const Step& step : between_.steps) last = std::max(last, static_cast<int>(step.round));
    for (int round = 0; round <= last; round++) {
      for (size_t u = 0; u < units_.size(); u++) {
        if (owns(u)) run_between(round, u);
      }
    }
    from_owners(last + 2);
    return b_.finish();
  }

 private:
  int owner_rank(int host, size_t u) const {
    return tree_.ranks[static_cast<size_t>(host)][static_cast<size_t>(units_[u].owner)];
  }
  int host() const { return tree_.host_of[static_cast<size_t>(rank_)]; }
  bool owns(size_t u) const { return owner_rank(host(), u) == rank_; }
  uint32_t n_parts() const {
    if (c_ == Collective::kReduceScatter) return static_cast<uint32_t>(tree_.n_ranks());
    return static_cast<uint32_t>(tree_.n_owners()) * between_.n_parts;
  }
  // Whether `rank` ends with this part.
  bool ends_with(int rank, int part) const {
    if (c_ == Collective::kReduceScatter) return rank == part;
    return c_ == Collective::kAllReduce || rank == root_;
  }
  uint32_t out(int part) const { return b_.out(c_ == Collective::kReduceScatter ? 0 : part); }

  uint32_t new_scratch(int part) {
    b_.add_scratch(static_cast<uint32_t>(part));
    return b_.scratch(n_scratch_++);
  }

  // An owner's chunks of the hosts' schedule: inputs and scratch become scratch, outputs outputs if this rank
  // ends with them.
  void declare() {
    b_.add_in(0, n_parts());
    if (c_ == Collective::kReduceScatter) {
      b_.add_out(static_cast<uint32_t>(rank_));
    } else if (ends_with(rank_, 0)) {
      b_.add_out(0, n_parts());
    }
    chunk_.resize(units_.size());
    slots_.resize(units_.size());
    for (size_t u = 0; u < units_.size(); u++) {
      if (!owns(u)) continue;
      const Schedule& s = between_;
      for (uint32_t c = 0; c < s.n_chunks(); c++) {
        const int part = units_[u].part_of[s.part[c]];
        const bool is_out = c >= s.n_in && c < s.n_in + s.n_out;
        const bool ends_here = is_out && part >= 0 && ends_with(rank_, part);
        chunk_[u].push_back(part < 0 ? 0 : ends_here ? out(part) : new_scratch(part));
      }
      slots_[u].resize(s.n_parts);
      for (uint32_t p = 0; p < s.n_parts; p++) {
        const int part = units_[u].part_of[p];
        for (int i = 1; part >= 0 && i < combine_slots(static_cast<int>(here_.size())); i++)
          slots_[u][p].push_back(new_scratch(part));
      }
    }
  }

  void to_owners() {
    for (size_t u = 0; u < units_.size(); u++) {
      for (const int part : units_[u].part_of) {
        if (part >= 0 && !owns(u)) b_.send(0, owner_rank(host(), u), b_.in(part));
      }
    }
    const std::vector<int>& mine = tree_.of_host[static_cast<size_t>(host())];
    for (size_t u = 0; u < units_.size(); u++) {
      for (uint32_t p = 0; p < between_.n_parts && owns(u); p++) {
        const int part = units_[u].part_of[p];
        if (part < 0) continue;
        for (size_t s = 0; s < mine.size(); s++) {
          make_partial(tree_.subtrees[static_cast<size_t>(mine[s])], b_.in(part),
                       chunk_[u][s * between_.n_parts + p], slots_[u][p]);
        }
      }
    }
  }

  void make_partial(const Subtree& t, uint32_t own, uint32_t to, const std::vector<uint32_t>& more) {
    std::vector<uint32_t> slots = {to};
    slots.insert(slots.end(), more.begin(), more.end());
    const LeafOf leaf = [&](int lo, int hi) -> Leaf {
      if (hi - lo > 1) return {};
      return lo == rank_ ? Leaf{Leaf::From::kOwn, own, 0} : Leaf{Leaf::From::kPeer, 0, lo};
    };
    combine_tree(&b_, 0, t.lo, t.hi, leaf, slots);
  }

  void run_between(int round, size_t u) {
    for (const Step& s : between_.steps) {
      if (static_cast<int>(s.round) != round) continue;
      const int peer = owner_rank(static_cast<int>(s.peer), u);
      const Src side = s.src_left() ? Src::kLeft : Src::kRight;
      for (uint32_t c = 0; c < s.n_chunks; c++) {
        const bool sends = s.op() == StepOp::kSend;
        if (units_[u].part_of[between_.part[(sends ? s.src : s.dst) + c]] < 0) continue;
        const uint32_t src = chunk_[u][s.src + c], dst = chunk_[u][s.dst + c];
        switch (s.op()) {
          case StepOp::kSend: b_.send(round + 1, peer, src); break;
          case StepOp::kRecv: b_.recv(round + 1, peer, dst); break;
          case StepOp::kRecvReduce: b_.recv_reduce(round + 1, peer, src, dst, side); break;
          case StepOp::kReduce: b_.reduce(round + 1, src, dst, side); break;
          case StepOp::kCopy: b_.copy(round + 1, src, dst); break;
        }
      }
    }
  }

  void from_owners(int round) {
    for (size_t u = 0; u < units_.size(); u++) {
      for (uint32_t o = 0; o < between_.n_out; o++) {
        const int part = units_[u].part_of[between_.part[between_.out(o)]];
        for (const int q : here_) {
          if (part < 0 || q == owner_rank(host(), u) || !ends_with(q, part)) continue;
          if (owns(u)) b_.send(round, q, chunk_[u][between_.out(o)]);
          if (q == rank_) b_.recv(round, owner_rank(host(), u), out(part));
        }
      }
    }
  }

  Collective c_;
  const PlacementTree& tree_;
  int rank_, root_;
  const Schedule& between_;
  const std::vector<int>& here_;
  std::vector<Unit> units_;
  Builder b_;
  int n_scratch_ = 0;
  std::vector<std::vector<uint32_t>> chunk_;  // of each unit of mine: the hosts' schedule's chunks
  std::vector<std::vector<std::vector<uint32_t>>> slots_;  // of each unit and part: to make partials with
};

int64_t closed_form(Collective c, const PlacementTree& tree, int host, int root_host) {
  const int64_t n_others = tree.n_hosts() - 1, k = tree.n_owners(), s = tree.n_subtrees(host);
  switch (c) {
    case Collective::kAllReduce: return k * (s + 1) * n_others;
    case Collective::kReduceScatter:
      return s * (tree.n_ranks() - static_cast<int64_t>(tree.ranks[static_cast<size_t>(host)].size()));
    case Collective::kReduce: return host == root_host ? 0 : s * k;
    case Collective::kAllGather:
    case Collective::kBroadcast:
    case Collective::kGather:
    case Collective::kScatter: break;
  }
  return 0;
}

void count_leaving(const PlacementTree& tree, std::span<const Schedule> schedules,
                   std::vector<int64_t>* leaving) {
  leaving->assign(static_cast<size_t>(tree.n_hosts()), 0);
  for (const Schedule& s : schedules) {
    const int host = tree.host_of[static_cast<size_t>(s.rank)];
    for (const Step& step : s.steps) {
      if (step.op() == StepOp::kSend && tree.host_of[step.peer] != host)
        (*leaving)[static_cast<size_t>(host)] += static_cast<int64_t>(step.n_chunks);
    }
  }
}

std::string placement_text(const PlacementTree& tree) {
  std::string text;
  for (const int h : tree.host_of) text += format("%s%d", text.empty() ? "" : ",", h);
  return text;
}

}  // namespace

Status across_schedules(Collective c, const PlacementTree& tree, int root, std::vector<Schedule>* out) {
  const int root_host = tree.host_of[static_cast<size_t>(root)];
  std::vector<Schedule> between(static_cast<size_t>(tree.n_hosts()));
  for (int h = 0; h < tree.n_hosts(); h++)
    PYCOMM_RETURN_IF_ERROR(build_between(c, tree, h, root_host, &between[static_cast<size_t>(h)]));
  out->clear();
  for (int q = 0; q < tree.n_ranks(); q++) {
    const Schedule& s = between[static_cast<size_t>(tree.host_of[static_cast<size_t>(q)])];
    out->push_back(Embedding(c, tree, q, root, s).run());
  }
  return Status();
}

Status verify_across(Collective c, std::span<const int> host_of, int root, bool in_place, AcrossProof* out) {
  const PlacementTree tree(host_of);
  const auto refuse = [](std::string what) { return Status::error(Code::kValue, std::move(what)); };
  if (name_between(c, tree)[0] == '\0')
    return refuse(format("%s does not reduce: no order to keep", collective_name(c)));
  if (tree.n_hosts() < 2) return refuse("the ranks are on one host; expected at least two hosts");
  if (tree.n_ranks() > kMaxAcrossRanks)
    return refuse(format("%d ranks; up to %d can be verified over hosts", tree.n_ranks(), kMaxAcrossRanks));
  if (root < 0 || root >= tree.n_ranks())
    return refuse(format("root is %d, expected 0 to %d", root, tree.n_ranks() - 1));
  std::vector<Schedule> schedules;
  PYCOMM_RETURN_IF_ERROR(across_schedules(c, tree, root, &schedules));
  out->between = name_between(c, tree);
  out->n_parts = schedules[0].n_parts;
  out->n_subtrees.clear();
  for (int h = 0; h < tree.n_hosts(); h++) out->n_subtrees.push_back(tree.n_subtrees(h));
  count_leaving(tree, schedules, &out->n_parts_leaving);
  out->proof = verify_schedules(schedules, {c, root, in_place, true});
  Proof& p = out->proof;
  for (int h = 0; h < tree.n_hosts() && p.ok && out->between == "exact"; h++) {
    const int64_t want = closed_form(c, tree, h, tree.host_of[static_cast<size_t>(root)]);
    const int64_t have = out->n_parts_leaving[static_cast<size_t>(h)];
    p.ok = have == want;
    if (!p.ok)
      p.violation.what = format("%lld parts leave host %d, the closed form says %lld",
                                static_cast<long long>(have), h, static_cast<long long>(want));
  }
  if (p.ok) return Status();
  return Status::error(Code::kSchedule, format("%s over hosts %s: %s", collective_name(c),
                                               placement_text(tree).c_str(), p.violation.text().c_str()));
}

}  // namespace pycomm
