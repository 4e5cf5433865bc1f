// Which way serves a call, of communicators that are only said to be: no device, no NCCL, any number of
// ranks.
#include <gtest/gtest.h>

#include "cuda/nccl_inputs.h"
#include "engine/cuda/device_impl.h"
#include "kernels/cuda/kernels.h"

namespace pycomm {
namespace {

using Impl = DeviceEngine::Impl;

// As rank `rank` sees it. Peers' memory is of few ranks, and none here has it.
void be_rank(Impl* d, int rank, int n, bool one_host, bool has_nccl) {
  d->link.rank = rank;
  d->link.n_ranks = n;
  d->link.one_host = one_host;
  d->has_nccl = has_nccl;
  d->why_no_nccl = "no NCCL here: install it";
  d->why_no_peers = "too many ranks for peers' memory";
}

Call call_of(CallKind kind, DType dtype, ReduceOp op, bool deterministic, int n, int root = 0) {
  Call call;
  call.sig.kind = kind;
  call.sig.dtype = dtype;
  call.sig.op = op;
  call.sig.deterministic = deterministic;
  call.sig.algorithm = static_cast<uint8_t>(DeviceWay::kAuto);
  call.sig.count = 1000 * static_cast<uint64_t>(n);
  call.sig.root = root;
  return call;
}

std::string chosen(Impl* d, Call call) {
  const Status s = d->choose(DeviceTables(), &call);
  return s.ok() ? device_way_name(call.sig.algorithm) : s.message();
}

class ManyRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(DeviceChoice, ManyRanks, testing::Values(2, 5, 32, 33, 40, 64));

// Whatever is defined runs, in the order that was asked for, and the same way on all ranks.
TEST_P(ManyRanks, EveryDefinedReductionHasAWay) {
  const int n = GetParam();
  for (const bool one_host : {false, true}) {
    Impl first, last, root;
    be_rank(&first, 0, n, one_host, true);
    be_rank(&root, 1, n, one_host, true);
    be_rank(&last, n - 1, n, one_host, true);
    for (const CallKind kind : {CallKind::kAllReduce, CallKind::kReduceScatter, CallKind::kReduce}) {
      for (int t = 0; t < kNumDTypes; t++) {
        const auto dtype = static_cast<DType>(t);
        for (const ReduceOp op : operations_of(dtype)) {
          for (const bool deterministic : {false, true}) {
            Call call = call_of(kind, dtype, op, deterministic, n, kind == CallKind::kReduce ? 1 : 0);
            ASSERT_OK(first.choose(DeviceTables(), &call));
            const std::string way = device_way_name(call.sig.algorithm);
            EXPECT_TRUE(!deterministic || device_way_is_deterministic(call.sig.algorithm)) << way;
            call.sig.algorithm = static_cast<uint8_t>(DeviceWay::kAuto);
            EXPECT_EQ(chosen(&root, call), way);
            EXPECT_EQ(chosen(&last, call), way);
          }
        }
      }
    }
  }
}

TEST_P(ManyRanks, WhateverIsAskedForByNameRuns) {
  const int n = GetParam();
  for (size_t i = 0; i < catalog().size(); i++) {
    Impl d;
    be_rank(&d, n - 1, n, false, true);
    Call call = call_of(static_cast<CallKind>(catalog()[i].collective), DType::kFloat32, ReduceOp::kSum,
                        catalog()[i].deterministic, n);
    call.sig.algorithm = static_cast<uint8_t>(i);
    const Status s = d.choose(DeviceTables(), &call);
    EXPECT_TRUE(s.ok()) << s.message();
  }
}

TEST_P(ManyRanks, CodesHaveAWay) {
  const int n = GetParam();
  Impl d;
  be_rank(&d, 0, n, false, true);
  Call call = call_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kAvg, false, n);
  call.sig.compression = Compression::kInt8;
  EXPECT_EQ(chosen(&d, call), "direct");
  call.sig.kind = CallKind::kAllGather;
  EXPECT_EQ(chosen(&d, call), "nccl") << "messages are bytes, which NCCL gathers";
}

TEST(DeviceChoice, Order) {
  const auto chosen_of = [](CallKind kind, DType dtype, ReduceOp op, bool deterministic, int n,
                            bool one_host) {
    Impl d;
    be_rank(&d, 0, n, one_host, true);
    return chosen(&d, call_of(kind, dtype, op, deterministic, n));
  };
  constexpr auto kF32 = DType::kFloat32, kF8 = DType::kFloat8E4M3;
  constexpr auto kSum = ReduceOp::kSum;
  // What NCCL has, it does.
  EXPECT_EQ(chosen_of(CallKind::kAllReduce, kF32, kSum, false, 40, false), "nccl");
  // T between hosts: log2(n) rounds. On one host: two.
  EXPECT_EQ(chosen_of(CallKind::kAllReduce, kF32, kSum, true, 16, false), "halving_doubling");
  EXPECT_EQ(chosen_of(CallKind::kReduceScatter, kF32, kSum, true, 16, false), "halving");
  EXPECT_EQ(chosen_of(CallKind::kReduce, kF32, kSum, true, 16, false), "binomial");
  EXPECT_EQ(chosen_of(CallKind::kAllReduce, kF32, kSum, true, 16, true), "direct");
  // Small floats are rounded once by direct, while one kernel takes all.
  EXPECT_EQ(chosen_of(CallKind::kAllReduce, kF8, kSum, false, 32, false), "direct");
  EXPECT_EQ(chosen_of(CallKind::kAllReduce, kF8, kSum, false, 33, false), "halving_doubling");
  EXPECT_EQ(chosen_of(CallKind::kReduce, DType::kBool, ReduceOp::kMax, false, 64, true), "binomial");
}

// Every reason once, and with it what would help.
TEST(DeviceChoice, WithoutAnyWayAllReasonsAreTold) {
  Impl d;
  be_rank(&d, 0, 40, false, false);
  const Call sum = call_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, false, 40);
  EXPECT_EQ(chosen(&d, sum),
            "all_reduce on CUDA: too many ranks for peers' memory; and no NCCL here: install it");
  Call named = sum;
  named.sig.algorithm = static_cast<uint8_t>(DeviceWay::kNccl);
  EXPECT_EQ(chosen(&d, named), "all_reduce/nccl on CUDA: no NCCL here: install it");
  d.has_nccl = true;
  Call max = call_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kMax, false, 40);
  max.sig.compression = Compression::kInt8;
  EXPECT_EQ(
      chosen(&d, max),
      "all_reduce on CUDA: too many ranks for peers' memory; and NCCL's own carry no codes; direct does; "
      "and codes of int8 for max of float32; expected sum, avg or premul_sum of float32 (float16, "
      "bfloat16), and smaller codes of int8, float8_e4m3fn, float16 or bfloat16");
}

}  // namespace
}  // namespace pycomm
