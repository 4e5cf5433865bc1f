#include "engine/cuda/rounds_binding.h"

#include <algorithm>
#include <string_view>

#include "kernels/reduce.h"

namespace pycomm::cuda {

namespace {

Status refuse(const RoundsCall& call, Code code, const std::string& why) {
  return Status::error(code, format("%s/%s over NCCL: %s", collective_name(call.plan->collective),
                                    call.plan->algorithm, why.c_str()));
}

Status check_codes(const RoundsCall& call) {
  if (!call.codes.has_value()) {
    return call.residual == nullptr ? Status()
                                    : refuse(call, Code::kValue, "a residual goes with codes only");
  }
  const RoundPlan& p = *call.plan;
  const bool sums = call.op == ReduceOp::kSum || call.op == ReduceOp::kAvg || call.op == ReduceOp::kPremulSum;
  const bool is_float =
      call.dtype == DType::kFloat32 || call.dtype == DType::kFloat16 || call.dtype == DType::kBFloat16;
  const bool smaller =
      is_float && cuda::blocks_supported(*call.codes) && dtype_size(*call.codes) < dtype_size(call.dtype);
  if (!smaller || !p.reduces() || !sums) {
    return refuse(
        call, Code::kValue,
        format("codes of %s for %s of %s; expected sum, avg or premul_sum of float32 (float16, bfloat16), "
               "and smaller codes of int8, float8_e4m3fn, float16 or bfloat16",
               dtype_name(*call.codes), reduce_op_name(call.op), dtype_name(call.dtype)));
  }
  if (std::string_view(p.algorithm) == "direct" && !call.deterministic) return Status();
  return refuse(call, Code::kValue, "codes go with direct, without deterministic=True");
}

DType rounds_dtype(const RoundsCall& call) {
  const RoundPlan& p = *call.plan;
  if (!p.reduces()) return call.dtype;
  const bool widen = is_low_precision(call.dtype) &&
                     (call.op == ReduceOp::kPremulSum || (call.deterministic && !p.complete) || p.cut ||
                      call.codes.has_value());
  return widen ? DType::kFloat32 : call.dtype;
}

}  // namespace

Status check_rounds(const RoundsCall& call) {
  const RoundPlan& p = *call.plan;
  if (!call.counts.empty()) {
    uint64_t sum = 0;
    for (const uint64_t c : call.counts) sum += c;
    if (call.counts.size() != p.n_parts || sum != call.count) {
      return refuse(call, Code::kValue,
                    format("%zu counts with a sum of %llu, expected %u with a sum of %llu",
                           call.counts.size(), static_cast<unsigned long long>(sum), p.n_parts,
                           static_cast<unsigned long long>(call.count)));
    }
  }
  if (p.reduces() && !reduce_supported(call.dtype, call.op)) {
    return refuse(call, Code::kValue,
                  format("%s is not defined for %s, which has %s", reduce_op_name(call.op),
                         dtype_name(call.dtype), defined_ops(call.dtype).c_str()));
  }
  if (p.reduces() && call.deterministic && !p.deterministic) {
    return refuse(call, Code::kValue,
                  "does not add in the canonical order, which deterministic=True asks for");
  }
  return check_codes(call);
}

Cut cut_for(const RoundsCall& call, size_t slice_bytes) {
  return Cut(*call.plan, call.count, call.counts, dtype_size(call.dtype),
             slice_bytes / dtype_size(rounds_dtype(call)));
}

Binding bind_rounds(const RoundsCall& call, const Cut& cut) {
  const RoundPlan& p = *call.plan;
  Binding b;
  b.dtype = rounds_dtype(call);
  b.op = call.op;
  if (p.reduces()) {
    const bool premul = call.op == ReduceOp::kPremulSum;
    b.own_in = premul || b.dtype != call.dtype;
    // In place the rounds want input and output in one, so a copied input brings an output of its own along.
    b.own_out = b.dtype != call.dtype || (b.own_in && p.in_place);
    if (premul) b.op = ReduceOp::kSum;
    b.divide_last = call.op == ReduceOp::kAvg && !p.complete;
    if (b.divide_last) b.op = ReduceOp::kSum;
  }
  const size_t size = dtype_size(b.dtype);
  const bool joint = p.in_place && b.own_in;
  if (joint) {
    b.in_bytes = aligned(cut.count() * size);
  } else {
    if (b.own_in) b.in_bytes = aligned(cut.in().len * size);
    if (b.own_out) b.out_bytes = aligned(cut.out().len * size);
  }
  b.window = std::max(1u, std::min(NcclRounds::kWindow, cut.n_tiles()));
  b.tile_bytes = (p.n_scratch + p.n_staging) * aligned(cut.slice() * size);
  if (call.codes.has_value()) {
    size_t n_incoming = 0;
    for (const PlanRound& round : p.rounds) {
      b.n_outgoing = std::max(b.n_outgoing, round.sends.size());
      n_incoming = std::max(n_incoming, round.recvs.size());
    }
    b.message_bytes = aligned(coded_bytes(*call.codes, cut.slice()));
    // Places for what is cut only: else direct touches tensors and messages
    // (tests/cpp/cuda/nccl_codes_test.cc).
    b.in_one_pass = !p.cut;
    b.messages_begin = p.cut ? b.tile_bytes : 0;
    b.tile_bytes = b.messages_begin + (b.n_outgoing + n_incoming) * b.message_bytes;
  }
  return b;
}

// In place: one address for what both tensors hold. Else they have nothing in common.
Status check_memory(const RoundsCall& call, const Cut& cut) {
  const size_t size = dtype_size(call.dtype);
  if (cut.in().len == 0 || cut.out().len == 0) return Status();
  const auto in = reinterpret_cast<uintptr_t>(call.in), out = reinterpret_cast<uintptr_t>(call.out);
  if (call.plan->in_place) {
    if (in - cut.in().first * size == out - cut.out().first * size) return Status();
    return refuse(call, Code::kValue, "the plan is in place, and input and output do not lie accordingly");
  }
  const bool apart = in + cut.in().len * size <= out || out + cut.out().len * size <= in;
  return apart ? Status()
               : refuse(call, Code::kValue, "input and output overlap, and the plan is not in place");
}

}  // namespace pycomm::cuda
