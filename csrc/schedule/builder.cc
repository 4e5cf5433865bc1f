// Writing steps; and `combine`, the canonical tree within one round.
#include "schedule/builder.h"

#include <cassert>
#include <utility>

namespace pycomm {

Builder::Builder(int rank, int n_ranks, int root, uint32_t n_parts) {
  s_.rank = rank;
  s_.n_ranks = n_ranks;
  s_.root = root;
  s_.n_parts = n_parts;
}

void Builder::add_in(uint32_t first_part, uint32_t n) {
  assert(s_.n_out == 0 && s_.n_scratch == 0);
  for (uint32_t i = 0; i < n; i++) s_.part.push_back(first_part + i);
  s_.n_in += n;
}

void Builder::add_out(uint32_t first_part, uint32_t n) {
  assert(s_.n_scratch == 0);
  for (uint32_t i = 0; i < n; i++) s_.part.push_back(first_part + i);
  s_.n_out += n;
}

void Builder::add_scratch(uint32_t first_part, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) s_.part.push_back(first_part + i);
  s_.n_scratch += n;
}

void Builder::add(StepOp op, Src src_side, int round, int peer, uint32_t n, uint32_t src, uint32_t dst) {
  Step step{};
  step.op_bits = static_cast<uint64_t>(op) | (src_side == Src::kLeft ? 8u : 0u);
  step.peer = static_cast<uint64_t>(peer) & 0xfffff;
  step.round = static_cast<uint64_t>(round) & 0xfffff;
  step.n_chunks = n & 0xfffff;
  step.src = src;
  step.dst = dst;
  s_.steps.push_back(step);
}

void Builder::send(int round, int peer, uint32_t src, uint32_t n) {
  add(StepOp::kSend, Src::kRight, round, peer, n, src, 0);
}

void Builder::recv(int round, int peer, uint32_t dst, uint32_t n) {
  add(StepOp::kRecv, Src::kRight, round, peer, n, 0, dst);
}

void Builder::recv_reduce(int round, int peer, uint32_t src, uint32_t dst, Src src_side, uint32_t n) {
  add(StepOp::kRecvReduce, src_side, round, peer, n, src, dst);
}

void Builder::reduce(int round, uint32_t src, uint32_t dst, Src src_side, uint32_t n) {
  add(StepOp::kReduce, src_side, round, s_.rank, n, src, dst);
}

void Builder::copy(int round, uint32_t src, uint32_t dst, uint32_t n) {
  add(StepOp::kCopy, Src::kRight, round, s_.rank, n, src, dst);
}

void Builder::combine(int round, uint32_t own, uint32_t target, int slot) {
  combine_range(round, 0, s_.n_ranks, slot, own, target);
}

// target = T(lo, hi), with scratch(slot) and above free. The left half is never the smaller one, so only a
// pair has a single rank on its left.
void Builder::combine_range(int round, int lo, int hi, int slot, uint32_t own, uint32_t target) {
  const int rank = s_.rank;
  if (hi - lo == 1) {
    if (lo == rank) {
      copy(round, own, target);
    } else {
      recv(round, lo, target);
    }
    return;
  }
  if (hi - lo == 2 && (rank == lo || rank == lo + 1)) {
    const int peer = rank == lo ? lo + 1 : lo;
    recv_reduce(round, peer, own, target, side(rank, peer));
    return;
  }
  const int mid = lo + canonical_left(hi - lo);
  combine_range(round, lo, mid, slot, own, scratch(slot));
  if (hi - mid == 1 && mid != rank) {
    recv_reduce(round, mid, scratch(slot), target, Src::kLeft);
    return;
  }
  if (hi - mid == 1) {
    reduce(round, own, scratch(slot));
  } else {
    combine_range(round, mid, hi, slot + 1, own, scratch(slot + 1));
    reduce(round, scratch(slot + 1), scratch(slot));
  }
  if (target != scratch(slot)) copy(round, scratch(slot), target);
}

Schedule Builder::alone() {
  copy(0, in(0), out(0), s_.n_in);
  return finish();
}

}  // namespace pycomm
