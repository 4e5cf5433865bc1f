#include "engine/cuda/nccl_rounds.h"

#include <algorithm>

#include "engine/cuda/cut.h"
#include "kernels/reduce.h"

namespace pycomm::cuda {

namespace {

constexpr size_t kAlign = 256;
size_t aligned(size_t n_bytes) { return (n_bytes + kAlign - 1) / kAlign * kAlign; }

// What is decided before anything is issued: in which type and memory the rounds work.
struct Binding {
  DType dtype = DType::kUInt8;   // of the rounds
  ReduceOp op = ReduceOp::kSum;  // of the rounds
  bool own_in = false;           // they read a copy of the input (cast, or multiplied)
  bool own_out = false;          // they write to scratch, and the result is cast or copied at the end
  bool divide_last = false;      // avg: outputs are divided when all rounds are done
  size_t in_bytes = 0, out_bytes = 0, tile_bytes = 0;  // of scratch
  uint32_t window = 1;
};

Status refuse(const RoundsCall& call, Code code, const std::string& why) {
  return Status::error(code, format("%s/%s over NCCL: %s", collective_name(call.plan->collective),
                                    call.plan->algorithm, why.c_str()));
}

Status check(const RoundsCall& call) {
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
  if (!call.wire.has_value()) return Status();
  const bool smaller = is_low_precision(*call.wire) && call.dtype == DType::kFloat32;
  if (!smaller || !p.reduces()) {
    return refuse(
        call, Code::kValue,
        format("%s on the wire for %s; expected a reduction of float32 and float16, bfloat16, float8_e4m3fn "
               "or float8_e5m2 on the wire",
               dtype_name(*call.wire), dtype_name(call.dtype)));
  }
  if (call.deterministic && !p.complete) {
    return refuse(call, Code::kValue,
                  "rounds on the wire at each hop, so it cannot be deterministic; use direct");
  }
  return Status();
}

DType rounds_dtype(const RoundsCall& call) {
  const RoundPlan& p = *call.plan;
  if (!p.reduces()) return call.dtype;
  if (call.wire.has_value()) return *call.wire;
  const bool widen = is_low_precision(call.dtype) &&
                     (call.op == ReduceOp::kPremulSum || (call.deterministic && !p.complete));
  return widen ? DType::kFloat32 : call.dtype;
}

Cut cut_for(const RoundsCall& call, size_t slice_bytes) {
  return Cut(*call.plan, call.count, call.counts, dtype_size(call.dtype),
             slice_bytes / dtype_size(rounds_dtype(call)));
}

Binding bind(const RoundsCall& call, const Cut& cut) {
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

}  // namespace

// One call under way.
class NcclRounds::Run {
 public:
  Run(NcclRounds& rounds, const RoundsCall& call, const Cut& cut, const Binding& b, void* scratch,
      const nccl::Patience& patience)
      : comm_(rounds.comm_),
        streams_(rounds.streams_),
        call_(call),
        plan_(*call.plan),
        cut_(cut),
        b_(b),
        size_(dtype_size(b.dtype)),
        patience_(patience),
        slots_(b.window) {
    auto* at = static_cast<std::byte*>(scratch);
    const auto* given = static_cast<const std::byte*>(call.in);
    in_ = const_cast<std::byte*>(given) - cut.in().first * size_;
    out_ = static_cast<std::byte*>(call.out) - cut.out().first * size_;
    if (b.own_in && plan_.in_place) {
      in_ = out_ = at;
    } else {
      if (b.own_in) in_ = at - cut.in().first * size_;
      if (b.own_out) out_ = at + b.in_bytes - cut.out().first * size_;
    }
    tiles_ = at + b.in_bytes + b.out_bytes;
  }

  Status all() {
    PYCOMM_RETURN_IF_ERROR(streams_.order(streams_.comm(), streams_.reduce(), kBetween));
    PYCOMM_RETURN_IF_ERROR(begin());
    for (uint32_t first = 0; first < cut_.n_tiles(); first += b_.window) {
      const uint32_t n = std::min(b_.window, cut_.n_tiles() - first);
      for (const PlanRound& round : plan_.rounds) {
        for (uint32_t t = 0; t < n; t++) {
          PYCOMM_RETURN_IF_ERROR(transfer(round, first + t, t));
          PYCOMM_RETURN_IF_ERROR(compute(round, first + t, t));
        }
      }
    }
    PYCOMM_RETURN_IF_ERROR(streams_.order(streams_.comm(), streams_.reduce(), kBetween));
    PYCOMM_RETURN_IF_ERROR(end());
    return streams_.order(streams_.reduce(), streams_.comm(), kBetween);
  }

