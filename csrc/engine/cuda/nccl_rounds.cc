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
    if (call.codes.has_value()) codes_ = BlockCodes{*call.codes};
  }

  Status all() {
    PYCOMM_RETURN_IF_ERROR(streams_.order(streams_.comm(), streams_.reduce(), kBetween));
    PYCOMM_RETURN_IF_ERROR(begin());
    for (uint32_t first = 0; first < cut_.n_tiles(); first += b_.window) {
      const uint32_t n = std::min(b_.window, cut_.n_tiles() - first);
      for (const PlanRound& round : plan_.rounds) {
        for (uint32_t t = 0; t < n; t++) {
          PYCOMM_RETURN_IF_ERROR(encode(round, first + t, t));
          PYCOMM_RETURN_IF_ERROR(transfer(round, first + t, t));
          PYCOMM_RETURN_IF_ERROR(decode(round, first + t, t));
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

  // With codes: where the message of a send, or of a receive, lies. A chunk that goes to several peers has
  // one.
  std::byte* message(size_t number, uint32_t slot) const {
    const size_t before = (plan_.n_scratch + plan_.n_staging) * aligned(cut_.slice() * size_);
    return tiles_ + slot * b_.tile_bytes + before + number * b_.message_bytes;
  }
  static size_t first_of(const PlanRound& round, uint32_t chunk) {
    size_t i = 0;
    while (round.sends[i].chunk != chunk) i++;
    return i;
  }
  const void* outgoing(const PlanRound& round, size_t i, uint32_t tile, uint32_t slot) const {
    const uint32_t chunk = round.sends[i].chunk;
    return codes_ ? message(first_of(round, chunk), slot) : address(chunk, tile, slot);
  }
  void* incoming(const PlanRound& round, size_t i, uint32_t tile, uint32_t slot) const {
    return codes_ ? message(b_.n_outgoing + i, slot) : address(round.recvs[i].place, tile, slot);
  }
  size_t bytes_of(uint32_t part, uint32_t tile) const {
    const uint64_t n = cut_.slice_len(part, tile);
    return codes_ && n > 0 ? codes_->message_bytes(n) : n * size_;
  }

  Status begin();
  Status end();
  Status encode(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status decode(const PlanRound& round, uint32_t tile, uint32_t slot);
  Status local_work(uint32_t slot);
  Status transfer(const PlanRound& round, uint32_t tile, uint32_t slot);
  void note_exchanges(const PlanRound& round, uint32_t tile);
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
  std::optional<BlockCodes> codes_;
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

// With codes: the messages of all chunks that leave in the round. Inputs stay as they are; of a result the
// owner keeps what it sends.
Status NcclRounds::Run::encode(const PlanRound& round, uint32_t tile, uint32_t slot) {
  if (!codes_ || round.sends.empty()) return Status();
  PYCOMM_RETURN_IF_ERROR(local_work(slot));
  for (size_t i = 0; i < round.sends.size(); i++) {
    const uint32_t chunk = round.sends[i].chunk, part = plan_.part[chunk];
    const uint64_t n = cut_.slice_len(part, tile);
    if (n == 0 || first_of(round, chunk) != i) continue;
    float* residual = call_.residual;
    if (residual != nullptr) residual += cut_.start(part) + cut_.slice() * tile;
    PYCOMM_RETURN_IF_ERROR(codes_->encode(message(i, slot),
                                          reinterpret_cast<float*>(address(chunk, tile, slot)), n, residual,
                                          chunk >= plan_.n_in, streams_.reduce()));
  }
  slots_[slot].computes = true;
  return streams_.record(streams_.reduce(), computed(slot));
}

Status NcclRounds::Run::decode(const PlanRound& round, uint32_t tile, uint32_t slot) {
  if (!codes_ || round.recvs.empty()) return Status();
  PYCOMM_RETURN_IF_ERROR(local_work(slot));
  for (size_t i = 0; i < round.recvs.size(); i++) {
    const uint64_t n = cut_.slice_len(round.recvs[i].part, tile);
    if (n == 0) continue;
    float* const to = reinterpret_cast<float*>(address(round.recvs[i].place, tile, slot));
    PYCOMM_RETURN_IF_ERROR(codes_->decode(to, message(b_.n_outgoing + i, slot), n, streams_.reduce()));
  }
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

  const nccl::Api& api = comm_.api();
  const Stream stream = streams_.comm();
  PYCOMM_RETURN_IF_ERROR(comm_.start_group());
  for (size_t i = 0; i < round.sends.size(); i++) {
    const size_t n = bytes_of(plan_.part[round.sends[i].chunk], tile);
    if (n == 0) continue;
    const void* const from = outgoing(round, i, tile, slot);
    PYCOMM_RETURN_IF_ERROR(comm_.in_group(
        api.send(from, n, nccl::kUInt8, round.sends[i].peer, comm_.raw(), stream), "ncclSend"));
  }
  for (size_t i = 0; i < round.recvs.size(); i++) {
    const size_t n = bytes_of(round.recvs[i].part, tile);
    if (n == 0) continue;
    void* const to = incoming(round, i, tile, slot);
    PYCOMM_RETURN_IF_ERROR(
        comm_.in_group(api.recv(to, n, nccl::kUInt8, round.recvs[i].peer, comm_.raw(), stream), "ncclRecv"));
  }
  PYCOMM_RETURN_IF_ERROR(comm_.end_group(patience_));
  note_exchanges(round, tile);
  slots_[slot].travels = true;
  return streams_.record(stream, travelled(slot));
}

void NcclRounds::Run::note_exchanges(const PlanRound& round, uint32_t tile) {
  if (tile > 0) return;  // the first has every peer that the others have
  for (const Outgoing& s : round.sends) {
    if (bytes_of(plan_.part[s.chunk], tile) > 0) comm_.note_exchange(s.peer, true);
  }
  for (const Landing& r : round.recvs) {
    if (bytes_of(r.part, tile) > 0) comm_.note_exchange(r.peer, false);
  }
}

// The round's reductions and copies, after the tile's transfers so far.
Status NcclRounds::Run::compute(const PlanRound& round, uint32_t tile, uint32_t slot) {
  if (round.batches.empty()) return Status();
  PYCOMM_RETURN_IF_ERROR(local_work(slot));
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
  const auto check = [&](int peer, bool sent) {
    if (comm_.has_exchanged(peer, sent)) return Status();
    return Status::error(
        Code::kValue,
        format("%s/%s over NCCL cannot be captured: rank %d has not %s rank %d yet, and NCCL connects at the "
               "first message; make the same call once before the capture, on all ranks",
               collective_name(plan.collective), plan.algorithm, comm_.rank(),
               sent ? "sent to" : "received from", peer));
  };
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
