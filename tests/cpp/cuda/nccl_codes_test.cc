// All-reduce and its kin with block codes over NCCL, against the CPU's kernels (kernels/blocks.h), bit for
// bit: every contribution but the owner's own is encoded, T in float32 at the owner, the result encoded once
// more.
#include <gtest/gtest.h>

#include "cuda/nccl_worker.h"
#include "kernels/blocks.h"

namespace pycomm {
namespace {

using Floats = std::vector<float>;

// What a message says of values; `lost` gets what it does not say.
Floats said(DType code, const Floats& values, Floats* lost) {
  Floats left = values, maxima(n_blocks(values.size())), out(values.size());
  Bytes codes(values.size() * dtype_size(code));
  block_maxima(left.data(), left.size(), maxima.data());
  quantize(code, codes.data(), left.data(), left.size(), maxima.data(), true);
  dequantize(code, out.data(), codes.data(), out.size(), maxima.data());
  *lost = left;
  return out;
}

struct Expected {
  Floats out;
  std::vector<Floats> residuals;  // of each rank
};

Floats plus(const Floats& a, const Floats& b) {
  Floats sum(a.size());
  for (size_t i = 0; i < a.size(); i++) sum[i] = a[i] + b[i];
  return sum;
}

// One all_reduce/direct of the vectors; parts are equal up to `line` elements, slices of `slice` elements.
Expected all_reduce(DType code, ReduceOp op, const std::vector<Floats>& in, std::vector<Floats> residuals,
                    bool with_residual, size_t slice, size_t line) {
  const size_t n = in.size(), count = in[0].size();
  const size_t base = ((count + n - 1) / n + line - 1) / line * line;
  Expected e{Floats(count), std::move(residuals)};
  for (size_t owner = 0; owner < n; owner++) {
    const size_t end = std::min(count, base * (owner + 1));
    for (size_t at = std::min(count, base * owner); at < end; at += slice) {
      const size_t len = std::min(slice, end - at);
      const auto cut = [&](const Floats& v) {
        Floats piece(len);
        std::copy_n(v.data() + at, len, piece.data());
        return piece;
      };
      const auto encode = [&](const Floats& values, Floats* residual) {
        Floats lost;
        const Floats out = said(code, with_residual ? plus(cut(*residual), values) : values, &lost);
        if (with_residual) std::copy_n(lost.data(), len, residual->data() + at);
        return out;
      };
      std::vector<Floats> operands;
      for (size_t q = 0; q < n; q++)
        operands.push_back(q == owner ? cut(in[q]) : encode(cut(in[q]), &e.residuals[q]));
      Floats sum(len);
      std::vector<const void*> srcs;
      for (const Floats& o : operands) srcs.push_back(o.data());
      void* dst = sum.data();
      find_reduce(DType::kFloat32, op)(&dst, 1, srcs.data(), static_cast<int>(n), len,
                                       static_cast<double>(n));
      const Floats result = n == 1 ? sum : encode(sum, &e.residuals[owner]);
      std::copy_n(result.data(), len, e.out.data() + at);
    }
  }
  return e;
}

Bytes bytes_of(const Floats& v) {
  Bytes b(v.size() * 4);
  if (!v.empty()) std::memcpy(b.data(), v.data(), b.size());
  return b;
}

struct Setting {
  DType code;
  ReduceOp op;
  size_t count, slice;
  bool in_place, residual;
  DType dtype = DType::kFloat32;
};

// A vector as float32 numbers, multiplied as premul_sum does.
Floats floats_of(const Bytes& b, DType dtype, float factor) {
  Floats v(b.size() / dtype_size(dtype));
  cast(DType::kFloat32, v.data(), dtype, b.data(), v.size(), factor);
  return v;
}

// Three calls in a row, so that what is lost in one shows in the next.
Status run_setting(NcclRank& me, cuda::DeviceStreams& streams, const Setting& x, Status* wrong) {
  std::mt19937_64 rng{11};
  DeviceArena arena(1 << 20);
  const auto n = static_cast<size_t>(me.n), r = static_cast<size_t>(me.rank);
  std::vector<Floats> residuals(n, Floats(x.count));
  void* const residual = arena.place(bytes_of(residuals[r]), 4);
  cuda::RoundPlan plan;
  PYCOMM_RETURN_IF_ERROR(make_round_plan(*find_algorithm(Collective::kAllReduce, "direct"), me.rank, me.n, 0,
                                         0, x.in_place, &plan));
  cuda::NcclRounds rounds(me.comm, streams, x.slice * 4);
  const size_t n_bytes = x.count * dtype_size(x.dtype);
  const bool premul = x.op == ReduceOp::kPremulSum;
  void* const in = arena.place(n_bytes, 0);
  void* const out = x.in_place ? in : arena.place(n_bytes, 8);
  void* scratch = nullptr;
  for (int call = 0; call < 3; call++) {
    std::vector<Floats> all;
    std::vector<Bytes> given;
    for (size_t q = 0; q < n; q++) {
      const double by = premul ? factor(static_cast<int>(q)) : 1.0;
      given.push_back(make_input(x.dtype, x.op, false, x.count, rng));
      all.push_back(floats_of(given[q], x.dtype, static_cast<float>(by)));
    }
    Expected want = all_reduce(x.code, premul ? ReduceOp::kSum : x.op, all, residuals, x.residual, x.slice,
                               64 / dtype_size(x.dtype));
    residuals = want.residuals;
    Bytes result(n_bytes);
    cast(x.dtype, result.data(), DType::kFloat32, want.out.data(), x.count, 1.0f);
    if (x.count > 0 && cudaMemcpy(in, given[r].data(), n_bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
      return Status::error(Code::kSystem, "cudaMemcpy");
    }
    cuda::RoundsCall c;
    c.plan = &plan;
    c.in = in;
    c.out = out;
    c.count = x.count;
    c.dtype = x.dtype;
    c.op = x.op;
    c.scalar = factor(me.rank);
    c.codes = x.code;
    if (x.residual) c.residual = static_cast<float*>(residual);
    size_t n_scratch = 0;
    PYCOMM_RETURN_IF_ERROR(rounds.scratch_bytes(c, &n_scratch));
    if (scratch == nullptr) scratch = arena.place(n_scratch, 0);
    PYCOMM_RETURN_IF_ERROR(rounds.run(c, scratch, me.patience));
    if (!ends(streams.comm())) {
      (void)me.comm.abort();
      return Status::error(Code::kSystem, "the stream does not end");
    }
    const std::string what = format("%s %s of %d ranks, %d elements, call %d: ", dtype_name(x.code),
                                    reduce_op_name(x.op), me.n, static_cast<int>(x.count), call);
    const auto got = same(x.dtype, arena.read(out, n_bytes), result);
    if (!got && wrong->ok()) *wrong = Status::error(Code::kSystem, what + got.message());
    const auto kept = same(DType::kFloat32, arena.read(residual, x.count * 4), bytes_of(residuals[r]));
    if (!kept && wrong->ok()) *wrong = Status::error(Code::kSystem, what + "residual: " + kept.message());
  }
  const auto clean = arena.finish();
  if (!clean && wrong->ok()) *wrong = Status::error(Code::kSystem, clean.message());
  return Status();
}

TEST(NcclCodes, AllReduceIsWhatTheCpuSays) {
  for (const int n : {1, 2, 3, 5, 8}) {
    run_nccl_ranks(n, [](NcclRank& me) -> Status {
      std::unique_ptr<cuda::DeviceStreams> streams;
      PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(me.rank, &streams));
      Status wrong;
      for (const Setting& x :
           {Setting{DType::kInt8, ReduceOp::kAvg, 2000, 512, true, true},
            Setting{DType::kInt8, ReduceOp::kSum, 1999, 256, false, false},
            Setting{DType::kFloat8E4M3, ReduceOp::kAvg, 777, 4096, false, true},
            Setting{DType::kFloat16, ReduceOp::kSum, 3, 64, true, false},
            Setting{DType::kBFloat16, ReduceOp::kAvg, 601, 128, true, true},
            Setting{DType::kInt8, ReduceOp::kPremulSum, 900, 512, true, true},
            Setting{DType::kInt8, ReduceOp::kSum, 901, 512, true, true, DType::kBFloat16},
            Setting{DType::kFloat8E4M3, ReduceOp::kAvg, 900, 256, false, false, DType::kFloat16},
            Setting{DType::kInt8, ReduceOp::kAvg, 0, 64, false, true}}) {
        PYCOMM_RETURN_IF_ERROR(run_setting(me, *streams, x, &wrong));
      }
      return wrong;
    });
  }
}

TEST(NcclCodes, WhatDoesNotGoTogetherIsRefused) {
  cuda::RoundPlan plan;
  const auto refusal = [&](const char* algorithm, cuda::RoundsCall c) {
    const Status made =
        make_round_plan(*find_algorithm(Collective::kAllReduce, algorithm), 0, 3, 0, 0, false, &plan);
    EXPECT_TRUE(made.ok());
    c.plan = &plan;
    nccl::NcclComm comm;
    std::unique_ptr<cuda::DeviceStreams> streams;
    EXPECT_TRUE(cuda::DeviceStreams::make(0, &streams).ok());
    size_t n = 0;
    return cuda::NcclRounds(comm, *streams).scratch_bytes(c, &n).message();
  };
  cuda::RoundsCall c;
  c.count = 10;
  c.dtype = DType::kFloat32;
  c.codes = DType::kInt8;
  EXPECT_EQ(refusal("direct", c), "");
  const char* const only_direct = " over NCCL: codes go with direct, without deterministic=True";
  EXPECT_EQ(refusal("ring", c), std::string("all_reduce/ring") + only_direct);
  EXPECT_EQ(refusal("one_shot", c), std::string("all_reduce/one_shot") + only_direct);
  c.deterministic = true;
  EXPECT_EQ(refusal("direct", c), std::string("all_reduce/direct") + only_direct);
  c.deterministic = false;
  c.op = ReduceOp::kMax;
  EXPECT_EQ(
      refusal("direct", c),
      "all_reduce/direct over NCCL: codes of int8 for max of float32; expected sum, avg or premul_sum of "
      "float32 (float16, bfloat16), and smaller codes of int8, float8_e4m3fn, float16 or bfloat16");
  c.op = ReduceOp::kSum;
  c.codes.reset();
  float residual[10] = {};
  c.residual = residual;
  EXPECT_EQ(refusal("direct", c), "all_reduce/direct over NCCL: a residual goes with codes only");
}

}  // namespace
}  // namespace pycomm
