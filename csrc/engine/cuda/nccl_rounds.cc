#include "engine/cuda/nccl_rounds.h"

#include <algorithm>

#include "engine/cuda/rounds_binding.h"

namespace pycomm::cuda {

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
      for (size_t r = 0; r < plan_.rounds.size(); r++) {
        const PlanRound& round = plan_.rounds[r];
        for (uint32_t t = 0; t < n; t++) {
          PYCOMM_RETURN_IF_ERROR(encode(round, first + t, t));
          PYCOMM_RETURN_IF_ERROR(transfer(round, first + t, t));
          PYCOMM_RETURN_IF_ERROR(decode(round, first + t, t));
          PYCOMM_RETURN_IF_ERROR(compute(r, first + t, t));
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

  float* floats(Operand o, uint32_t tile, uint32_t slot) const {
    return reinterpret_cast<float*>(address(o, tile, slot));
  }

  // With codes: where the messages of a round's sends lie, and then those of its receives. A chunk that goes
  // to several peers has one.
  std::byte* message(size_t number, uint32_t slot) const {
    return tiles_ + slot * b_.tile_bytes + b_.messages_begin + number * b_.message_bytes;
  }
  std::byte* landed(size_t recv, uint32_t slot) const { return message(b_.n_outgoing + recv, slot); }
  // Numbers of sends and receives; as many as there are when there is none.
  static size_t first_of(const PlanRound& round, uint32_t chunk) {
    size_t i = 0;
    while (i < round.sends.size() && round.sends[i].chunk != chunk) i++;
    return i;
  }
  static size_t recv_to(const PlanRound& round, Operand place) {
    size_t i = 0;
    while (i < round.recvs.size() && !(round.recvs[i].place == place)) i++;
    return i;
  }
  float* residual(uint32_t part, uint32_t tile) const {
    return call_.residual == nullptr ? nullptr : call_.residual + cut_.start(part) + cut_.slice() * tile;
  }
  const void* outgoing(const PlanRound& round, size_t i, uint32_t tile, uint32_t slot) const {
    const uint32_t chunk = round.sends[i].chunk;
    return call_.codes ? message(first_of(round, chunk), slot) : address(chunk, tile, slot);
  }
  void* incoming(const PlanRound& round, size_t i, uint32_t tile, uint32_t slot) const {
    return call_.codes ? landed(i, slot) : address(round.recvs[i].place, tile, slot);
  }
  size_t bytes_of(uint32_t part, uint32_t tile) const {
    const uint64_t n = cut_.slice_len(part, tile);
    return call_.codes ? coded_bytes(*call_.codes, n) : n * size_;
  }

  Status begin();
  Status end();
  Status encode(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status decode(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status code_work(const std::vector<CodedSegment>& segments, int plain, uint32_t slot);
  Status local_work(uint32_t slot);
  Status transfer(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status compute(size_t number, uint32_t tile, uint32_t slot);
  Status launch(const Batch& batch, uint32_t tile, uint32_t slot);
  Status combine_codes(size_t number, const Batch& batch, uint32_t tile, uint32_t slot);

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

// Lets the reduce stream go on with this tile: after its transfers so far.
Status NcclRounds::Run::local_work(uint32_t slot) {
  if (slots_[slot].travels) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.reduce(), travelled(slot)));
  slots_[slot].travels = false;
  return Status();
}

// With codes: the messages of what leaves in the round. Inputs stay as they are; results are encoded where
// they are made (combine_codes), or here, and then what the messages say is kept.
Status NcclRounds::Run::encode(const PlanRound& round, uint32_t tile, uint32_t slot) {
  if (!call_.codes) return Status();
  std::vector<CodedSegment> segments;
  std::vector<const void*> srcs;
  srcs.reserve(round.sends.size());
  for (size_t i = 0; i < round.sends.size(); i++) {
    const uint32_t chunk = round.sends[i].chunk, part = plan_.part[chunk];
    const uint64_t n = cut_.slice_len(part, tile);
    const bool is_result = chunk >= plan_.n_in;
    if ((is_result && b_.in_one_pass) || n == 0 || first_of(round, chunk) != i) continue;
    float* const values = floats({false, chunk}, tile, slot);
    srcs.push_back(values);
    segments.push_back(
        {is_result ? values : nullptr, message(i, slot), residual(part, tile), &srcs.back(), n});
  }
  return code_work(segments, 0, slot);
}

// With codes: what landed, but for what is combined.
Status NcclRounds::Run::decode(const PlanRound& round, uint32_t tile, uint32_t slot) {
  if (!call_.codes) return Status();
  const auto is_combined = [&](Operand place) {
    if (!b_.in_one_pass) return false;
    for (const Batch& batch : round.batches) {
      if (batch.n_srcs == 1) continue;
      for (const LocalStep& step : batch.steps) {
        if (std::find(step.srcs.begin(), step.srcs.end(), place) != step.srcs.end()) return true;
      }
    }
    return false;
  };
  std::vector<CodedSegment> segments;
  std::vector<const void*> srcs;
  srcs.reserve(round.recvs.size());
  for (size_t i = 0; i < round.recvs.size(); i++) {
    const Landing& r = round.recvs[i];
    const uint64_t n = cut_.slice_len(r.part, tile);
    if (n == 0 || is_combined(r.place)) continue;
    srcs.push_back(landed(i, slot));
    segments.push_back({floats(r.place, tile, slot), nullptr, nullptr, &srcs.back(), n});
  }
  return code_work(segments, -1, slot);
}

// Encodes or decodes segments of one source.
Status NcclRounds::Run::code_work(const std::vector<CodedSegment>& segments, int plain, uint32_t slot) {
  if (segments.empty()) return Status();
  PYCOMM_RETURN_IF_ERROR(local_work(slot));
  PYCOMM_RETURN_IF_ERROR(
      reduce_coded(*call_.codes, ReduceOp::kSum, segments, 1, plain, 1.0, streams_.reduce()));
  slots_[slot].computes = true;
  return streams_.record(streams_.reduce(), computed(slot));
}

// The round's group, after the tile's local work of the rounds before. Empty slices do not travel.
Status NcclRounds::Run::transfer(const PlanRound& round, uint32_t tile, uint32_t slot) {
  bool any = false;
  for (const Outgoing& s : round.sends) any |= bytes_of(plan_.part[s.chunk], tile) > 0;
  for (const Landing& r : round.recvs) any |= bytes_of(r.part, tile) > 0;
  if (!any) return Status();
  if (slots_[slot].computes) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.comm(), computed(slot)));
  slots_[slot].computes = false;

  const Stream stream = streams_.comm();
  PYCOMM_RETURN_IF_ERROR(comm_.start_group());
  for (size_t i = 0; i < round.sends.size(); i++) {
    const Outgoing& s = round.sends[i];
    const size_t n = bytes_of(plan_.part[s.chunk], tile);
    PYCOMM_RETURN_IF_ERROR(comm_.send(outgoing(round, i, tile, slot), n, s.peer, stream));
  }
  for (size_t i = 0; i < round.recvs.size(); i++) {
    const Landing& r = round.recvs[i];
    PYCOMM_RETURN_IF_ERROR(
        comm_.recv(incoming(round, i, tile, slot), bytes_of(r.part, tile), r.peer, stream));
  }
  PYCOMM_RETURN_IF_ERROR(comm_.end_group(patience_));
  slots_[slot].travels = true;
  return streams_.record(stream, travelled(slot));
}

// The round's reductions and copies, after the tile's transfers so far.
Status NcclRounds::Run::compute(size_t number, uint32_t tile, uint32_t slot) {
  const PlanRound& round = plan_.rounds[number];
  if (round.batches.empty()) return Status();
  PYCOMM_RETURN_IF_ERROR(local_work(slot));
  for (const Batch& batch : round.batches) {
    const bool coded = b_.in_one_pass && batch.n_srcs > 1;
    PYCOMM_RETURN_IF_ERROR(coded ? combine_codes(number, batch, tile, slot) : launch(batch, tile, slot));
  }
  slots_[slot].computes = true;
  return streams_.record(streams_.reduce(), computed(slot));
}

Status NcclRounds::Run::launch(const Batch& batch, uint32_t tile, uint32_t slot) {
  std::vector<CastSegment> copies;
  std::vector<ReduceSegment> reductions;
  std::vector<const void*> srcs;
  srcs.reserve(batch.steps.size() * static_cast<size_t>(batch.n_srcs));
  for (const LocalStep& step : batch.steps) {
    const uint64_t n = cut_.slice_len(step.part, tile);
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

// Every source but this rank's own is a message (the plan is complete: source q is rank q's). A result that
// leaves in the next round is encoded at once, and what its message says is kept.
Status NcclRounds::Run::combine_codes(size_t number, const Batch& batch, uint32_t tile, uint32_t slot) {
  const PlanRound& round = plan_.rounds[number];
  std::vector<CodedSegment> segments;
  std::vector<const void*> srcs;
  srcs.reserve(batch.steps.size() * static_cast<size_t>(batch.n_srcs));
  for (const LocalStep& step : batch.steps) {
    const uint64_t n = cut_.slice_len(step.part, tile);
    if (n == 0) continue;
    CodedSegment s{floats(step.dst, tile, slot), nullptr, nullptr, srcs.data() + srcs.size(), n};
    for (const Operand o : step.srcs) {
      const size_t i = recv_to(round, o);
      srcs.push_back(i < round.recvs.size() ? landed(i, slot) : address(o, tile, slot));
    }
    const bool is_last = number + 1 == plan_.rounds.size();
    const size_t send = is_last ? 0 : first_of(plan_.rounds[number + 1], step.dst.at);
    if (!is_last && send < plan_.rounds[number + 1].sends.size()) {
      s.message = message(send, slot);
      s.residual = residual(step.part, tile);
    }
    segments.push_back(s);
  }
  return reduce_coded(*call_.codes, b_.op, segments, batch.n_srcs, plan_.rank,
                      static_cast<double>(plan_.n_ranks), streams_.reduce());
}

NcclRounds::NcclRounds(nccl::NcclComm& comm, DeviceStreams& streams, size_t slice_bytes)
    : comm_(comm), streams_(streams), slice_bytes_(slice_bytes) {}

Status NcclRounds::scratch_bytes(const RoundsCall& call, size_t* out) const {
  PYCOMM_RETURN_IF_ERROR(check_rounds(call));
  const Cut cut = cut_for(call, slice_bytes_);
  const Binding b = bind_rounds(call, cut);
  *out = b.in_bytes + b.out_bytes + b.window * b.tile_bytes;
  return Status();
}

Status NcclRounds::check_connections(const RoundsCall& call, const Cut& cut) const {
  const RoundPlan& plan = *call.plan;
  const auto check = [&, what = format("%s/%s", collective_name(plan.collective), plan.algorithm)](
                         int peer, bool sent) { return comm_.check_exchange(what, peer, sent); };
  for (const PlanRound& round : plan.rounds) {
    for (const Outgoing& s : round.sends) {
      if (cut.len(plan.part[s.chunk]) > 0) PYCOMM_RETURN_IF_ERROR(check(s.peer, true));
    }
    for (const Landing& r : round.recvs) {
      if (cut.len(r.part) > 0) PYCOMM_RETURN_IF_ERROR(check(r.peer, false));
    }
  }
  return Status();
}

Status NcclRounds::can_be_captured(const RoundsCall& call) const {
  return check_connections(call, cut_for(call, slice_bytes_));
}

Status NcclRounds::run(const RoundsCall& call, void* scratch, const nccl::Patience& patience) {
  PYCOMM_RETURN_IF_ERROR(check_rounds(call));
  const Cut cut = cut_for(call, slice_bytes_);
  PYCOMM_RETURN_IF_ERROR(check_memory(call, cut));
  bool captured = false;
  PYCOMM_RETURN_IF_ERROR(capture_state(streams_.comm(), collective_name(call.plan->collective), &captured));
  if (captured) PYCOMM_RETURN_IF_ERROR(check_connections(call, cut));
  const Binding b = bind_rounds(call, cut);
  return Run(*this, call, cut, b, scratch, patience).all();
}

}  // namespace pycomm::cuda
