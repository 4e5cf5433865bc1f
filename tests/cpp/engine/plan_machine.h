// Plans without the engine: an interpreter of the instructions of all ranks that knows the waits only.
//
// Values are reduction trees. A run takes any order of the ranks that the waits allow. Clocks of what each
// instruction may rely on (its rank's past, and the past of the posts that it waits for) show afterwards that
// any two accesses of different ranks to one place, one of them a write, are ordered; so every order gives
// the values of this one.
//
// Places: the user's input and output (one place when in place), slots of the stage, private scratch. Staging
// comes before everything (all heads are awaited), the return to the caller after everything.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "engine/plan.h"

namespace pycomm {

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
  // For tests that take something away from a plan.
  Plan& plan(int r) { return *plans_[static_cast<size_t>(r)]; }

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
  }
  // After a run: every output is what its collective defines, in the promised tree.
  testing::AssertionResult outputs_are_right() {
    std::map<uint32_t, int> agreed;  // part -> tree
    for (int r = 0; r < n_; r++) {
      const testing::AssertionResult right = outputs_of(r, &agreed);
      if (!right) return right;
    }
    return testing::AssertionSuccess();
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

  testing::AssertionResult outputs_of(int r, std::map<uint32_t, int>* agreed) {
    const auto wrong = [r](const char* what) {
      return testing::AssertionFailure() << "rank " << r << ": " << what << ", part ";
    };
    std::set<uint32_t> parts;
    for (const ChunkPlace& c : plan(r).own.chunks) {
      if (!c.is_out) continue;
      parts.insert(c.part);
      const auto it = memory_.find(user(r, c));
      if (it == memory_.end()) return wrong("an output was never written") << c.part;
      const int value = it->second;
      switch (a_.collective) {
        case Collective::kAllReduce:
        case Collective::kReduceScatter:
        case Collective::kReduce: {
          if (!trees_.complete(value, n_, c.part)) return wrong("not every input exactly once") << c.part;
          if (agreed->emplace(c.part, value).first->second != value)
            return wrong("a tree that differs from other ranks'") << c.part;
          std::vector<int> leaves;
          for (int q = 0; q < n_; q++) leaves.push_back(trees_.leaf(q, c.part));
          if (a_.deterministic && value != trees_.canonical(leaves, 0, leaves.size()))
            return wrong("not the canonical tree") << c.part;
          break;
        }
        case Collective::kAllGather:
        case Collective::kGather:
          if (value != trees_.leaf(static_cast<int>(c.part), c.part))
            return wrong("not its owner's") << c.part;
          break;
        case Collective::kBroadcast:
        case Collective::kScatter:
          if (value != trees_.leaf(root_, c.part)) return wrong("not the root's") << c.part;
          break;
      }
    }
    const bool everywhere = a_.collective != Collective::kReduce && a_.collective != Collective::kGather;
    const bool one = a_.collective == Collective::kReduceScatter || a_.collective == Collective::kScatter;
    const size_t want = !everywhere && r != root_ ? 0 : one ? 1 : plan(r).n_parts;
    if (parts.size() != want || (one && *parts.begin() != static_cast<uint32_t>(r)))
      return wrong("has other outputs than its collective gives") << "count " << parts.size();
    return testing::AssertionSuccess();
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

}  // namespace pycomm
