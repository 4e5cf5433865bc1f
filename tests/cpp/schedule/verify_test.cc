// Every algorithm of the catalog, for every number of ranks, root, pipeline depth and binding: proved.
#include "schedule/verify.h"

#include <gtest/gtest.h>

#include <set>

#include "schedule/catalog_params.h"

namespace pycomm {
namespace {

class EveryAlgorithm : public testing::TestWithParam<const Algorithm*> {};

TEST_P(EveryAlgorithm, IsProvedForEveryNumberOfRanks) {
  const Algorithm& a = *GetParam();
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 100}) {
    std::set<int> roots = {0};
    if (has_root(a.collective)) roots.insert({n - 1, n / 2, n / 3});
    if (has_root(a.collective) && n <= 17) {
      for (int root = 0; root < n; root++) roots.insert(root);
    }
    for (int root : roots) {
      for (int n_chunks : {0, 1, 2, 5}) {
        for (bool in_place : {false, true}) {
          if (in_place && !a.in_place) continue;
          const Status s = verify(a, n, root, n_chunks, in_place, nullptr);
          ASSERT_TRUE(s.ok()) << s.message() << " (n_chunks " << n_chunks << ")";
        }
      }
    }
  }
}

TEST_P(EveryAlgorithm, RefusesWhatCannotBeBuilt) {
  const Algorithm& a = *GetParam();
  Schedule s;
  EXPECT_EQ(build_schedule(a, 0, 0, 0, 0, &s).code(), Code::kSchedule);
  EXPECT_EQ(build_schedule(a, 4, 4, 0, 0, &s).code(), Code::kSchedule);
  EXPECT_EQ(build_schedule(a, -1, 4, 0, 0, &s).code(), Code::kSchedule);
  EXPECT_EQ(build_schedule(a, 0, 4, 4, 0, &s).code(), Code::kSchedule);
  EXPECT_EQ(build_schedule(a, 0, 4, 0, -1, &s).code(), Code::kSchedule);
  EXPECT_EQ(build_schedule(a, 0, 4, 0, kMaxChunks + 1, &s).code(), Code::kSchedule);
  EXPECT_EQ(verify(a, kMaxVerifyRanks + 1, 0, 0, false, nullptr).code(), Code::kSchedule);
}

INSTANTIATE_TEST_SUITE_P(Catalog, EveryAlgorithm, testing::ValuesIn(every_algorithm()), test_name);

TEST(Verify, AThousandRanksStayAffordable) {
  for (const char* name : {"tree", "double_tree", "recursive_doubling"}) {
    Proof proof;
    const Status s = verify(algorithm(Collective::kAllReduce, name), 1024, 0, 2, true, &proof);
    EXPECT_TRUE(s.ok()) << s.message();
  }
}

TEST(Verify, InPlaceIsRefusedWhereItIsNotClaimed) {
  const Status s = verify(algorithm(Collective::kAllReduce, "one_shot"), 4, 0, 0, true, nullptr);
  EXPECT_EQ(s.code(), Code::kSchedule);
  EXPECT_NE(s.message().find("does not run in place"), std::string::npos) << s.message();
}

// The claims of the issue: these must honour the canonical tree.
TEST(Verify, TheCanonicalTreeIsClaimedWhereItMustBe) {
  for (const char* name : {"halving_doubling", "recursive_doubling", "one_shot", "direct"}) {
    EXPECT_TRUE(algorithm(Collective::kAllReduce, name).deterministic) << name;
  }
  for (const char* name : {"halving", "direct"}) {
    EXPECT_TRUE(algorithm(Collective::kReduceScatter, name).deterministic) << name;
  }
  // And what denies it really is another tree, or the claim would be missing.
  for (const Algorithm& a : catalog()) {
    if (a.deterministic) continue;
    const auto all = build_all(a, 8, 0, 0);
    EXPECT_FALSE(verify_schedules(all, {a.collective, 0, false, true}).ok) << name_of(a);
  }
}

}  // namespace
}  // namespace pycomm
