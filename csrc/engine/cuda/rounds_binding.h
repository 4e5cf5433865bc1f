// Before a call of NcclRounds issues anything: whether it can be run, in which type and memory, and how it is
// cut.
//
// Whatever is decided here follows from what all ranks of a call agree on, so they decide alike. A copy of
// the input is needed where it is multiplied (premul_sum) or cast to a wider type (for determinism, for
// codes, or since a reduction is cut); the result is then made in scratch and cast at the end. Nothing here
// touches a device.
#pragma once

#include <cstddef>

#include "engine/cuda/cut.h"
#include "engine/cuda/nccl_rounds.h"

namespace pycomm::cuda {

// Of places in scratch.
constexpr size_t aligned(size_t n_bytes) { return (n_bytes + 255) / 256 * 256; }

// What is decided before anything is issued: in which type and memory the rounds work.
struct Binding {
  DType dtype = DType::kUInt8;   // of the rounds
  ReduceOp op = ReduceOp::kSum;  // of the rounds
  bool own_in = false;           // they read a copy of the input (cast, or multiplied)
  bool own_out = false;          // they write to scratch, and the result is cast or copied at the end
  bool divide_last = false;      // avg: outputs are divided when all rounds are done
  size_t in_bytes = 0, out_bytes = 0, tile_bytes = 0;  // of scratch
  bool in_one_pass = false;   // with codes: messages are combined and results encoded by one kernel
  size_t messages_begin = 0;  // with codes: of a tile's bytes
  size_t message_bytes = 0, n_outgoing = 0;  // with codes: of the longest, and places for what leaves
  uint32_t window = 1;
};

// kValue or kSchedule, with what was expected.
Status check_rounds(const RoundsCall& call);
Status check_memory(const RoundsCall& call, const Cut& cut);
Cut cut_for(const RoundsCall& call, size_t slice_bytes);
Binding bind_rounds(const RoundsCall& call, const Cut& cut);

}  // namespace pycomm::cuda
