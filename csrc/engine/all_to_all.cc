// all_to_all and all_to_allv, straight on the slots: there is nothing to schedule.
//
// Every rank stages slice t of its block for each peer in the peer's place of the slot, and reads its own
// place in every peer's slot. Blocks may differ in size: the address head carries the largest block that a
// rank sends or receives, so all ranks agree on the number of tiles, and the exact counts of a pair are
// compared through the staged table of the first tile.
#include <cstring>

#include "engine/run.h"

namespace pycomm {

namespace {
void gather_from(const Buffer& b, uint64_t at, uint64_t n, size_t size, std::byte* dst) {
  while (n > 0) {
    uint64_t have;
    const std::byte* p = b.locate(at, size, &have);
    have = std::min(have, n);
    std::memcpy(dst, p, have * size);
    dst += have * size;
    at += have;
    n -= have;
  }
}
void scatter_to(const Buffer& b, uint64_t at, uint64_t n, size_t size, const std::byte* src) {
  while (n > 0) {
    uint64_t have;
    std::byte* p = b.locate(at, size, &have);
    have = std::min(have, n);
    std::memcpy(p, src, have * size);
    src += have * size;
    at += have;
    n -= have;
  }
}
std::vector<uint64_t> prefix(std::span<const uint64_t> counts) {
  std::vector<uint64_t> at(1, 0);
  for (uint64_t c : counts) at.push_back(at.back() + c);
  return at;
}
}  // namespace

Status Engine::run_all_to_all(Run& run) {
  const Call& call = run.call;
  const size_t size = run.elem_size;
  const std::vector<uint64_t> send_at = prefix(call.send_counts), recv_at = prefix(call.recv_counts);
  uint64_t largest = 0;
  for (int q = 0; q < n_; q++) largest = std::max({largest, call.send_counts[q], call.recv_counts[q]});
  // Position 0: sizes. The table of send counts lies in the stage, so that each pair can be checked.
  PYCOMM_RETURN_IF_ERROR(free_slot(run, 0));
  Slot& first = group_.own().slots[slot_of(0)];
  first.head.address.detail = largest;
  std::memcpy(first.stage, call.send_counts.data(), call.send_counts.size_bytes());
  hold_slot(0, 1, 0);  // should the call end here, refused; how far it goes is known only below
  post_head(run, 0);
  PYCOMM_RETURN_IF_ERROR(await_heads(run, 0));
  for (int q = 0; q < n_; q++) {
    const Slot& s = group_.control(q).slots[slot_of(0)];
    largest = std::max(largest, s.head.address.detail);
    uint64_t sends;
    std::memcpy(&sends, s.stage + rank_ * sizeof sends, sizeof sends);
    if (sends == call.recv_counts[q]) continue;
    return Status::error(Code::kMismatch,
                         format("all_to_all #%u: rank %d sends %llu elements to rank %d, which expects %llu",
                                call_, group_.name(q), static_cast<unsigned long long>(sends),
                                group_.name(rank_), static_cast<unsigned long long>(call.recv_counts[q])));
  }

  const uint64_t slice = std::max<uint64_t>(1, kStageBytes / static_cast<uint64_t>(n_) / 64 * 64 / size);
  const uint64_t stride = slice * size;
  const uint64_t n_tiles = (largest + slice - 1) / slice;
  const auto last = static_cast<uint32_t>(n_tiles);
  run.last_position = last;
  hold_slot(0, 1, last);
  const auto part = [&](uint64_t count, uint64_t tile) {
    return count <= tile * slice ? 0 : std::min(slice, count - tile * slice);
  };
  // In place would overwrite what is still to be sent: the binding gives us distinct tensors.
  for (uint32_t i = 0; i < last + 1; i++) {
    if (i < last) {
      const uint32_t at = i + 1;
      PYCOMM_RETURN_IF_ERROR(free_slot(run, at));
      hold_slot(at, at + 2, last);
      std::byte* stage = group_.own().slots[slot_of(at)].stage;
      for (int q = 0; q < n_; q++) {
        if (q != rank_)
          gather_from(call.in, send_at[q] + i * slice, part(call.send_counts[q], i), size,
                      stage + q * stride);
      }
      post_head(run, at);
    }
    if (i == 0) continue;
    const uint32_t t = i - 1;
    PYCOMM_RETURN_IF_ERROR(await_heads(run, t + 1));
    for (int k = 1; k < n_; k++) {
      const int q = (rank_ + k) % n_;
      const std::byte* stage = group_.control(q).slots[slot_of(t + 1)].stage;
      scatter_to(call.out, recv_at[q] + t * slice, part(call.recv_counts[q], t), size,
                 stage + rank_ * stride);
    }
  }
  uint64_t done = 0;
  while (done < call.send_counts[rank_]) {
    uint64_t have;
    const std::byte* p = call.in.locate(send_at[rank_] + done, size, &have);
    have = std::min(have, call.send_counts[rank_] - done);
    scatter_to(call.out, recv_at[rank_] + done, have, size, p);
    done += have;
  }
  return Status();
}

}  // namespace pycomm
