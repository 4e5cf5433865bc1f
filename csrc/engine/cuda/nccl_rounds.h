// Any algorithm of the catalog over NCCL: a group per round, reductions beside the next transfer.
//
// A call's parts are cut into slices; a *tile* is the schedule on one slice of every part. Tiles go through
// the rounds side by side, kWindow at a time: round 0 of each, round 1 of each, … All ranks issue in that
// order, so groups match. A tile's group is put on the communication stream and waits for the tile's
// reductions of the round before; its reductions are put on the reduce stream and wait for the group. So
// while one tile is reduced, the next one travels. Nothing waits on the host.
//
// Numbers (docs/numerics.md): a round's operands are combined at once, in float32 for low precision. Where
// the result has to be T and a schedule has several hops, or a reduction is cut (round_plan.h), low precision
// runs in float32 throughout.
// premul_sum multiplies first, avg divides last, both as the CPU engine does: the same bits.
//
// With `codes`, data travel as messages of codes of float32 (kernels/cuda/kernels.h), in the direct algorithm
// only. One launch encodes all contributions that leave; one decodes those that came to an owner, combines
// them with its own in float32, and encodes the result for all; one decodes what the other owners sent.
// (Where a reduction is cut, messages are decoded before and results encoded after it.) An owner keeps what
// its message says, so all ranks have the same bits. A sender's maxima are its own, so nothing is agreed on
// before; blocks begin at a slice's first value. `residual` is error feedback, one float32 for each element
// of the vector, kept by the caller from call to call (engine/compressed.h does the same between hosts).
//
// Calls can be captured into CUDA graphs: nothing of them is the host's but addresses, of the tensors and of
// the scratch memory, which both must live as long as the graph. A graph is replayed by all ranks, in one
// order with their other calls. NCCL's connections are made before: a call whose messages were never
// exchanged is refused. NCCL's communicator cannot be ended while graphs hold operations of it.
//
// The caller gives scratch memory, keeps all memory until the stream has passed, makes streams.comm() wait
// for the inputs, and finds the outputs written when streams.comm() has passed what is on it. One thread at a
// time.
// Cost: the schedule's rounds and bytes; a group and at most a launch per reduction depth for each round and
// tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "engine/cuda/round_plan.h"
#include "engine/cuda/streams.h"
#include "transport/cuda/nccl_comm.h"

namespace pycomm::cuda {

struct RoundsCall {
  const RoundPlan* plan = nullptr;
  const void* in = nullptr;  // of the first input chunk; consecutive ones follow each other
  void* out = nullptr;
  uint64_t count = 0;                // elements of the whole vector
  std::span<const uint64_t> counts;  // of each part, where they are given (else equal, up to whole 64 bytes)
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  double scalar = 1;  // premul_sum: this rank's factor
  bool deterministic = false;
  std::optional<DType> codes;  // int8, float8_e4m3fn, float16, bfloat16: smaller than dtype, with direct
  float* residual = nullptr;   // with codes
};

class Cut;

class NcclRounds {
 public:
  static constexpr size_t kSliceBytes = size_t{4} << 20;
  static constexpr uint32_t kWindow = 3;

  NcclRounds(nccl::NcclComm& comm, DeviceStreams& streams, size_t slice_bytes = kSliceBytes);

  // kValue or kSchedule when the call cannot be run; else how much scratch it needs (device memory, aligned
  // to 256).
  Status scratch_bytes(const RoundsCall& call, size_t* out) const;
  // kValue when it cannot: NCCL has connections to make for it.
  Status can_be_captured(const RoundsCall& call) const;
  // kValue as well when it cannot be captured, on a stream that is; nothing has been issued then.
  Status run(const RoundsCall& call, void* scratch, const nccl::Patience& patience);

 private:
  class Run;
  Status check_connections(const RoundsCall& call, const Cut& cut) const;
  nccl::NcclComm& comm_;
  DeviceStreams& streams_;
  size_t slice_bytes_;
};

}  // namespace pycomm::cuda
