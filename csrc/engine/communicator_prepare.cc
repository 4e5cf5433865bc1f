// From a call's arguments to what ranks compare and engines run: which algorithm, which tiles; what is
// refused.
#include <string_view>

#include "engine/communicator.h"
#include "engine/compressed.h"
#include "schedule/catalog.h"

namespace pycomm {

Status Communicator::prepare(Request* request, const char* algorithm) {
  Call& call = request->call;
  Signature& sig = call.sig;
  const bool reduces = sig.kind == CallKind::kAllReduce || sig.kind == CallKind::kReduceScatter ||
                       sig.kind == CallKind::kReduce;
  if (reduces && find_reduce(sig.dtype, sig.op) == nullptr) {
    return Status::error(
        Code::kValue, format("%s: op '%s' is not defined for %s; defined are %s", call_kind_name(sig.kind),
                             reduce_op_name(sig.op), dtype_name(sig.dtype), defined_ops(sig.dtype).c_str()));
  }
  if (sig.root < 0 || sig.root >= size()) {
    return Status::error(Code::kValue, format("%s: root %d is not a rank of this communicator of %d",
                                              call_kind_name(sig.kind), sig.root, size()));
  }
  sig.algorithm = 255;
  if (call.device >= 0) return prepare_on_device(request, algorithm);
  uint64_t counts_hash = 0;
  for (uint64_t c : request->counts) counts_hash = hash_mix(counts_hash, c);
  sig.deterministic = request->deterministic;
  if (sig.compression != Compression::kNone) {
    if (algorithm != nullptr) PYCOMM_RETURN_IF_ERROR(algorithm_index(sig.kind, algorithm, &sig.algorithm));
    PYCOMM_RETURN_IF_ERROR(check_compression(sig, hierarchy_ != nullptr));
  }
  if (hierarchy_ != nullptr) {
    sig.extra = hash_mix(counts_hash, 0);
    return prepare_across(request, algorithm);
  }
  if (sig.kind != CallKind::kAllToAll && sig.kind != CallKind::kBarrier) {
    const Choice& choice = selector_.choose(sig.kind, sig.count * dtype_size(sig.dtype));
    sig.algorithm = choice.algorithm;
    call.direct_algorithm = choice.direct_algorithm;
    call.tile_bytes = choice.tile_bytes;
    if (algorithm != nullptr) {
      PYCOMM_RETURN_IF_ERROR(algorithm_index(sig.kind, algorithm, &sig.algorithm));
      call.direct_algorithm = sig.algorithm;
    }
    if (request->deterministic && reduces && algorithm == nullptr) {
      // The measured choice may be one that cannot honour the order; `direct` always can.
      for (uint8_t* a : {&sig.algorithm, &call.direct_algorithm}) {
        if (!catalog()[*a].deterministic) PYCOMM_RETURN_IF_ERROR(algorithm_index(sig.kind, "direct", a));
      }
    }
    if (request->deterministic && reduces) {
      for (uint8_t a : {sig.algorithm, call.direct_algorithm}) {
        if (catalog()[a].deterministic) continue;
        return Status::error(Code::kValue, format("%s: algorithm '%s' does not reduce in the deterministic "
                                                  "order; with deterministic=True use one "
                                                  "that does (pycomm schedule list shows them)",
                                                  call_kind_name(sig.kind), catalog()[a].name));
      }
    }
  }
  sig.extra = hash_mix(counts_hash, static_cast<uint64_t>(call.tile_bytes) << 20 ^
                                        static_cast<uint64_t>(call.direct_algorithm) << 8);
  return Status();
}

// The algorithm is that between hosts; inside each host the selection decides.
Status Communicator::prepare_across(Request* request, const char* algorithm) {
  Signature& sig = request->call.sig;
  const bool reduces = sig.kind == CallKind::kAllReduce || sig.kind == CallKind::kReduceScatter ||
                       sig.kind == CallKind::kReduce;
  if (algorithm != nullptr) PYCOMM_RETURN_IF_ERROR(algorithm_index(sig.kind, algorithm, &sig.algorithm));
  if (!sig.deterministic || !reduces) return Status();
  if (algorithm != nullptr && !catalog()[sig.algorithm].deterministic) {
    return Status::error(Code::kValue,
                         format("%s: algorithm '%s' does not reduce in the deterministic order; with "
                                "deterministic=True use one that does (pycomm schedule list shows them)",
                                call_kind_name(sig.kind), algorithm));
  }
  // Elsewhere the hosts have partial results to combine in an order of their own (schedule/exact.h).
  const Placement& placement = hierarchy_->placement();
  if (algorithm == nullptr || std::string_view(algorithm) == "direct" || placement.keeps_order())
    return Status();
  return Status::error(
      Code::kValue,
      format(
          "%s: algorithm '%s' between hosts keeps the deterministic order only where the ranks of each host "
          "follow each other, and on every host as many of them, a power of two; here %s. Leave algorithm= "
          "out, or take 'direct'",
          call_kind_name(sig.kind), algorithm, placement.text().c_str()));
}

}  // namespace pycomm
