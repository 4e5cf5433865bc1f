// Builder: what an algorithm's file writes its steps with, so that the file reads as the algorithm.
//
// Chunks are declared first (inputs, then outputs, then scratch), then steps in order of rounds. Arguments
// always come as (round, peer, from where, to where, how many consecutive chunks). A reduction names the
// side of its own operand `src`; `side` gives rank order, which is what the canonical tree wants.
//
// Also here: the two shapes that deterministic algorithms share (docs/numerics.md). `Fold` makes a power of
// two out of any n: ranks 2i and 2i+1, for i < n - p, act as one. `combine` lets one rank reduce the inputs
// of all ranks within one round, in exactly the canonical tree T. And two small helpers of more than one
// file: `binomial_subtree`, and `for_each_run` for runs of numbers that wrap around.
#pragma once

#include <bit>

#include "schedule/step.h"

namespace pycomm {

enum class Src : uint8_t { kRight, kLeft };

// The side of `rank`'s operand next to `peer`'s when lower ranks go left.
constexpr Src side(int rank, int peer) { return rank < peer ? Src::kLeft : Src::kRight; }

// T's split: how many of n operands go left (design: m = min(p, n - p/2), p the largest power of two <= n).
constexpr int canonical_left(int n) {
  const int p = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  return p < n - p / 2 ? p : n - p / 2;
}

constexpr int ceil_log2(int n) { return n <= 1 ? 0 : std::bit_width(static_cast<unsigned>(n - 1)); }

// In a binomial tree over 0 … n-1, how many ranks v stands for, itself included: v … v + that - 1.
constexpr int binomial_subtree(int v, int n) { return v == 0 || v + (v & -v) > n ? n - v : v & -v; }

// fn(first, how many) for the at most two runs without a wrap of `count` numbers from `first` on, modulo n.
template <class Fn>
void for_each_run(int first, int count, int n, Fn fn) {
  const int before_wrap = count < n - first ? count : n - first;
  fn(first, static_cast<uint32_t>(before_wrap));
  if (count > before_wrap) fn(0, static_cast<uint32_t>(count - before_wrap));
}

class Builder {
 public:
  Builder(int rank, int n_ranks, int root, uint32_t n_parts);

  // Each declares n chunks that hold the parts first_part, first_part + 1, …
  void add_in(uint32_t first_part, uint32_t n = 1);
  void add_out(uint32_t first_part, uint32_t n = 1);
  void add_scratch(uint32_t first_part, uint32_t n = 1);
  uint32_t in(int i) const { return s_.in(static_cast<uint32_t>(i)); }
  uint32_t out(int i) const { return s_.out(static_cast<uint32_t>(i)); }
  uint32_t scratch(int i) const { return s_.scratch(static_cast<uint32_t>(i)); }

  void send(int round, int peer, uint32_t src, uint32_t n = 1);
  void recv(int round, int peer, uint32_t dst, uint32_t n = 1);
  // dst = incoming (+) src, or src (+) incoming with Src::kLeft
  void recv_reduce(int round, int peer, uint32_t src, uint32_t dst, Src src_side = Src::kRight,
                   uint32_t n = 1);
  // dst = dst (+) src, or src (+) dst with Src::kLeft
  void reduce(int round, uint32_t src, uint32_t dst, Src src_side = Src::kRight, uint32_t n = 1);
  void copy(int round, uint32_t src, uint32_t dst, uint32_t n = 1);

  // In one round: target = T over all ranks' chunks, this rank's being `own` and each peer's what it sends.
  // Uses combine_depth(n_ranks) scratch chunks from scratch(slot) on, which must hold the same part. `target`
  // is written last, so it may share memory with `own`.
  void combine(int round, uint32_t own, uint32_t target, int slot = 0);
  static int combine_depth(int n_ranks) { return n_ranks <= 2 ? 0 : ceil_log2(n_ranks); }

  Schedule finish() { return std::move(s_); }
  // The schedule of a single rank: inputs copied to outputs.
  Schedule alone();

 private:
  void add(StepOp op, Src src_side, int round, int peer, uint32_t n, uint32_t src, uint32_t dst);
  void combine_range(int round, int lo, int hi, int slot, uint32_t own, uint32_t target);

  Schedule s_;
};

// The largest power of two p of ranks, and n - p pairs (2i, 2i+1) of which the even one acts for both.
class Fold {
 public:
  explicit Fold(int n_ranks) : p_(static_cast<int>(std::bit_floor(static_cast<unsigned>(n_ranks)))) {
    n_pairs_ = n_ranks - p_;
  }
  int p() const { return p_; }
  bool any() const { return n_pairs_ > 0; }
  bool in_pair(int rank) const { return rank < 2 * n_pairs_; }
  bool acts(int rank) const { return !in_pair(rank) || rank % 2 == 0; }
  int virtual_rank(int rank) const { return in_pair(rank) ? rank / 2 : rank - n_pairs_; }
  int real_rank(int v) const { return v < n_pairs_ ? 2 * v : v + n_pairs_; }

 private:
  int p_;
  int n_pairs_;
};

}  // namespace pycomm
