// Plans proved without the engine: the instructions of all ranks, run by an interpreter that knows the waits
// only.
//
// Two things are shown for every algorithm, number of ranks, root, mode and binding. *Values*: in three very
// unfair orders (lowest rank first, highest first, random) nothing deadlocks and every output ends as its
// collective defines it, in the reduction tree that is promised. *No order matters*: clocks of what each
// instruction may rely on (its rank's past, and the past of the posts that it waits for) show that any two
// accesses of different ranks to one place, one of them a write, are ordered; so every order gives those
// values.
//
// Places: the user's input and output (one place when in place), slots of the stage, private scratch. Staging
// comes before everything (all heads are awaited), the return to the caller after everything.
#include "engine/plan.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>

namespace pycomm {
namespace {

// Reduction trees; equal trees are equal numbers. A leaf is one rank's input of one part.
class Trees {
 public:
  int leaf(int rank, uint32_t part) { return make({-1 - rank, static_cast<int>(part)}, {{rank, part}}); }
  int node(int l, int r) {
    auto leaves = leaves_[static_cast<size_t>(l)];
    leaves.insert(leaves.end(), leaves_[static_cast<size_t>(r)].begin(),
                  leaves_[static_cast<size_t>(r)].end());
    return make({l, r}, std::move(leaves));
  }
  // T(lo, hi) of docs/numerics.md over given values.
  int canonical(const std::vector<int>& x, size_t lo, size_t hi) {
    const size_t n = hi - lo;
    if (n == 1) return x[lo];
    size_t p = 1;
    while (2 * p <= n) p *= 2;
    const size_t m = std::min(p, n - p / 2);
    const int left = canonical(x, lo, lo + m);
    return node(left, canonical(x, lo + m, hi));
  }
  // Every rank exactly once, all of this part.
  bool complete(int v, int n, uint32_t part) const {
    std::set<int> ranks;
    for (const auto& [rank, p] : leaves_[static_cast<size_t>(v)]) {
      if (p != part || !ranks.insert(rank).second) return false;
    }
    return static_cast<int>(ranks.size()) == n;
  }

 private:
  int make(std::pair<int, int> key, std::vector<std::pair<int, uint32_t>> leaves) {
    const auto [it, fresh] = index_.emplace(key, static_cast<int>(leaves_.size()));
    if (fresh) leaves_.push_back(std::move(leaves));
    return it->second;
  }
  std::map<std::pair<int, int>, int> index_;
  std::vector<std::vector<std::pair<int, uint32_t>>> leaves_;
};

enum class Kind { kIn, kOut, kSlot, kScratch };
using Place = std::tuple<int, Kind, uint32_t>;  // rank, kind, part or index

struct Touch {
  int rank;
  size_t at;  // instruction
  bool write;
};

class Machine {
 public:
  Machine(const Algorithm& a, int n, int root, int n_chunks, PlanMode mode, bool in_place)
      : a_(a), n_(n), root_(root), in_place_(in_place) {
    for (int r = 0; r < n; r++) {
      plans_.emplace_back();
      const Status s = make_plan(a, r, n, root, n_chunks, mode, &plans_.back());
      if (!s.ok()) ADD_FAILURE() << s.message();
      if (!s.ok()) return;
    }
    ok_ = true;
  }

  bool usable() const { return ok_ && (tiled() || plans_[0]->direct_ok); }
  bool tiled() const { return plans_[0]->mode == PlanMode::kTiled; }
  const Plan& plan(int r) const { return *plans_[static_cast<size_t>(r)]; }

  // All ranks lowered the program alike, and no wait names what does not exist.
  void check_form() {
    for (int r = 0; r < n_; r++) {
      const Plan& p = plan(r);
      ASSERT_EQ(p.n_posts, plan(0).n_posts);
      ASSERT_EQ(p.max_exposed, plan(0).max_exposed);
      ASSERT_EQ(p.n_stages, plan(0).n_stages);
      ASSERT_EQ(p.fused_scale, plan(0).fused_scale);
      ASSERT_EQ(p.direct_ok, plan(0).direct_ok);
      ASSERT_EQ(p.n_posts[static_cast<size_t>(r)], p.own.n_posts);
      uint32_t posts = 0;
      for (size_t i = 0; i < p.own.instrs.size(); i++) {
        posts += p.own.instrs[i].post;
        // The second phase must not hold anything that a peer waits for.
        ASSERT_TRUE(i < p.second_stage || !p.own.instrs[i].post);
      }
      ASSERT_EQ(posts, p.own.n_posts);
      std::vector<Wait> waits = p.own.exit_waits;
      for (const Instr& i : p.own.instrs) waits.insert(waits.end(), i.waits.begin(), i.waits.end());
      for (const Wait& w : waits) {
        ASSERT_TRUE(w.peer >= 0 && w.peer < n_ && w.peer != r);
        ASSERT_TRUE(w.post >= 1 && w.post <= plan(w.peer).own.n_posts)
            << "rank " << r << " waits for an unknown post";
      }
    }
  }

