// NCCL's own collectives, as the algorithm "nccl": candidates beside the catalog's.
//
// What they compute is NCCL's affair: the order of additions is not the canonical tree (so not
// deterministic=True), low precision is rounded at each hop, avg multiplies by 1/n before it adds, and
// premul_sum's factor is rounded to the element type. What would break the rest of docs/numerics.md is
// refused here and runs as a schedule: min and max of floats (NaN, −0), operations and dtypes that NCCL does
// not have. Data that is only moved moves as bytes.
//
// Counts of parts that differ are grouped broadcasts (all_gather); gather, scatter and all_to_all are grouped
// sends and receives, as NCCL's users write them. Everything is put on `stream`; memory stays valid until it
// has passed.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "engine/cuda/streams.h"
#include "schedule/catalog.h"
#include "transport/cuda/nccl_comm.h"

namespace pycomm::cuda {

struct NativeCall {
  Collective collective = Collective::kAllReduce;
  const void* in = nullptr;  // as of RoundsCall; null where this rank has none
  void* out = nullptr;
  // Of the parts of all ranks (reduce_scatter, all_gather, gather, scatter); the whole vector otherwise.
  uint64_t count = 0;
  std::span<const uint64_t> counts;  // of each rank's part; may be empty when they are equal
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  double scalar = 1;  // premul_sum: this rank's factor
  int root = 0;
  bool deterministic = false;
};

// kValue or kSchedule, with the reason, when NCCL has no such operation or would not keep pycomm's contract.
Status native_supported(const NativeCall& call, int n_ranks);
Status run_native(nccl::NcclComm& comm, Stream stream, const NativeCall& call,
                  const nccl::Patience& patience);

// kValue, with the remedy, where gather or scatter would send the first message between two ranks
// (NcclComm::check_exchange). What NCCL connects for collectives of its own it does not tell.
Status native_can_be_captured(const nccl::NcclComm& comm, const NativeCall& call);

// Rank q gets send_counts[q] elements, which follow each other in `in`; what came lies in `out` in the same
// way.
struct AllToAll {
  const void* in = nullptr;
  void* out = nullptr;
  std::span<const uint64_t> send_counts, recv_counts;
  DType dtype = DType::kUInt8;
};
Status run_all_to_all(nccl::NcclComm& comm, Stream stream, const AllToAll& call,
                      const nccl::Patience& patience);
// As native_can_be_captured.
Status all_to_all_can_be_captured(const nccl::NcclComm& comm, const AllToAll& call);

}  // namespace pycomm::cuda
