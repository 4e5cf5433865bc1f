// Rounds and bytes against numbers from the literature and lower bounds, written here a second time.
//
// verify_test.cc proves that schedules meet the closed forms in their own files; this file says what those
// forms have to be, so that an algorithm with one round too many (and a closed form that agrees) is found.
#include <gtest/gtest.h>

#include <cmath>

#include "schedule/catalog_params.h"
#include "schedule/verify.h"

namespace pycomm {
namespace {

struct Expected {
  Collective collective;
  const char* name;
  int n_ranks, n_chunks, rounds;
  int64_t parts_sent;
};

constexpr Collective kAR = Collective::kAllReduce, kRS = Collective::kReduceScatter,
                     kAG = Collective::kAllGather, kB = Collective::kBroadcast;

TEST(ClosedForm, Numbers) {
  const Expected table[] = {
      {kAR, "ring", 4, 1, 6, 6},
      {kAR, "ring", 100, 1, 198, 198},
      {kAR, "direct", 8, 1, 2, 14},
      {kAR, "one_shot", 8, 1, 1, 7},
      {kAR, "recursive_doubling", 16, 1, 4, 4},
      {kAR, "recursive_doubling", 17, 1, 6, 5},
      {kAR, "halving_doubling", 8, 1, 6, 14},   // 2 log2 8 rounds; 2 (7/8) of the vector
      {kAR, "halving_doubling", 11, 1, 8, 22},  // folded to 8: 2 more rounds, one more vector
      {kAR, "tree", 2, 1, 2, 1},
      {kAR, "tree", 7, 1, 4, 3},     // a full tree of height 2: up 2, down 2
      {kAR, "tree", 7, 10, 13, 30},  // 9 more parts, 9 more rounds
      {kAR, "tree", 100, 8, 19, 24},
      {kAR, "double_tree", 2, 1, 2, 2},
      {kAR, "double_tree", 7, 1, 4, 4},  // 4 of 1/2 vectors: a ring's bytes, almost
      {kAR, "double_tree", 64, 4, 15, 16},
      {kRS, "ring", 5, 1, 4, 4},
      {kRS, "direct", 5, 1, 1, 4},
      {kRS, "halving", 8, 1, 3, 7},
      {kRS, "halving", 6, 1, 4, 6},
      {kAG, "ring", 5, 1, 4, 4},
      {kAG, "direct", 5, 1, 1, 4},
      {kAG, "doubling", 8, 1, 3, 7},
      {kAG, "doubling", 5, 1, 3, 4},
      {kAG, "doubling", 100, 1, 7, 99},
      {kB, "direct", 5, 3, 1, 12},
      {kB, "binomial", 9, 1, 4, 4},
      {kB, "chain", 5, 8, 11, 8},
      {kB, "scatter_allgather", 8, 1, 6, 14},
      {kB, "scatter_allgather", 5, 1, 6, 8},
      {Collective::kReduce, "binomial", 9, 1, 4, 1},  // log2 8, and one for the fold
      {Collective::kReduce, "direct", 9, 2, 1, 2},
      {Collective::kGather, "binomial", 8, 1, 3, 4},
      {Collective::kGather, "direct", 8, 1, 1, 1},
      {Collective::kScatter, "binomial", 8, 1, 3, 7},
      {Collective::kScatter, "direct", 8, 1, 1, 7},
  };
  for (const Expected& e : table) {
    const Algorithm& a = algorithm(e.collective, e.name);
    const Proof p = verify_schedules(build_all(a, e.n_ranks, 0, e.n_chunks), {e.collective, 0, false, false});
    ASSERT_TRUE(p.ok) << name_of(a) << ": " << p.violation.text();
    EXPECT_EQ(p.rounds, e.rounds) << name_of(a) << " with " << e.n_ranks;
    EXPECT_EQ(p.max_parts_sent, e.parts_sent) << name_of(a) << " with " << e.n_ranks;
  }
}

// Nobody beats the bounds: ceil(log2 n) rounds, unless a rank talks to many at once, and 2 (n-1)/n (n-1)/n, 1
// vectors over the wire per rank on average.
TEST(ClosedForm, BytesReachTheLowerBoundWhereTheHeaderSaysSo) {
  const std::pair<Collective, const char*> least[] = {
      {kAR, "ring"},    {kAR, "direct"}, {kAR, "halving_doubling"}, {kRS, "ring"},     {kRS, "direct"},
      {kRS, "halving"}, {kAG, "ring"},   {kAG, "direct"},           {kAG, "doubling"},
  };
  for (const auto& [collective, name] : least) {
    const Algorithm& a = algorithm(collective, name);
    for (int n : {2, 4, 8, 16, 64}) {
      const Proof p = verify_schedules(build_all(a, n, 0, 0), {collective, 0, false, false});
      ASSERT_TRUE(p.ok) << p.violation.text();
      const int64_t per_rank = collective == kAR ? 2 * (n - 1) : n - 1;
      EXPECT_EQ(p.max_parts_sent, per_rank) << name_of(a) << " with " << n;
      EXPECT_EQ(p.n_parts_sent, per_rank * n) << name_of(a) << " with " << n;
    }
  }
}

TEST(ClosedForm, RoundsGrowLogarithmically) {
  const std::pair<Collective, const char*> quick[] = {
      {kAR, "tree"},    {kAR, "double_tree"}, {kAR, "halving_doubling"}, {kAR, "recursive_doubling"},
      {kRS, "halving"}, {kAG, "doubling"},    {kB, "binomial"},          {kB, "scatter_allgather"},
  };
  for (const auto& [collective, name] : quick) {
    const Algorithm& a = algorithm(collective, name);
    for (int n : {2, 3, 17, 100, 1000, 100'000}) {
      EXPECT_LE(a.rounds(n, 1), 2 * static_cast<int>(std::ceil(std::log2(n))) + 2) << name_of(a) << " " << n;
    }
  }
}

// No rank is an inner node of both trees, so nobody sends more than 4 halves.
TEST(ClosedForm, DoubleTreeBalancesItsRanks) {
  const Algorithm& a = algorithm(kAR, "double_tree");
  for (int n = 4; n <= 40; n++) {
    for (const Schedule& s : build_all(a, n, 0, 1)) {
      int sends_up[2] = {0, 0}, receives_sums[2] = {0, 0};
      for (const Step& step : s.steps) {
        if (step.op() == StepOp::kRecvReduce) receives_sums[s.part[step.dst]]++;
        if (step.op() == StepOp::kSend) sends_up[s.part[step.src]]++;
      }
      EXPECT_TRUE(receives_sums[0] == 0 || receives_sums[1] == 0) << "rank " << s.rank << " of " << n;
      EXPECT_LE(sends_up[0] + sends_up[1], 4) << "rank " << s.rank << " of " << n;
    }
  }
}

}  // namespace
}  // namespace pycomm