  // `choose` picks the next rank out of those that can run.
  template <class Choose>
  void run(Choose choose) {
    reset();
    for (;;) {
      std::vector<int> ready;
      bool all_done = true;
      for (int r = 0; r < n_; r++) {
        if (done_[static_cast<size_t>(r)] == plan(r).own.instrs.size()) continue;
        all_done = false;
        if (can_run(r)) ready.push_back(r);
      }
      if (all_done) break;
      ASSERT_FALSE(ready.empty()) << "deadlock";
      step(choose(ready));
      if (testing::Test::HasFatalFailure()) return;
    }
    for (int r = 0; r < n_; r++) leave(r);
    check_outputs();
  }

  // After a run: every conflicting pair of accesses by different ranks is ordered by the waits.
  void check_races() const {
    for (const auto& [place, touches] : touches_) {
      for (size_t i = 0; i < touches.size(); i++) {
        for (size_t j = i + 1; j < touches.size(); j++) {
          const Touch &x = touches[i], &y = touches[j];
          if (x.rank == y.rank || (!x.write && !y.write)) continue;
          const bool ordered = x.at < seen_[static_cast<size_t>(y.rank)][y.at][static_cast<size_t>(x.rank)] ||
                               y.at < seen_[static_cast<size_t>(x.rank)][x.at][static_cast<size_t>(y.rank)];
          ASSERT_TRUE(ordered) << "rank " << x.rank << " instruction " << x.at << " and rank " << y.rank
                               << " instruction " << y.at << " race for a place of rank "
                               << std::get<0>(place) << ", kind " << static_cast<int>(std::get<1>(place))
                               << ", index " << std::get<2>(place);
        }
      }
    }
  }

 private:
  Place user(int rank, const ChunkPlace& c) const {
    if (c.is_out && !(in_place_ && holds_input(rank, c.part))) return {rank, Kind::kOut, c.part};
    return {rank, Kind::kIn, c.part};
  }
  bool holds_input(int rank, uint32_t part) const {
    for (const ChunkPlace& c : plan(rank).own.chunks) {
      if (c.is_in && c.part == part) return true;
    }
    return false;
  }
  // Where the engine would go for this chunk (Engine::run_instr).
  Place place(int rank, Ref x, bool prefer_slot) const {
    const ChunkPlace& c = plan(rank).chunks[static_cast<size_t>(x.rank)][x.chunk];
    const bool own = x.rank == rank;
    if (!tiled() && (c.is_in || c.is_out)) return user(x.rank, c);
    if (c.exposed >= 0 && (!own || !c.is_in || prefer_slot))
      return {x.rank, Kind::kSlot, static_cast<uint32_t>(c.exposed)};
    EXPECT_TRUE(own) << "rank " << rank << " reaches into private memory of rank " << x.rank;
    if (c.is_in || c.is_out) return user(x.rank, c);
    return {x.rank, Kind::kScratch, static_cast<uint32_t>(c.scratch)};
  }