 private:
  // Event numbers: one for both ends, two for each slot.
  static constexpr size_t kBetween = 0;
  static size_t travelled(uint32_t slot) { return 1 + 2 * size_t{slot}; }
  static size_t computed(uint32_t slot) { return 2 + 2 * size_t{slot}; }

  // What a slot's stream has that the other one has not waited for.
  struct Slot {
    bool travels = false, computes = false;
  };

  std::byte* address(uint32_t chunk, uint32_t tile, uint32_t slot) const {
    const uint32_t n_tensors = plan_.n_in + plan_.n_out;
    if (chunk >= n_tensors) return place(chunk - n_tensors, slot);
    std::byte* const tensor = chunk < plan_.n_in ? in_ : out_;
    return tensor + (cut_.start(plan_.part[chunk]) + cut_.slice() * tile) * size_;
  }
  // Scratch chunks first, then staging.
  std::byte* place(uint32_t number, uint32_t slot) const {
    return tiles_ + slot * b_.tile_bytes + number * aligned(cut_.slice() * size_);
  }
  std::byte* address(Operand o, uint32_t tile, uint32_t slot) const {
    return o.staged ? place(plan_.n_scratch + o.at, slot) : address(o.at, tile, slot);
  }

  Status begin();
  Status end();
  Status transfer(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status compute(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status launch(const Batch& batch, uint32_t tile, uint32_t slot);

  nccl::NcclComm& comm_;
  DeviceStreams& streams_;
  const RoundsCall& call_;
  const RoundPlan& plan_;
  const Cut& cut_;
  const Binding& b_;
  size_t size_;
  const nccl::Patience& patience_;
  std::vector<Slot> slots_;
  std::byte *in_, *out_;  // where element 0 of the vector would be
  std::byte* tiles_;
};

// The input in the rounds' type and, for premul_sum, times the factor.
Status NcclRounds::Run::begin() {
  if (!b_.own_in || cut_.in().len == 0) return Status();
  const CastSegment all{in_ + cut_.in().first * size_, call_.in, cut_.in().len};
  const bool premul = call_.op == ReduceOp::kPremulSum;
  if (b_.dtype != call_.dtype) {
    const float scale = premul ? static_cast<float>(call_.scalar) : 1.0f;
    PYCOMM_RETURN_IF_ERROR(cast(b_.dtype, call_.dtype, {&all, 1}, scale, streams_.reduce()));
  } else {
    const ReduceSegment one{all.dst, &all.src, all.n_elems};
    PYCOMM_RETURN_IF_ERROR(
        reduce(b_.dtype, ReduceOp::kPremulSum, {&one, 1}, 1, call_.scalar, streams_.reduce()));
  }
  return streams_.order(streams_.reduce(), streams_.comm(), kBetween);
}

Status NcclRounds::Run::end() {
  if (cut_.out().len == 0) return Status();
  std::byte* const out = out_ + cut_.out().first * size_;
  if (b_.divide_last) {
    const void* src = out;
    const ReduceSegment all{out, &src, cut_.out().len};
    PYCOMM_RETURN_IF_ERROR(reduce(b_.dtype, ReduceOp::kAvg, {&all, 1}, 1, static_cast<double>(plan_.n_ranks),
                                  streams_.reduce()));
  }
  if (!b_.own_out) return Status();
  const CastSegment all{call_.out, out, cut_.out().len};
  return cast(call_.dtype, b_.dtype, {&all, 1}, 1.0f, streams_.reduce());
}

// The round's group, after the tile's reductions of the rounds before. Empty slices do not travel.
Status NcclRounds::Run::transfer(const PlanRound& round, uint32_t tile, uint32_t slot) {
  const auto n_bytes = [&](uint32_t part) { return cut_.slice_len(part, tile) * size_; };
  bool any = false;
  for (const Outgoing& s : round.sends) any |= n_bytes(plan_.part[s.chunk]) > 0;
  for (const Landing& r : round.recvs) any |= n_bytes(r.part) > 0;
  if (!any) return Status();
  if (slots_[slot].computes) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.comm(), computed(slot)));
  slots_[slot].computes = false;

