// Plans of every algorithm, proved by an interpreter (engine/plan_machine.h).
//
// Two things are shown for every algorithm, number of ranks, root, mode and binding. *Values*: in three very
// unfair orders (lowest rank first, highest first, random) nothing deadlocks and every output ends as its
// collective defines it, in the reduction tree that is promised. *No order matters*: all conflicting accesses
// are ordered by the waits. Then the plans that the fast paths rest on, and an instruction mark that no
// algorithm of today's catalog needs.
#include "engine/plan.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "engine/plan_machine.h"
#include "schedule/builder.h"
#include "schedule/verify.h"

namespace pycomm {
namespace {

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
            ASSERT_TRUE(m.outputs_are_right());
            m.check_races();
            if (HasFatalFailure()) return;
            m.run([](const std::vector<int>& ready) { return ready.back(); });
            if (HasFatalFailure()) return;
            ASSERT_TRUE(m.outputs_are_right());
            m.run([&](const std::vector<int>& ready) { return ready[random() % ready.size()]; });
            if (HasFatalFailure()) return;
            ASSERT_TRUE(m.outputs_are_right());
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

// ---- an input that is read after its own place was overwritten --------------------------------------------

// The root takes the others' inputs first, into its output, and adds its own input in the last round. In
// place the tensor no longer holds that input by then; the slot of the stage does.
Schedule own_input_last(int rank, int n, int root, int) {
  Builder b(rank, n, root, 1);
  b.add_in(0);
  if (rank == root) b.add_out(0);
  if (n == 1) return b.alone();
  for (int round = 0, q = 0; q < n; q++) {
    if (q == root) continue;
    if (rank == q) b.send(round, root, b.in(0));
    if (rank == root && round == 0) b.recv(round, q, b.out(0));
    if (rank == root && round > 0) b.recv_reduce(round, q, b.out(0), b.out(0), Src::kLeft);
    round++;
  }
  if (rank == root) b.reduce(n - 1, b.in(0), b.out(0));
  return b.finish();
}
const Algorithm kOwnInputLast = {
    .collective = Collective::kReduce,
    .name = "own_input_last",
    .summary = "a schedule of this test",
    .deterministic = false,
    .in_place = false,  // a schedule knows of no stage
    .default_n_chunks = 1,
    .build = own_input_last,
    .rounds = [](int n, int) { return n - 1; },
    .max_parts_sent = [](int n, int) { return int64_t{n > 1}; },
};

int lowest_first(const std::vector<int>& ready) { return ready.front(); }

TEST(OwnInputFromSlot, IsMarkedAndStagedWhereItsTensorWasOverwritten) {
  for (int n : {2, 3, 5}) {
    for (int root : {0, n - 1}) {
      SCOPED_TRACE(format("n %d, root %d", n, root));
      Proof proof;
      const Status proved = verify(kOwnInputLast, n, root, 0, false, &proof);
      ASSERT_TRUE(proved.ok()) << proved.message();
      for (bool in_place : {false, true}) {
        Machine m(kOwnInputLast, n, root, 0, PlanMode::kTiled, in_place);
        ASSERT_TRUE(m.usable());
        m.check_form();
        m.run(lowest_first);
        if (HasFatalFailure()) return;
        EXPECT_TRUE(m.outputs_are_right());
        m.check_races();
      }
      Machine m(kOwnInputLast, n, root, 0, PlanMode::kTiled, true);
      for (int r = 0; r < n; r++) {
        const RankPlan& own = m.plan(r).own;
        // No peer reads the root's input: it is in the slot for the root alone. The others' are read by it.
        EXPECT_EQ(own.chunks[0].exposed, 0) << "rank " << r;
        for (const Instr& i : own.instrs) {
          EXPECT_EQ(i.own_input_from_slot, r == root && &i == &own.instrs.back()) << "rank " << r;
        }
      }
      EXPECT_EQ(m.plan(root).own.instrs.back().round, static_cast<uint32_t>(n - 1));
    }
  }
}

TEST(OwnInputFromSlot, WithoutTheMarkTheResultIsWrong) {
  for (bool in_place : {false, true}) {
    Machine m(kOwnInputLast, 3, 1, 0, PlanMode::kTiled, in_place);
    Instr& last = m.plan(1).own.instrs.back();
    ASSERT_TRUE(last.own_input_from_slot);
    last.own_input_from_slot = false;
    m.run(lowest_first);
    if (HasFatalFailure()) return;
    EXPECT_EQ(m.outputs_are_right(), !in_place);
  }
}

}  // namespace
}  // namespace pycomm