  void reset() {
    memory_.clear();
    touches_.clear();
    done_.assign(static_cast<size_t>(n_), 0);
    seen_.assign(static_cast<size_t>(n_), {});
    clock_.assign(static_cast<size_t>(n_), std::vector<size_t>(static_cast<size_t>(n_), 0));
    post_at_.assign(static_cast<size_t>(n_), {});
    for (int r = 0; r < n_; r++) {
      for (size_t i = 0; i < plan(r).own.instrs.size(); i++) {
        if (plan(r).own.instrs[i].post) post_at_[static_cast<size_t>(r)].push_back(i);
      }
      for (const ChunkPlace& c : plan(r).own.chunks) {
        if (!c.is_in) continue;
        memory_[user(r, c)] = trees_.leaf(r, c.part);
        if (tiled() && c.exposed >= 0)
          memory_[{r, Kind::kSlot, static_cast<uint32_t>(c.exposed)}] = trees_.leaf(r, c.part);
      }
    }
  }
  size_t post_index(const Wait& w) const { return post_at_[static_cast<size_t>(w.peer)][w.post - 1]; }
  bool can_run(int r) const {
    for (const Wait& w : plan(r).own.instrs[done_[static_cast<size_t>(r)]].waits) {
      if (done_[static_cast<size_t>(w.peer)] <= post_index(w)) return false;
    }
    return true;
  }
  // What r may rely on after these waits.
  void learn(int r, const std::vector<Wait>& waits) {
    auto& clock = clock_[static_cast<size_t>(r)];
    for (const Wait& w : waits) {
      const auto& theirs = seen_[static_cast<size_t>(w.peer)][post_index(w)];
      for (size_t q = 0; q < clock.size(); q++) clock[q] = std::max(clock[q], theirs[q]);
      auto& peer = clock[static_cast<size_t>(w.peer)];
      peer = std::max(peer, post_index(w) + 1);
    }
    seen_[static_cast<size_t>(r)].push_back(clock);
  }
  void touch(int r, Place p, bool write) {
    touches_[p].push_back({r, seen_[static_cast<size_t>(r)].size() - 1, write});
  }
  void step(int r) {
    const size_t at = done_[static_cast<size_t>(r)];
    const Instr& instr = plan(r).own.instrs[at];
    learn(r, instr.waits);
    ASSERT_FALSE(instr.srcs.empty());
    ASSERT_EQ(instr.dsts[0].rank, r);
    std::vector<int> values;
    for (Ref x : instr.srcs) {
      const Place p = place(r, x, instr.own_input_from_slot);
      touch(r, p, false);
      const auto it = memory_.find(p);
      ASSERT_NE(it, memory_.end()) << "rank " << r << " reads what nobody wrote";
      values.push_back(it->second);
    }
    const int value = trees_.canonical(values, 0, values.size());
    std::vector<Place> dsts;
    for (Ref x : instr.dsts) dsts.push_back(place(r, x, true));
    const ChunkPlace& d = plan(r).own.chunks[instr.dsts[0].chunk];
    if (tiled() && d.is_out && d.exposed >= 0 && instr.last_write) dsts.push_back(user(r, d));
    for (const Place& p : dsts) {
      touch(r, p, true);
      memory_[p] = value;
    }
    done_[static_cast<size_t>(r)]++;
    clock_[static_cast<size_t>(r)][static_cast<size_t>(r)] = at + 1;
  }
  // Back at the caller, who may do with his tensors as he likes.
  void leave(int r) {
    learn(r, plan(r).own.exit_waits);
    for (const ChunkPlace& c : plan(r).own.chunks) {
      if (c.is_in || c.is_out) touch(r, user(r, c), true);
    }
  }

  void check_outputs() {
    std::map<uint32_t, int> agreed;  // part -> tree
    for (int r = 0; r < n_; r++) {
      std::set<uint32_t> parts;
      for (const ChunkPlace& c : plan(r).own.chunks) {
        if (!c.is_out) continue;
        parts.insert(c.part);
        const auto it = memory_.find(user(r, c));
        ASSERT_NE(it, memory_.end()) << "rank " << r << " has no output for part " << c.part;
        const int value = it->second;
        switch (a_.collective) {
          case Collective::kAllReduce:
          case Collective::kReduceScatter:
          case Collective::kReduce: {
            ASSERT_TRUE(trees_.complete(value, n_, c.part)) << "rank " << r << " part " << c.part;
            ASSERT_EQ(agreed.emplace(c.part, value).first->second, value) << "ranks differ in their tree";
            std::vector<int> leaves;
            for (int q = 0; q < n_; q++) leaves.push_back(trees_.leaf(q, c.part));
            ASSERT_TRUE(!a_.deterministic || value == trees_.canonical(leaves, 0, leaves.size()));
            break;
          }
          case Collective::kAllGather:
          case Collective::kGather: ASSERT_EQ(value, trees_.leaf(static_cast<int>(c.part), c.part)); break;
          case Collective::kBroadcast:
          case Collective::kScatter: ASSERT_EQ(value, trees_.leaf(root_, c.part)); break;
        }
      }
      const bool at_root = a_.collective != Collective::kReduce && a_.collective != Collective::kGather;
      const bool one = a_.collective == Collective::kReduceScatter || a_.collective == Collective::kScatter;
      const size_t want = !at_root && r != root_ ? 0 : one ? 1 : plan(r).n_parts;
      ASSERT_EQ(parts.size(), want) << "outputs of rank " << r;
      ASSERT_TRUE(!one || *parts.begin() == static_cast<uint32_t>(r));
    }
  }

