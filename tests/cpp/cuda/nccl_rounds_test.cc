// Every algorithm of the catalog over the loopback NCCL, compared bit for bit with the CPU's kernels; tiny
// slices, so that many tiles are under way on few numbers. Ranks are threads, each on a device of its own.
#include <gtest/gtest.h>

#include "cuda/nccl_worker.h"

namespace pycomm {
namespace {

using cuda::RoundPlan;
using cuda::RoundsCall;

// Over indices of the catalog.
class EveryAlgorithm : public testing::TestWithParam<int> {
 protected:
  const Algorithm& algorithm() const { return catalog()[static_cast<size_t>(GetParam())]; }
};
class EveryReduction : public EveryAlgorithm {};

std::vector<int> algorithms_of(const std::vector<Collective>& collectives) {
  std::vector<int> found;
  for (size_t i = 0; i < catalog().size(); i++) {
    const Collective c = catalog()[i].collective;
    if (std::find(collectives.begin(), collectives.end(), c) != collectives.end())
      found.push_back(static_cast<int>(i));
  }
  return found;
}
std::string name_of(const testing::TestParamInfo<int>& info) {
  const Algorithm& a = catalog()[static_cast<size_t>(info.param)];
  return std::string(collective_name(a.collective)) + "_" + a.name;
}
INSTANTIATE_TEST_SUITE_P(Nccl, EveryAlgorithm, testing::Range(0, static_cast<int>(catalog().size())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Nccl, EveryReduction,
                         testing::ValuesIn(algorithms_of({Collective::kAllReduce, Collective::kReduceScatter,
                                                          Collective::kReduce})),
                         name_of);

TEST_P(EveryAlgorithm, ComputesWhatTheCpuComputes) {
  for (const int n : kRanks) {
    run_nccl_ranks(n, [&](NcclRank& me) -> Status {
      Worker worker(me);
      PYCOMM_RETURN_IF_ERROR(worker.run_algorithm(algorithm()));
      return worker.result();
    });
  }
}

#if defined(__SANITIZE_THREAD__)  // who waits for whom does not depend on the dtype
const std::vector<DType> kDeterministic = {DType::kFloat16};
#else
const std::vector<DType> kDeterministic = {DType::kFloat32, DType::kFloat16, DType::kFloat8E5M2,
                                           DType::kComplex64};
#endif

TEST_P(EveryReduction, IsDeterministicWhereItSaysSo) {
  for (const int n : kRanks) {
    run_nccl_ranks(n, [&](NcclRank& me) -> Status {
      Worker worker(me);
      for (const DType t : kDeterministic) {
        Case c;
        c.algorithm = &algorithm();
        c.root = n - 1;
        c.dtype = t;
        c.op = t == DType::kFloat16 ? ReduceOp::kAvg : ReduceOp::kSum;
        c.counts = counts_for(algorithm(), n, 37);
        c.in_place = algorithm().in_place && t != DType::kFloat32;
        c.deterministic = true;
        c.exact = false;
        const Status s = worker.run(c);
        if (algorithm().deterministic) {
          if (!s.ok()) return s.clone();
        } else if (s.message().find("does not add in the canonical order") == std::string::npos) {
          return wrong(c, n, "was not refused: " + s.message());
        } else {
          (void)worker.arena.finish();
        }
      }
      return worker.result();
    });
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST(NcclRounds, EveryDtypeAndOperation) {
  for (const int n : {3, 4}) {
    run_nccl_ranks(n, [&](NcclRank& me) -> Status {
      Worker worker(me);
      for (const char* name : {"direct", "ring", "recursive_doubling"}) {
        for (int d = 0; d < kNumDTypes; d++) {
          const auto t = static_cast<DType>(d);
          for (const ReduceOp op : operations_of(t)) {
            Case c;
            c.algorithm = find_algorithm(Collective::kAllReduce, name);
            c.dtype = t;
            c.op = op;
            c.counts = {29};
            c.in_place = d % 2 == 0;
            c.off = dtype_size(t) % 16;
            PYCOMM_RETURN_IF_ERROR(worker.run(c));
          }
        }
      }
      return worker.result();
    });
  }
}

TEST(NcclRounds, LargeVectorsInLargeSlices) {
  run_nccl_ranks(3, [&](NcclRank& me) -> Status {
    Worker worker(me);
    for (const char* name : {"direct", "ring", "halving_doubling", "double_tree"}) {
      Case c;
      c.algorithm = find_algorithm(Collective::kAllReduce, name);
      c.counts = {100'003};
      c.slice_bytes = 32 << 10;
      PYCOMM_RETURN_IF_ERROR(worker.run(c));
    }
    return worker.result();
  });
}
#endif

// ---- what is refused

Status plan_and_check(const Algorithm& a, int n, bool in_place, const RoundsCall& given) {
  RoundPlan plan;
  PYCOMM_RETURN_IF_ERROR(cuda::make_round_plan(a, 0, n, 0, 0, in_place, &plan));
  nccl::NcclComm comm;
  std::unique_ptr<cuda::DeviceStreams> streams;
  PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(0, &streams));
  RoundsCall call = given;
  call.plan = &plan;
  return cuda::NcclRounds(comm, *streams).run(call, nullptr, {});
}

TEST(NcclRounds, WrongCallsSayWhatIsExpected) {
  const Algorithm& ring = *find_algorithm(Collective::kAllReduce, "ring");
  const Algorithm& direct = *find_algorithm(Collective::kAllReduce, "direct");
  std::byte memory[4096];
  RoundsCall call;
  call.in = memory;
  call.out = memory;
  call.count = 100;
  call.dtype = DType::kInt32;
  call.op = ReduceOp::kAvg;
  EXPECT_EQ(plan_and_check(ring, 2, true, call).message(),
            "all_reduce/ring over NCCL: avg is not defined for int32, which has sum, product, min, max, "
            "band, bor, bxor");
  call.dtype = DType::kFloat32;
  call.op = ReduceOp::kSum;
  EXPECT_EQ(plan_and_check(ring, 2, false, call).message(),
            "all_reduce/ring over NCCL: input and output overlap, and the plan is not in place");
  call.out = memory + 400;
  EXPECT_EQ(plan_and_check(ring, 2, true, call).message(),
            "all_reduce/ring over NCCL: the plan is in place, and input and output do not lie accordingly");
  call.deterministic = true;
  EXPECT_EQ(
      plan_and_check(ring, 2, false, call).message(),
      "all_reduce/ring over NCCL: does not add in the canonical order, which deterministic=True asks for");
  call.deterministic = false;
  const std::vector<uint64_t> counts = {50, 49};
  call.counts = counts;
  EXPECT_EQ(plan_and_check(direct, 2, false, call).message(),
            "all_reduce/direct over NCCL: 2 counts with a sum of 99, expected 2 with a sum of 100");
}

// More ranks than a kernel takes sources: reductions are cut along T, so the bits are those of one kernel.
TEST(NcclRounds, MoreRanksThanAKernelTakesSources) {
  run_nccl_ranks(35, [&](NcclRank& me) -> Status {
    Worker worker(me);
    for (const char* name : {"direct", "one_shot"}) {
      for (const auto& [dtype, op] : {std::pair{DType::kFloat32, ReduceOp::kSum},
                                      {DType::kBFloat16, ReduceOp::kAvg},
                                      {DType::kFloat16, ReduceOp::kSum},
                                      {DType::kInt16, ReduceOp::kMax}}) {
        Case c;
        c.algorithm = find_algorithm(Collective::kAllReduce, name);
        c.dtype = dtype;
        c.op = op;
        c.counts = {70};
        c.deterministic = true;
        c.exact = false;
        PYCOMM_RETURN_IF_ERROR(worker.run(c));
      }
    }
    return worker.result();
  });
}

TEST(NcclRounds, WhatCannotRunInPlaceIsRefusedWhenPlanned) {
  RoundPlan plan;
  const Algorithm& one_shot = *find_algorithm(Collective::kAllReduce, "one_shot");
  EXPECT_EQ(cuda::make_round_plan(one_shot, 0, 2, 0, 0, true, &plan).message(),
            "all_reduce/one_shot cannot run in place");
}

// T(40) = T(24) + T(16), T(64) = T(32) + T(32), T(96) = T(64) + T(32) (docs/numerics.md).
TEST(RoundPlan, LargeReductionsAreCutAlongTheTree) {
  const auto shape = [](int n, int rank) {
    RoundPlan plan;
    EXPECT_TRUE(
        make_round_plan(*find_algorithm(Collective::kReduce, "direct"), rank, n, 0, 0, false, &plan).ok());
    EXPECT_EQ(plan.cut, n > 32) << n << ", rank " << rank;
    EXPECT_EQ(plan.complete, n <= 32);
    std::vector<std::pair<int, size_t>> batches;  // sources, steps
    for (const cuda::Batch& b : plan.rounds[0].batches) batches.emplace_back(b.n_srcs, b.steps.size());
    return batches;
  };
  using Shape = std::vector<std::pair<int, size_t>>;
  EXPECT_EQ(shape(32, 0), (Shape{{32, 1}}));
  EXPECT_EQ(shape(40, 0), (Shape{{16, 1}, {24, 1}, {2, 1}}));
  EXPECT_EQ(shape(64, 0), (Shape{{32, 2}, {2, 1}}));
  EXPECT_EQ(shape(96, 0), (Shape{{32, 3}, {2, 1}, {2, 1}}));
  EXPECT_EQ(shape(40, 39), Shape{}) << "every rank knows that the root's is cut";
}

TEST(RoundPlan, DirectIsOneReductionOfAllRanks) {
  RoundPlan plan;
  ASSERT_OK(
      cuda::make_round_plan(*find_algorithm(Collective::kAllReduce, "direct"), 1, 4, 0, 0, true, &plan));
  EXPECT_TRUE(plan.complete && plan.deterministic);
  ASSERT_EQ(plan.rounds.size(), 2u);
  ASSERT_EQ(plan.rounds[0].batches.size(), 1u);
  EXPECT_EQ(plan.rounds[0].batches[0].n_srcs, 4);
  EXPECT_EQ(plan.rounds[0].sends.size(), 3u);
  EXPECT_EQ(plan.n_staging, 3u) << "in place nothing can land in the result";
  EXPECT_TRUE(plan.rounds[1].batches.empty()) << "results land where they belong";
}

TEST(RoundPlan, ARingOutOfPlaceNeedsNoStaging) {
  RoundPlan plan;
  const Algorithm& ring = *find_algorithm(Collective::kAllReduce, "ring");
  ASSERT_OK(cuda::make_round_plan(ring, 0, 4, 0, 0, false, &plan));
  EXPECT_EQ(plan.rounds.size(), 6u);
  EXPECT_EQ(plan.n_staging, 0u);
  EXPECT_FALSE(plan.complete);
  ASSERT_OK(cuda::make_round_plan(ring, 0, 4, 0, 0, true, &plan));
  EXPECT_EQ(plan.n_staging, 1u);
}

}  // namespace
}  // namespace pycomm
