// Reductions over hosts: T cut by hosts, and the proof of the whole schedule for every placement.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "schedule/exact.h"

namespace pycomm {
namespace {

using Placements = std::vector<std::vector<int>>;

// All lists of n numbers in which every number's first comes in order (each placement once, whatever the
// names of its hosts), over 2 to max_hosts hosts.
void extend(std::vector<int>& so_far, int n, int max_hosts, Placements* out) {
  const int used = so_far.empty() ? 0 : *std::max_element(so_far.begin(), so_far.end()) + 1;
  if (static_cast<int>(so_far.size()) == n) {
    if (used > 1) out->push_back(so_far);
    return;
  }
  for (int h = 0; h < std::min(used + 1, max_hosts); h++) {
    so_far.push_back(h);
    extend(so_far, n, max_hosts, out);
    so_far.pop_back();
  }
}

Placements all_placements(int n, int max_hosts) {
  Placements out;
  std::vector<int> so_far;
  extend(so_far, n, max_hosts, &out);
  return out;
}

Placements large_placements() {
  Placements out = {std::vector<int>(64), std::vector<int>(64), std::vector<int>(64), std::vector<int>(64)};
  std::mt19937 random(7);
  for (int q = 0; q < 64; q++) {
    const auto at = static_cast<size_t>(q);
    out[0][at] = q % 2;
    out[1][at] = q % 8;
    out[2][at] = q / 24;  // 24, 24 and 16 in a row
    out[3][at] = static_cast<int>(random() % 5);
  }
  out.push_back({0, 0, 0, 1, 1, 1, 2, 2, 2});
  return out;
}

TEST(PlacementTree, CutsTheTreeAtTheHosts) {
  using V = std::vector<Subtree>;
  EXPECT_EQ(PlacementTree(std::vector{0, 0, 1, 1}).subtrees, (V{{0, 2, 0}, {2, 4, 1}}));
  EXPECT_EQ(PlacementTree(std::vector{0, 1, 1, 1}).subtrees, (V{{0, 1, 0}, {1, 2, 1}, {2, 4, 1}}));
  EXPECT_EQ(PlacementTree(std::vector{5, 3, 5}).subtrees, (V{{0, 1, 0}, {1, 2, 1}, {2, 3, 0}}));
  // T of six is ((01)(23))(45).
  EXPECT_EQ(PlacementTree(std::vector{0, 0, 0, 1, 1, 1}).subtrees,
            (V{{0, 2, 0}, {2, 3, 0}, {3, 4, 1}, {4, 6, 1}}));
  EXPECT_EQ(PlacementTree(std::vector{4, 4, 4}).subtrees, (V{{0, 3, 0}}));
}

TEST(PlacementTree, EverySubtreeIsANodeAndItsParentMixesHosts) {
  for (const std::vector<int>& hosts : all_placements(6, 3)) {
    const PlacementTree tree(hosts);
    int at = 0;
    for (const Subtree& s : tree.subtrees) {
      EXPECT_EQ(s.lo, at);  // a run behind the other
      at = s.hi;
      EXPECT_EQ(tree.host_of_all(s.lo, s.hi), s.host);
      int lo = 0, hi = 6;  // from the root down to the subtree
      while (lo != s.lo || hi != s.hi) {
        EXPECT_EQ(tree.host_of_all(lo, hi), -1);
        ASSERT_GT(hi - lo, 1);
        const int mid = lo + canonical_left(hi - lo);
        (s.lo < mid ? hi : lo) = mid;
      }
    }
    EXPECT_EQ(at, 6);
  }
}

TEST(Across, IsProvedForEveryPlacement) {
  Placements placements = large_placements();
  for (int n = 2; n <= 6; n++) {
    for (auto& p : all_placements(n, 4)) placements.push_back(p);
  }
  for (const std::vector<int>& hosts : placements) {
    for (const bool in_place : {false, true}) {
      for (const Collective c : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kReduce}) {
        const int n = static_cast<int>(hosts.size());
        for (int root = 0; root < (c == Collective::kReduce ? std::min(n, 6) : 1); root++) {
          AcrossProof proof;
          const Status s = verify_across(c, hosts, root, in_place, &proof);
          ASSERT_TRUE(s.ok()) << s.message();
          EXPECT_EQ(proof.between == "exact", !keeps_order(number_hosts(hosts)));
        }
      }
    }
  }
}

TEST(Across, WhatLeavesAHost) {
  AcrossProof p;
  ASSERT_TRUE(verify_across(Collective::kAllReduce, std::vector{0, 1, 0, 1}, 0, false, &p).ok());
  EXPECT_EQ(p.n_parts, 4u);                                    // two shares, each for two hosts
  EXPECT_EQ(p.n_parts_leaving, (std::vector<int64_t>{6, 6}));  // (2 + 1)/2 of the vector
  ASSERT_TRUE(verify_across(Collective::kAllReduce, std::vector{0, 1, 1}, 0, false, &p).ok());
  EXPECT_EQ(p.n_subtrees, (std::vector<int>{1, 2}));
  EXPECT_EQ(p.n_parts_leaving, (std::vector<int64_t>{2, 3}));  // of one share for two hosts
  ASSERT_TRUE(verify_across(Collective::kReduce, std::vector{0, 1, 1}, 0, false, &p).ok());
  EXPECT_EQ(p.n_parts_leaving, (std::vector<int64_t>{0, 2}));
  // Aligned: as the default, 2 (H - 1)/H.
  ASSERT_TRUE(verify_across(Collective::kAllReduce, std::vector{0, 0, 1, 1}, 0, false, &p).ok());
  EXPECT_EQ(p.n_parts_leaving[0] * 1.0 / p.n_parts, 1.0);
}

TEST(Across, AnotherOrderIsAViolation) {
  const std::vector<int> hosts = {0, 1, 0, 1};
  std::vector<Schedule> schedules;
  ASSERT_TRUE(across_schedules(Collective::kAllReduce, PlacementTree(hosts), 0, &schedules).ok());
  EXPECT_TRUE(verify_schedules(schedules, {Collective::kAllReduce, 0, false, true}).ok);
  for (Schedule& s : schedules) {
    for (Step& step : s.steps) {
      const bool reduces = step.op() == StepOp::kRecvReduce || step.op() == StepOp::kReduce;
      if (reduces) step.op_bits ^= 8;  // the other operand is the left one
    }
  }
  const Proof proof = verify_schedules(schedules, {Collective::kAllReduce, 0, false, true});
  EXPECT_FALSE(proof.ok);
  EXPECT_NE(proof.violation.text().find("the canonical tree is"), std::string::npos)
      << proof.violation.text();
}

TEST(Across, RefusesWhatIsNoPlacement) {
  AcrossProof p;
  EXPECT_EQ(verify_across(Collective::kAllReduce, std::vector{0, 0}, 0, false, &p).code(), Code::kValue);
  EXPECT_EQ(verify_across(Collective::kAllReduce, std::vector<int>{}, 0, false, &p).code(), Code::kValue);
  EXPECT_EQ(verify_across(Collective::kBroadcast, std::vector{0, 1}, 0, false, &p).code(), Code::kValue);
  EXPECT_EQ(verify_across(Collective::kReduce, std::vector{0, 1}, 2, false, &p).code(), Code::kValue);
  std::vector<int> many(kMaxAcrossRanks + 1);
  many[1] = 1;
  EXPECT_EQ(verify_across(Collective::kReduce, many, 0, false, &p).code(), Code::kValue);
}

}  // namespace
}  // namespace pycomm