  const nccl::Api& api = comm_.api();
  PYCOMM_RETURN_IF_ERROR(comm_.start_group());
  for (const Outgoing& s : round.sends) {
    const size_t n = n_bytes(plan_.part[s.chunk]);
    if (n == 0) continue;
    PYCOMM_RETURN_IF_ERROR(comm_.in_group(
        api.send(address(s.chunk, tile, slot), n, nccl::kUInt8, s.peer, comm_.raw(), streams_.comm()),
        "ncclSend"));
  }
  for (const Landing& r : round.recvs) {
    const size_t n = n_bytes(r.part);
    if (n == 0) continue;
    PYCOMM_RETURN_IF_ERROR(comm_.in_group(
        api.recv(address(r.place, tile, slot), n, nccl::kUInt8, r.peer, comm_.raw(), streams_.comm()),
        "ncclRecv"));
  }
  PYCOMM_RETURN_IF_ERROR(comm_.end_group(patience_));
  slots_[slot].travels = true;
  return streams_.record(streams_.comm(), travelled(slot));
}

// The round's reductions and copies, after the tile's transfers so far.
Status NcclRounds::Run::compute(const PlanRound& round, uint32_t tile, uint32_t slot) {
  if (round.batches.empty()) return Status();
  if (slots_[slot].travels) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.reduce(), travelled(slot)));
  slots_[slot].travels = false;
  for (const Batch& batch : round.batches) PYCOMM_RETURN_IF_ERROR(launch(batch, tile, slot));
  slots_[slot].computes = true;
  return streams_.record(streams_.reduce(), computed(slot));
}

Status NcclRounds::Run::launch(const Batch& batch, uint32_t tile, uint32_t slot) {
  std::vector<CastSegment> copies;
  std::vector<ReduceSegment> reductions;
  std::vector<const void*> srcs;
  srcs.reserve(batch.steps.size() * static_cast<size_t>(batch.n_srcs));
  for (const LocalStep& step : batch.steps) {
    const uint64_t n = cut_.slice_len(plan_.part[step.dst], tile);
    if (n == 0) continue;
    std::byte* const dst = address(step.dst, tile, slot);
    const void* const* first = srcs.data() + srcs.size();
    for (const Operand o : step.srcs) srcs.push_back(address(o, tile, slot));
    if (batch.n_srcs > 1) {
      reductions.push_back({dst, first, n});
    } else if (first[0] != dst) {
      copies.push_back({dst, first[0], n});
    }
  }
  if (!copies.empty()) return cast(b_.dtype, b_.dtype, copies, 1.0f, streams_.reduce());
  if (reductions.empty()) return Status();
  return reduce(b_.dtype, b_.op, reductions, batch.n_srcs, static_cast<double>(plan_.n_ranks),
                streams_.reduce());
}

NcclRounds::NcclRounds(nccl::NcclComm& comm, DeviceStreams& streams, size_t slice_bytes)
    : comm_(comm), streams_(streams), slice_bytes_(slice_bytes) {}

Status NcclRounds::scratch_bytes(const RoundsCall& call, size_t* out) const {
  PYCOMM_RETURN_IF_ERROR(check(call));
  const Cut cut = cut_for(call, slice_bytes_);
  const Binding b = bind(call, cut);
  *out = b.in_bytes + b.out_bytes + b.window * b.tile_bytes;
  return Status();
}

Status NcclRounds::run(const RoundsCall& call, void* scratch, const nccl::Patience& patience) {
  PYCOMM_RETURN_IF_ERROR(check(call));
  const Cut cut = cut_for(call, slice_bytes_);
  PYCOMM_RETURN_IF_ERROR(check_memory(call, cut));
  const Binding b = bind(call, cut);
  return Run(*this, call, cut, b, scratch, patience).all();
}

}  // namespace pycomm::cuda
