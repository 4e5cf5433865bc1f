// NCCL's own collectives through csrc/engine/cuda/nccl_native.h: what is supported agrees with the CPU's
// kernels on exact inputs; what NCCL cannot do as docs/numerics.md has it is refused with a reason.
#include "engine/cuda/nccl_native.h"

#include <gtest/gtest.h>

#include <numeric>

#include "cuda/nccl_worker.h"

namespace pycomm {
namespace {

using cuda::NativeCall;

// avg multiplies by 1/n first, which is exact for a power of two of ranks only; NCCL rounds the factor and
// the products of premul_sum to the dtype, which exact inputs and factors (1/2, 3/4 …) survive.
Status run_case(NcclRank& me, Collective c, DType t, ReduceOp op, const std::vector<uint64_t>& counts,
                int root, std::mt19937_64& rng, DeviceArena& arena) {
  const Numbers x = make_numbers(c, me.n, root, t, op, true, counts, rng);
  const auto r = static_cast<size_t>(me.rank);
  NativeCall call;
  call.collective = c;
  call.in = arena.place(x.in[r], dtype_size(t));
  call.out = arena.place(x.out[r].size(), 0);
  call.count = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  if (has_parts(c)) call.counts = counts;
  call.dtype = t;
  call.op = op;
  call.scalar = factor(me.rank);
  call.root = root;
  PYCOMM_RETURN_IF_ERROR(run_native(me.comm, me.stream, call, me.patience));
  if (cudaStreamSynchronize(me.stream) != cudaSuccess) return Status::error(Code::kSystem, "synchronize");
  const std::string what = format("%s %s %s: ", collective_name(c), dtype_name(t), reduce_op_name(op));
  const auto got = same(t, arena.read(call.out, x.out[r].size()), x.out[r]);
  if (!got) return Status::error(Code::kSystem, what + got.message());
  const auto clean = arena.finish();
  return clean ? Status() : Status::error(Code::kSystem, what + clean.message());
}

bool supported(Collective c, DType t, ReduceOp op) {
  NativeCall call;
  call.collective = c;
  call.dtype = t;
  call.op = op;
  call.count = 12;
  return native_supported(call, 4).ok();
}

TEST(NcclNative, ReductionsAgreeWithTheCpuOnExactInputs) {
  run_nccl_ranks(4, [](NcclRank& me) -> Status {
    DeviceArena arena(1 << 20);
    std::mt19937_64 rng{3};
    int n_run = 0;
    for (const Collective c : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kReduce}) {
      for (int d = 0; d < kNumDTypes; d++) {
        const auto t = static_cast<DType>(d);
        for (const ReduceOp op : operations_of(t)) {
          if (!supported(c, t, op)) continue;
          const std::vector<uint64_t> counts =
              has_parts(c) ? std::vector<uint64_t>(4, 7) : std::vector<uint64_t>{29};
          PYCOMM_RETURN_IF_ERROR(run_case(me, c, t, op, counts, d % 4, rng, arena));
          n_run++;
        }
      }
    }
    // sum, product, avg, premul_sum of 4 floats; sum, avg, premul_sum of 2 complex; sum, product, min, max of
    // 4 integers
    if (n_run != 3 * (4 * 4 + 2 * 3 + 4 * 4)) {
      return Status::error(Code::kSystem, format("%d combinations were run", n_run));
    }
    return Status();
  });
}

TEST(NcclNative, DataIsMovedWhateverItsType) {
  for (int n = 1; n <= 8; n++) {
    run_nccl_ranks(n, [n](NcclRank& me) -> Status {
      DeviceArena arena(1 << 20);
      std::mt19937_64 rng{4};
      for (const Collective c :
           {Collective::kAllGather, Collective::kBroadcast, Collective::kGather, Collective::kScatter}) {
        for (int d = 0; d < kNumDTypes; d++) {
          std::vector<uint64_t> counts;  // even and uneven
          for (int r = 0; r < n; r++) counts.push_back(static_cast<uint64_t>(d % 2 == 0 ? 9 : (r * 5) % 7));
          PYCOMM_RETURN_IF_ERROR(
              run_case(me, c, static_cast<DType>(d), ReduceOp::kSum, counts, d % n, rng, arena));
        }
      }
      return Status();
    });
  }
}

TEST(NcclNative, AllToAllOfUnevenCounts) {
  run_nccl_ranks(3, [](NcclRank& me) -> Status {
    // Rank r sends (r + 2 q) % 4 numbers 100 r + q to rank q.
    DeviceArena arena(1 << 20);
    const auto n_sent = [](int r, int q) { return static_cast<uint64_t>((r + 2 * q) % 4); };
    Bytes in, want;
    std::vector<uint64_t> sends, recvs;
    const auto append = [](Bytes* to, int32_t v, uint64_t n) {
      for (uint64_t i = 0; i < n; i++) {
        to->resize(to->size() + 4);
        std::memcpy(to->data() + to->size() - 4, &v, 4);
      }
    };
    for (int q = 0; q < 3; q++) {
      sends.push_back(n_sent(me.rank, q));
      recvs.push_back(n_sent(q, me.rank));
      append(&in, 100 * me.rank + q, sends.back());
      append(&want, 100 * q + me.rank, recvs.back());
    }
    const void* from = arena.place(in, 4);
    void* to = arena.place(want.size(), 8);
    PYCOMM_RETURN_IF_ERROR(
        cuda::run_all_to_all(me.comm, me.stream, {from, to, sends, recvs, DType::kInt32}, me.patience));
    if (cudaStreamSynchronize(me.stream) != cudaSuccess || arena.read(to, want.size()) != want) {
      return Status::error(Code::kSystem, "wrong numbers");
    }
    return Status();
  });
}

std::string refusal(Collective c, DType t, ReduceOp op, bool deterministic = false,
                    std::vector<uint64_t> counts = {}) {
  NativeCall call;
  call.collective = c;
  call.dtype = t;
  call.op = op;
  call.count = 12;
  call.counts = counts;
  call.deterministic = deterministic;
  return native_supported(call, 3).message();
}

TEST(NcclNative, WhatNcclCannotDoIsRefusedWithAReason) {
  const auto all = Collective::kAllReduce;
  EXPECT_EQ(refusal(all, DType::kFloat32, ReduceOp::kSum), "");
  EXPECT_EQ(refusal(all, DType::kInt32, ReduceOp::kMin), "");
  EXPECT_EQ(refusal(all, DType::kFloat32, ReduceOp::kSum, true),
            "all_reduce/nccl: does not add in the canonical order, which deterministic=True asks for");
  const std::string others =
      " with pycomm's meaning; use another algorithm (" + known_algorithms(Collective::kAllReduce) + ")";
  EXPECT_EQ(refusal(all, DType::kFloat32, ReduceOp::kMin),
            "all_reduce/nccl: NCCL has no min of float32" + others);
  EXPECT_EQ(refusal(all, DType::kInt16, ReduceOp::kSum),
            "all_reduce/nccl: NCCL has no sum of int16" + others);
  EXPECT_EQ(refusal(all, DType::kBool, ReduceOp::kSum), "all_reduce/nccl: NCCL has no sum of bool" + others);
  EXPECT_EQ(refusal(all, DType::kInt8, ReduceOp::kBxor),
            "all_reduce/nccl: NCCL has no bxor of int8" + others);
  EXPECT_EQ(refusal(all, DType::kComplex64, ReduceOp::kProduct),
            "all_reduce/nccl: NCCL has no product of complex64" + others);
  EXPECT_EQ(
      refusal(all, DType::kInt32, ReduceOp::kAvg),
      "all_reduce/nccl: avg is not defined for int32, which has sum, product, min, max, band, bor, bxor");
  EXPECT_EQ(refusal(Collective::kReduceScatter, DType::kFloat32, ReduceOp::kSum, false, {5, 4, 3}),
            "reduce_scatter/nccl: NCCL's parts are equal; use another algorithm (" +
                known_algorithms(Collective::kReduceScatter) + ")");
  EXPECT_EQ(refusal(Collective::kAllGather, DType::kFloat32, ReduceOp::kSum, false, {5, 4}),
            "all_gather/nccl: counts of 2 parts with a sum of 9, expected 3 with a sum of 12");
}

}  // namespace
}  // namespace pycomm
