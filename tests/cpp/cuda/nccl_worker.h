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
  Status result() { return std::move(wrong_); }

 private:
  Status wrong_;
  Status compare(const Case& c, const Numbers& x, const void* in, const void* out);
};

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
