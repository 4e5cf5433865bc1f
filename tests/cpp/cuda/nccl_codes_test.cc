// All-reduce and its kin with block codes over NCCL, against the CPU's kernels (kernels/blocks.h), bit for
// bit: every contribution but the owner's own is encoded, T in float32 at the owner, an all-reduce's result
// encoded once more.
#include <gtest/gtest.h>

#include <span>

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

constexpr int kRoot = 1;            // of reduce, modulo the ranks
constexpr size_t kReduceParts = 3;  // its pipeline's depth

struct Setting {
  Collective collective;
  DType code;
  ReduceOp op;
  size_t count, slice;
  bool in_place, residual;
  DType dtype = DType::kFloat32;

  size_t n_parts(size_t n_ranks) const { return collective == Collective::kReduce ? kReduceParts : n_ranks; }
  size_t owner(size_t part, size_t n_ranks) const {
    return collective == Collective::kReduce ? kRoot % n_ranks : part;
  }
  // Parts are equal up to 64 bytes.
  size_t part_begin(size_t part, size_t n_ranks) const {
    const size_t n = n_parts(n_ranks), line = 64 / dtype_size(dtype);
    return std::min(count, ((count + n - 1) / n + line - 1) / line * line * part);
  }
};

struct Expected {
  Floats out;
  std::vector<Floats> residuals;  // of each rank
};

Floats plus(const Floats& a, const Floats& b) {
  Floats sum(a.size());
  for (size_t i = 0; i < a.size(); i++) sum[i] = a[i] + b[i];
  return sum;
}

