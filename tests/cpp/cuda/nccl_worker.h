// Worker: one rank that runs case after case over NCCL and compares what it gets, bit for bit.
//
// All ranks of a case make the same numbers (nccl_inputs.h), so each knows what it must get. Operands lie in
// a DeviceArena, which sees whatever is written outside of them.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "cuda/nccl_inputs.h"
#include "cuda/nccl_ranks.h"
#include "engine/cuda/nccl_rounds.h"

namespace pycomm {

#if defined(__SANITIZE_THREAD__)
inline const std::vector<int> kRanks = {2, 3};  // under that sanitizer a kernel takes tens of milliseconds
inline const std::vector<uint64_t> kSizes = {40};
#else
inline const std::vector<int> kRanks = {1, 2, 3, 4, 5, 6, 7, 8};
inline const std::vector<uint64_t> kSizes = {0, 1, 5, 64, 233};
#endif

// Elements of the parts, or of the vector: uneven, some empty, more than fit the window of tiles.
inline std::vector<uint64_t> counts_for(const Algorithm& a, int n, uint64_t size) {
  if (!has_parts(a.collective)) return {size * static_cast<uint64_t>(n) / 2 + 1};
  std::vector<uint64_t> counts;
  for (int r = 0; r < n; r++) counts.push_back(r % 3 == 1 ? 0 : size + static_cast<uint64_t>(r) * 3);
  return counts;
}

struct Case {
  const Algorithm* algorithm = nullptr;
  int root = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::vector<uint64_t> counts = {};  // of each rank's part, or one: the whole vector
  bool in_place = false;
  bool deterministic = false;
  bool exact = true;
  size_t slice_bytes = 64;
  size_t off = 0;  // misalignment of the tensors modulo 16

  std::string text(int n) const {
    uint64_t count = 0;
    for (const uint64_t c : counts) count += c;
    return format("%s/%s of %d ranks, root %d, %s %s, %d elements%s%s, misaligned by %zu",
                  collective_name(algorithm->collective), algorithm->name, n, root, dtype_name(dtype),
                  reduce_op_name(op), static_cast<int>(count), in_place ? ", in place" : "",
                  deterministic ? ", deterministic" : "", off);
  }
};

// What a rank keeps over many cases.
struct Worker {
  NcclRank& me;
  std::unique_ptr<cuda::DeviceStreams> streams;
  DeviceArena arena{3 << 20};
  std::mt19937_64 rng{5};  // the same on all ranks: so are the inputs

  explicit Worker(NcclRank& rank) : me(rank) {}
  // An error when the case could not be run. A wrong result is kept for result(), so that no rank leaves its
  // peers.
  Status run(const Case& c);
  // kSizes, in place and not, with a dtype, operation, root, slice and alignment each.
  Status run_algorithm(const Algorithm& algorithm);
  Status result() { return std::move(wrong_); }

 private:
  Status wrong_;
  Status compare(const Case& c, const Numbers& x, const void* in, const void* out);
};

Status run_coded_cases(NcclRank& me);  // nccl_codes_test.cc's, of all_reduce, reduce_scatter and reduce

inline Status wrong(const Case& c, int n, const std::string& what) {
  return Status::error(Code::kSystem, c.text(n) + ": " + what);
}

inline Status Worker::run(const Case& c) {
  if (streams == nullptr) PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(me.comm.device(), &streams));
  const bool parts = has_parts(c.algorithm->collective);
  const Numbers x =
      make_numbers(c.algorithm->collective, me.n, c.root, c.dtype, c.op, c.exact, c.counts, rng);
  const auto r = static_cast<size_t>(me.rank);
  cuda::RoundPlan plan;
  PYCOMM_RETURN_IF_ERROR(make_round_plan(*c.algorithm, me.rank, me.n, c.root, 0, c.in_place, &plan));
  cuda::RoundsCall call;
  call.plan = &plan;
  for (const uint64_t k : c.counts) call.count += k;
  if (parts) call.counts = c.counts;
  call.dtype = c.dtype;
  call.op = c.op;
  call.scalar = factor(me.rank);
  call.deterministic = c.deterministic;

  std::byte* in = nullptr;
  std::byte* out = nullptr;
  if (c.in_place) {  // one vector, of which both are parts
    const size_t own = [&] {
      uint64_t at = 0;
      for (size_t q = 0; q < r && parts; q++) at += c.counts[q];
      return at * dtype_size(c.dtype);
    }();
    const bool in_is_part = x.in[r].size() < x.out[r].size();
    const size_t n_bytes = std::max(x.in[r].size(), x.out[r].size());
    auto* base = static_cast<std::byte*>(arena.place(Bytes(n_bytes, 0xab), c.off));
    in = base + (in_is_part && parts ? own : 0);
    out = base + (!in_is_part && parts && x.in[r].size() > x.out[r].size() ? own : 0);
    if (!x.in[r].empty() &&
        cudaMemcpy(in, x.in[r].data(), x.in[r].size(), cudaMemcpyHostToDevice) != cudaSuccess) {
      return wrong(c, me.n, "cudaMemcpy");
    }
  } else {
    in = static_cast<std::byte*>(arena.place(x.in[r], c.off));
    out = static_cast<std::byte*>(arena.place(x.out[r].size(), c.off));
  }
  call.in = in;
  call.out = out;
  cuda::NcclRounds rounds(me.comm, *streams, c.slice_bytes);
  size_t n_scratch = 0;
  PYCOMM_RETURN_IF_ERROR(rounds.scratch_bytes(call, &n_scratch));
  void* const scratch = arena.place(n_scratch, 0);
  // A copy from pageable memory may still be under way when cudaMemcpy returns.
  if (cudaStreamSynchronize(nullptr) != cudaSuccess) return wrong(c, me.n, "the inputs");
  PYCOMM_RETURN_IF_ERROR(rounds.run(call, scratch, me.patience));
  if (!ends(streams->comm())) {
    (void)me.comm.abort();  // or the arena would wait for it when it goes
    return wrong(c, me.n, "the stream does not end");
  }
  Status s = compare(c, x, in, out);
  if (wrong_.ok()) wrong_ = std::move(s);
  return Status();
}

inline Status Worker::run_algorithm(const Algorithm& algorithm) {
  int i = 0;
  for (const uint64_t size : kSizes) {
    for (const bool in_place : {false, true}) {
      if (in_place && !algorithm.in_place) continue;
      Case c;
      c.algorithm = &algorithm;
      c.root = i % me.n;
      c.dtype = std::array{DType::kFloat32, DType::kBFloat16, DType::kInt64}[static_cast<size_t>(i % 3)];
      c.op = i % 5 == 4 && c.dtype != DType::kInt64 ? ReduceOp::kAvg : ReduceOp::kSum;
      c.counts = counts_for(algorithm, me.n, size);
      c.in_place = in_place;
      c.off = i % 2 == 0 ? 0 : dtype_size(c.dtype);
      c.slice_bytes = i % 4 == 3 ? 4096 : 64;
      PYCOMM_RETURN_IF_ERROR(run(c));
      i++;
    }
  }
  return Status();
}

inline Status Worker::compare(const Case& c, const Numbers& x, const void* in, const void* out) {
  const auto r = static_cast<size_t>(me.rank);
  const auto got = same(c.dtype, arena.read(out, x.out[r].size()), x.out[r]);
  if (!got) return wrong(c, me.n, got.message());
  if (!c.in_place && arena.read(in, x.in[r].size()) != x.in[r])
    return wrong(c, me.n, "the input was written");
  const auto clean = arena.finish();
  return clean ? Status() : wrong(c, me.n, clean.message());
}

}  // namespace pycomm