  const Algorithm& a_;
  int n_, root_;
  bool in_place_;
  bool ok_ = false;
  std::vector<std::unique_ptr<Plan>> plans_;
  Trees trees_;
  std::map<Place, int> memory_;
  std::map<Place, std::vector<Touch>> touches_;
  std::vector<size_t> done_;
  std::vector<std::vector<std::vector<size_t>>>
      seen_;  // rank, instruction: how far each rank had surely come
  std::vector<std::vector<size_t>> clock_;
  std::vector<std::vector<size_t>> post_at_;
};

bool has_root(Collective c) {
  return c == Collective::kBroadcast || c == Collective::kReduce || c == Collective::kGather ||
         c == Collective::kScatter;
}

const Algorithm& named(Collective c, const char* name) {
  const Algorithm* a = find_algorithm(c, name);
  EXPECT_NE(a, nullptr) << name;
  return *a;
}

class EveryPlan : public testing::TestWithParam<const Algorithm*> {};

TEST_P(EveryPlan, GivesTheCollectiveInEveryOrder) {
  const Algorithm& a = *GetParam();
  std::mt19937 random(7);
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17}) {
    std::set<int> roots = {0};
    if (has_root(a.collective)) roots.insert({n - 1, n / 2});
    for (int root : roots) {
      for (int n_chunks : {0, 3}) {
        if (n_chunks > 0 && a.default_n_chunks == 1) continue;
        for (PlanMode mode : {PlanMode::kTiled, PlanMode::kDirect, PlanMode::kDirectInPlace}) {
          if (mode == PlanMode::kDirectInPlace && !a.in_place) continue;
          for (bool in_place : {false, true}) {
            if (mode != PlanMode::kTiled && in_place != (mode == PlanMode::kDirectInPlace)) continue;
            SCOPED_TRACE(format("n %d, root %d, n_chunks %d, mode %d, in place %d", n, root, n_chunks,
                                static_cast<int>(mode), in_place));
            Machine m(a, n, root, n_chunks, mode, in_place);
            if (!m.usable()) continue;  // the engine falls back to tiled
            m.check_form();
            if (HasFatalFailure()) return;
            m.run([](const std::vector<int>& ready) { return ready.front(); });
            if (HasFatalFailure()) return;
            m.check_races();
            if (HasFatalFailure()) return;
            m.run([](const std::vector<int>& ready) { return ready.back(); });
            if (HasFatalFailure()) return;
            m.run([&](const std::vector<int>& ready) { return ready[random() % ready.size()]; });
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

std::vector<const Algorithm*> all() {
  std::vector<const Algorithm*> list;
  for (const Algorithm& a : catalog()) list.push_back(&a);
  return list;
}
INSTANTIATE_TEST_SUITE_P(Catalog, EveryPlan, testing::ValuesIn(all()), [](const auto& info) {
  return std::string(collective_name(info.param->collective)) + "_" + info.param->name;
});

TEST(Plan, DirectAllReduceIsOneReadOfAllAndAPutToAll) {
  const Algorithm& a = named(Collective::kAllReduce, "direct");
  for (int n : {2, 3, 5, 8, 17}) {
    for (PlanMode mode : {PlanMode::kDirect, PlanMode::kDirectInPlace}) {
      for (int r = 0; r < n; r++) {
        std::unique_ptr<Plan> plan;
        ASSERT_TRUE(make_plan(a, r, n, 0, 0, mode, &plan).ok());
        ASSERT_TRUE(plan->direct_ok);
        ASSERT_EQ(plan->own.instrs.size(), 1u) << "n " << n << " rank " << r;
        const Instr& i = plan->own.instrs[0];
        ASSERT_EQ(i.srcs.size(), static_cast<size_t>(n));
        ASSERT_EQ(i.dsts.size(), static_cast<size_t>(n));
        ASSERT_TRUE(i.waits.empty());
        ASSERT_TRUE(i.complete && plan->fused_scale);
      }
    }
  }
}

TEST(Plan, OneShotAllReduceHasNoPosts) {
  const Algorithm& a = named(Collective::kAllReduce, "one_shot");
  for (int n : {2, 3, 5, 8, 17}) {
    std::unique_ptr<Plan> plan;
    ASSERT_TRUE(make_plan(a, n - 1, n, 0, 0, PlanMode::kTiled, &plan).ok());
    for (uint32_t posts : plan->n_posts) ASSERT_EQ(posts, 0u);
    ASSERT_EQ(plan->n_stages, 1u);
    ASSERT_EQ(plan->own.instrs.size(), 1u);
  }
}

TEST(Plan, WhatCannotRunInPlaceIsRefused) {
  for (const Algorithm& a : catalog()) {
    if (a.in_place) continue;
    std::unique_ptr<Plan> plan;
    EXPECT_EQ(make_plan(a, 0, 2, 0, 0, PlanMode::kDirectInPlace, &plan).code(), Code::kSchedule);
  }
}

}  // namespace
}  // namespace pycomm