// One call of the direct algorithm.
Expected expected(const Setting& x, const std::vector<Floats>& in, std::vector<Floats> residuals) {
  const size_t n = in.size();
  Expected e{Floats(x.count), std::move(residuals)};
  for (size_t part = 0; part < x.n_parts(n); part++) {
    const size_t owner = x.owner(part, n), end = x.part_begin(part + 1, n);
    for (size_t at = x.part_begin(part, n); at < end; at += x.slice) {
      const size_t len = std::min(x.slice, end - at);
      const auto cut = [&](const Floats& v) {
        Floats piece(len);
        std::copy_n(v.data() + at, len, piece.data());
        return piece;
      };
      const auto encode = [&](const Floats& values, Floats* residual) {
        Floats lost;
        const Floats out = said(x.code, x.residual ? plus(cut(*residual), values) : values, &lost);
        if (x.residual) std::copy_n(lost.data(), len, residual->data() + at);
        return out;
      };
      std::vector<Floats> operands;
      for (size_t q = 0; q < n; q++)
        operands.push_back(q == owner ? cut(in[q]) : encode(cut(in[q]), &e.residuals[q]));
      Floats sum(len);
      std::vector<const void*> srcs;
      for (const Floats& o : operands) srcs.push_back(o.data());
      void* dst = sum.data();
      find_reduce(DType::kFloat32, x.op == ReduceOp::kPremulSum ? ReduceOp::kSum : x.op)(
          &dst, 1, srcs.data(), static_cast<int>(n), len, static_cast<double>(n));
      const bool is_sent = x.collective == Collective::kAllReduce && n > 1;
      const Floats result = is_sent ? encode(sum, &e.residuals[owner]) : sum;
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
  PYCOMM_RETURN_IF_ERROR(make_round_plan(*find_algorithm(x.collective, "direct"), me.rank, me.n, kRoot % me.n,
                                         kReduceParts, x.in_place, &plan));
  // What this rank has of the result.
  size_t first = 0, n_out = x.collective == Collective::kAllReduce || r == kRoot % n ? x.count : 0;
  if (x.collective == Collective::kReduceScatter) {
    first = x.part_begin(r, n);
    n_out = x.part_begin(r + 1, n) - first;
  }
  cuda::NcclRounds rounds(me.comm, streams, x.slice * 4);
  const size_t size = dtype_size(x.dtype), n_bytes = x.count * size;
  const bool premul = x.op == ReduceOp::kPremulSum;
  auto* const in = static_cast<std::byte*>(arena.place(n_bytes, 0));
  void* const out = x.in_place ? in + first * size : arena.place(n_out * size, 8);
  void* scratch = nullptr;
  for (int call = 0; call < 3; call++) {
    std::vector<Floats> all;
    std::vector<Bytes> given;
    for (size_t q = 0; q < n; q++) {
      const double by = premul ? factor(static_cast<int>(q)) : 1.0;
      given.push_back(make_input(x.dtype, x.op, false, x.count, rng));
      all.push_back(floats_of(given[q], x.dtype, static_cast<float>(by)));
    }
    Expected want = expected(x, all, residuals);
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
    const std::string what =
        format("%s: %s %s of %d ranks, %d elements, call %d: ", collective_name(x.collective),
               dtype_name(x.code), reduce_op_name(x.op), me.n, static_cast<int>(x.count), call);
    const auto at = result.begin() + static_cast<ptrdiff_t>(first * size);
    const auto got =
        same(x.dtype, arena.read(out, n_out * size), Bytes(at, at + static_cast<ptrdiff_t>(n_out * size)));
    if (!got && wrong->ok()) *wrong = Status::error(Code::kSystem, what + got.message());
    const auto kept = same(DType::kFloat32, arena.read(residual, x.count * 4), bytes_of(residuals[r]));
    if (!kept && wrong->ok()) *wrong = Status::error(Code::kSystem, what + "residual: " + kept.message());
  }
  const auto clean = arena.finish();
  if (!clean && wrong->ok()) *wrong = Status::error(Code::kSystem, clean.message());
  return Status();
}

Status run_settings(NcclRank& me, std::span<const Setting> settings) {
  std::unique_ptr<cuda::DeviceStreams> streams;
  PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(me.comm.device(), &streams));
  Status wrong;
  for (const Setting& x : settings) PYCOMM_RETURN_IF_ERROR(run_setting(me, *streams, x, &wrong));
  return wrong;
}

void all_are_what_the_cpu_says(std::span<const Setting> settings,
                               std::initializer_list<int> n_ranks = {1, 2, 3, 4, 5, 6, 7, 8}) {
  for (const int n : n_ranks) {
    run_nccl_ranks(n, [settings](NcclRank& me) { return run_settings(me, settings); });
  }
}

constexpr Collective kAll = Collective::kAllReduce, kScatter = Collective::kReduceScatter,
                     kReduce = Collective::kReduce;
const std::vector<Setting> kAllReduces = {
    {kAll, DType::kInt8, ReduceOp::kAvg, 2000, 512, true, true},
    {kAll, DType::kInt8, ReduceOp::kSum, 1999, 256, false, false},
    {kAll, DType::kFloat8E4M3, ReduceOp::kAvg, 777, 4096, false, true},
    {kAll, DType::kFloat16, ReduceOp::kSum, 3, 64, true, false},
    {kAll, DType::kBFloat16, ReduceOp::kAvg, 601, 128, true, true},
    {kAll, DType::kInt8, ReduceOp::kPremulSum, 900, 512, true, true},
    {kAll, DType::kInt8, ReduceOp::kSum, 901, 512, true, true, DType::kBFloat16},
    {kAll, DType::kFloat8E4M3, ReduceOp::kAvg, 900, 256, false, false, DType::kFloat16},
    {kAll, DType::kInt8, ReduceOp::kAvg, 0, 64, false, true}};
const std::vector<Setting> kOthers = {{kScatter, DType::kInt8, ReduceOp::kAvg, 2000, 512, true, true},
                                      {kScatter, DType::kFloat8E4M3, ReduceOp::kSum, 777, 64, false, true},
                                      {kScatter, DType::kFloat16, ReduceOp::kAvg, 17, 4096, false, false},
                                      {kReduce, DType::kInt8, ReduceOp::kAvg, 2000, 256, true, true},
                                      {kReduce, DType::kBFloat16, ReduceOp::kSum, 1201, 4096, false, true}};

TEST(NcclCodes, AllReduceIsWhatTheCpuSays) { all_are_what_the_cpu_says(kAllReduces); }

TEST(NcclCodes, ReduceScatterAndReduceAreWhatTheCpuSays) { all_are_what_the_cpu_says(kOthers); }

TEST(NcclCodes, ReductionsThatAreCutAreWhatTheCpuSays) {
  all_are_what_the_cpu_says(
      std::vector<Setting>{{kAll, DType::kInt8, ReduceOp::kSum, 700, 512, false, true},
                           {kScatter, DType::kFloat16, ReduceOp::kSum, 700, 512, true, true}},
      {33});
}

// Codes need no memory but their messages': no step reads or writes scratch, and what lands in staging is an
// operand of one reduction. Results that leave were made in the round before. (Up to 32 ranks: what the
// kernels combine at once.)
TEST(NcclCodes, DirectTouchesTensorsAndMessagesOnly) {
  int n_combined = 0;
  for (const Collective c : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kReduce}) {
    for (const int n : {1, 2, 3, 4, 5, 7, 8, 13, 16, 32}) {
      for (int rank = 0; rank < n; rank++) {
        for (const bool in_place : {false, true}) {
          cuda::RoundPlan plan;
          const Status made = make_round_plan(*find_algorithm(c, "direct"), rank, n, kRoot % n, kReduceParts,
                                              in_place, &plan);
          ASSERT_TRUE(made.ok()) << made.message();
          ASSERT_TRUE(plan.complete);
          std::vector<uint32_t> results;  // of the round before
          for (const cuda::PlanRound& round : plan.rounds) {
            for (const cuda::Outgoing& s : round.sends) {
              if (s.chunk < plan.n_in) continue;
              ASSERT_LT(s.chunk, plan.n_in + plan.n_out);
              ASSERT_NE(std::find(results.begin(), results.end(), s.chunk), results.end());
            }
            results.clear();
            std::vector<int> n_reads(round.recvs.size());
            for (const cuda::Batch& batch : round.batches) {
              for (const cuda::LocalStep& step : batch.steps) {
                ASSERT_FALSE(step.dst.staged);
                ASSERT_LT(step.dst.at, plan.n_in + plan.n_out);
                if (batch.n_srcs > 1) results.push_back(step.dst.at);
                for (size_t q = 0; q < step.srcs.size(); q++) {
                  const cuda::Operand o = step.srcs[q];
                  ASSERT_TRUE(o.staged || o.at < plan.n_in + plan.n_out);
                  bool came = false;
                  for (size_t i = 0; i < round.recvs.size(); i++) {
                    if (!(round.recvs[i].place == o)) continue;
                    came = true;
                    n_reads[i]++;
                    ASSERT_EQ(round.recvs[i].peer, static_cast<int>(q));
                  }
                  ASSERT_EQ(batch.n_srcs > 1 && came, n > 1 && static_cast<int>(q) != rank);
                  n_combined += came;
                }
              }
            }
            for (size_t i = 0; i < round.recvs.size(); i++) {
              const cuda::Operand place = round.recvs[i].place;
              ASSERT_TRUE(n_reads[i] == 1 || (n_reads[i] == 0 && !place.staged));
            }
          }
        }
      }
    }
  }
  EXPECT_GT(n_combined, 0);
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

Status run_coded_cases(NcclRank& me) {
  PYCOMM_RETURN_IF_ERROR(run_settings(me, kAllReduces));
  return run_settings(me, kOthers);
}

}  // namespace pycomm
