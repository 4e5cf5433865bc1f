// The vocabulary of a collective algorithm: steps over chunks, and nothing else.
//
// A Schedule is what one rank of n does: a flat list of 16-byte steps. It holds no pointer, byte count,
// dtype, stream or protocol. The vector that a collective works on is cut into `n_parts` parts; a *chunk* is
// a place that holds one part. Chunk ids are one flat space: [0, n_in) inputs (read-only when out of place),
// then n_out outputs, then n_scratch scratch chunks; `part[chunk]` says which part a chunk holds, so an
// engine knows its size, and data may only move between chunks of the same part. In place means that an input
// and an output chunk of the same part share memory.
//
//   send         peer's recv gets chunk src
//   recv         dst = incoming
//   recv_reduce  dst = incoming (+) src      (or src (+) incoming when src_left is set)
//   reduce       dst = dst (+) src           (or src (+) dst when src_left is set)
//   copy         dst = src
//
// A step covers n_chunks consecutive chunks from src and from dst. Rules that `verify` proves: the k-th send
// p->q pairs with the k-th recv at q from p, in the same round; within a round no chunk is both sent from and
// written; writes of a round take effect in list order; steps are listed in order of rounds. A sender reads
// its chunk as it was before the round. An engine that progresses a round's sends and recvs together
// therefore cannot deadlock (induction over rounds).
#pragma once

#include <cstdint>
#include <vector>

namespace pycomm {

enum class StepOp : uint8_t { kSend, kRecv, kRecvReduce, kReduce, kCopy };

struct Step {
  uint64_t op_bits : 4;  // low 3 bits StepOp, bit 3 src_left
  uint64_t peer : 20;
  uint64_t round : 20;
  uint64_t n_chunks : 20;
  uint32_t src;
  uint32_t dst;

  StepOp op() const { return static_cast<StepOp>(op_bits & 7); }
  bool src_left() const { return (op_bits >> 3) & 1; }
  friend bool operator==(const Step& a, const Step& b) {
    return a.op_bits == b.op_bits && a.peer == b.peer && a.round == b.round && a.n_chunks == b.n_chunks &&
           a.src == b.src && a.dst == b.dst;
  }
};
static_assert(sizeof(Step) == 16);

struct Schedule {
  int rank = 0;
  int n_ranks = 1;
  int root = 0;
  uint32_t n_parts = 0;
  uint32_t n_in = 0;
  uint32_t n_out = 0;
  uint32_t n_scratch = 0;
  std::vector<uint32_t> part;  // part[chunk], size n_in + n_out + n_scratch
  std::vector<Step> steps;

  uint32_t in(uint32_t i) const { return i; }
  uint32_t out(uint32_t i) const { return n_in + i; }
  uint32_t scratch(uint32_t i) const { return n_in + n_out + i; }
  uint32_t n_chunks() const { return n_in + n_out + n_scratch; }
};

}  // namespace pycomm
