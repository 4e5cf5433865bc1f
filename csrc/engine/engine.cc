#include "engine/engine.h"

#include <algorithm>
#include <cstring>

#include "engine/run.h"

namespace pycomm {

Engine::Engine(Group& group)
    : group_(group),
      rank_(group.rank()),
      n_(group.size()),
      posts_before_(n_),
      seen_(n_),
      srcs_(n_ + 2),
      dsts_(n_ + 2) {}

// ---- flags ---------------------------------------------------------------------------------------------

// Before the slot of position `at` is written: all peers must be done with what it held.
Status Engine::free_slot(Run& run, uint32_t at) {
  const Until until = slot_free_[slot_of(at)];
  for (int q = 0; q < n_; q++) {
    if (q == rank_ || reached(seen_[q], until.position)) continue;
    uint32_t pos = 0;
    PYCOMM_RETURN_IF_ERROR(
        run.waiting.until(group_.control(q).slots[until.slot].head.word, Half::kHigh, q, [&](uint64_t w) {
          pos = static_cast<uint32_t>(w >> 32);
          return reached(pos, until.position);
        }));
    seen_[q] = pos;
  }
  return Status();
}

// The slot of position `at` is free again once all peers have entered position `done`, or, when the call has
// no such position, the next call.
void Engine::hold_slot(uint32_t at, uint32_t done, uint32_t last_position) {
  const uint32_t until = std::min(done, last_position + 1);
  slot_free_[slot_of(at)] = Until{base_ + until, slot_of(until)};
}

void Engine::post_head(Run& run, uint32_t tile) {
  Head& h = group_.own().slots[slot_of(tile)].head;
  h.signature = run.call.sig.packed();
  h.count = run.call.sig.count;
  h.extra = run.call.sig.extra;
  h.call = call_;
  publish(h.word, static_cast<uint64_t>(base_ + tile) << 32 | run.hash, Half::kHigh, group_.own().sleepers);
}

Status Engine::await_heads(Run& run, uint32_t tile) {
  const uint32_t want = base_ + tile;
  bool agree = true;
  for (int i = 1; i < n_; i++) {
    const int q = rank_ + i < n_ ? rank_ + i : rank_ + i - n_;
    const Head& h = group_.control(q).slots[slot_of(tile)].head;
    uint64_t word = 0;
    PYCOMM_RETURN_IF_ERROR(run.waiting.until(h.word, Half::kHigh, q, [&](uint64_t w) {
      word = w;
      return reached(static_cast<uint32_t>(w >> 32), want);
    }));
    seen_[q] = static_cast<uint32_t>(word >> 32);
    agree = agree && (tile != 0 || static_cast<uint32_t>(word) == run.hash);
  }
  return agree ? Status() : check_agreement(run);
}

// Some rank's head of tile 0 differs from ours: either it refused, or valid calls differ.
Status Engine::check_agreement(Run& run) {
  const std::string here = run.waiting.here();
  for (int q = 0; q < n_; q++) {
    const Slot& s = group_.control(q).slots[slot_of(0)];
    if (q == rank_ || static_cast<CallKind>(s.head.signature & 255) != CallKind::kRefused) continue;
    const char* text = reinterpret_cast<const char*>(s.stage);
    if (text[0] == kPassedOn) return Status::error(Code::kRefused, text + 1);
    return Status::error(Code::kRefused,
                         format("%s: rank %d refused its call: %s (the communicator stays usable)",
                                here.c_str(), group_.name(q), text + 1));
  }
  std::string text = here + ": ranks made different calls:";
  for (int q = 0; q < n_; q++) {
    const Head& h = group_.control(q).slots[slot_of(0)].head;
    text += format("%s rank %d called %s", q == 0 ? "" : ";", group_.name(q),
                   Signature::unpack(h.signature, h.count, h.extra).text().c_str());
  }
  return Status::error(Code::kMismatch, text);
}

Status Engine::await_post(Run& run, uint32_t tile, const Wait& w) {
  const uint64_t want =
      posts_before_[w.peer] + static_cast<uint64_t>(tile) * run.plan->n_posts[w.peer] + w.post;
  return run.waiting.until(group_.control(w.peer).progress.word, Half::kLow, w.peer,
                           [want](uint64_t v) { return v >= want; });
}

void Engine::post_progress() {
  publish(group_.own().progress.word, ++progress_, Half::kLow, group_.own().sleepers);
}

// ---- a tile --------------------------------------------------------------------------------------------

Status Engine::stage_tile(Run& run, uint32_t tile) {
  const uint32_t at = run.first_tile + tile;
  PYCOMM_RETURN_IF_ERROR(free_slot(run, at));
  Slot& slot = group_.own().slots[slot_of(at)];
  hold_slot(at, at + 1 + run.plan->n_stages, run.last_position);
  for (const ChunkPlace& c : run.plan->own.chunks) {
    if (!c.is_in || c.exposed < 0) continue;
    uint64_t n = run.slice_len(c.part, tile);
    std::byte* dst =
        run.tiny ? reinterpret_cast<std::byte*>(slot.head.tiny) : slot.stage + c.exposed * run.stride_bytes;
    uint64_t from = run.parts.start(c.part) - run.in_origin + tile * run.slice;
    while (n > 0) {
      uint64_t have;
      const std::byte* src = run.call.in.locate(from, run.elem_size, &have);
      have = std::min(have, n);
      std::memcpy(dst, src, have * run.elem_size);
      dst += have * run.elem_size;
      from += have;
      n -= have;
    }
  }
  post_head(run, at);
  return Status();
}

Status Engine::run_instrs(Run& run, uint32_t tile, uint32_t first, uint32_t last) {
  for (uint32_t i = first; i < last; i++) {
    const Instr& instr = run.plan->own.instrs[i];
    run.waiting.progress.round = instr.round;
    for (const Wait& w : instr.waits) PYCOMM_RETURN_IF_ERROR(await_post(run, tile, w));
    run_instr(run, tile, instr);
    if (instr.post) post_progress();
  }
  return Status();
}

// A value may have to be read from, or written to, tensors in several pieces: each loop turn does what is
// contiguous everywhere.
void Engine::run_instr(Run& run, uint32_t tile, const Instr& instr) {
  const Plan& plan = *run.plan;
  const uint32_t part = plan.chunks[instr.dsts[0].rank][instr.dsts[0].chunk].part;
  const size_t size = run.elem_size;
  const uint64_t len = run.slice_len(part, tile);
  const uint64_t vector_at = run.parts.start(part) + tile * run.slice;
  const uint32_t slot = slot_of(run.first_tile + tile);
  const bool direct = plan.mode != PlanMode::kTiled;
  const bool complete = instr.complete && plan.fused_scale && run.complete != nullptr;
  for (uint64_t done = 0; done < len;) {
    uint64_t n = len - done;
    const auto user = [&](const Buffer& b, uint64_t origin) {
      uint64_t have;
      std::byte* p = b.locate(vector_at - origin + done, size, &have);
      n = std::min(n, have);
      return p;
    };
    const auto place = [&](Ref x, bool prefer_slot) -> std::byte* {
      const ChunkPlace& c = plan.chunks[x.rank][x.chunk];
      if (direct && (c.is_in || c.is_out)) {
        const VectorAddress& a = run.addresses[x.rank];
        return (c.is_in ? a.in : a.out) + (vector_at + done) * size;
      }
      const bool own = x.rank == rank_;
      if (c.exposed >= 0 && (!own || !c.is_in || prefer_slot)) {
        Slot& s = group_.control(x.rank).slots[slot];
        if (run.tiny && c.is_in) return reinterpret_cast<std::byte*>(s.head.tiny) + done * size;
        return s.stage + c.exposed * run.stride_bytes + done * size;
      }
      if (c.is_in) return user(run.call.in, run.in_origin);
      if (c.is_out) return user(run.call.out, run.out_origin);
      // Two tiles may be under way, one in each stage of the plan.
      const uint64_t at = (tile % 2) * plan.own.n_private + static_cast<uint64_t>(c.scratch);
      return scratch_.data() + at * run.stride_bytes + done * size;
    };
    int n_srcs = 0, n_dsts = 0;
    for (Ref x : instr.srcs) srcs_[n_srcs++] = place(x, instr.own_input_from_slot);
    for (Ref x : instr.dsts) dsts_[n_dsts++] = place(x, true);
    const ChunkPlace& d = plan.chunks[rank_][instr.dsts[0].chunk];
    if (!direct && d.is_out && d.exposed >= 0 && instr.last_write)
      dsts_[n_dsts++] = user(run.call.out, run.out_origin);
    if (n_srcs == 1) {
      for (int i = 0; i < n_dsts; i++) {
        if (dsts_[i] != srcs_[0]) std::memcpy(dsts_[i], srcs_[0], n * size);
      }
    } else {
      (complete ? run.complete : run.reduce)(dsts_.data(), n_dsts, srcs_.data(), n_srcs, n,
                                             static_cast<double>(n_));
    }
    done += n;
  }
}

// avg over an algorithm that never sees all operands at once: divide the finished sums.
void Engine::scale_outputs(Run& run, uint32_t tile) {
  for (const ChunkPlace& c : run.plan->own.chunks) {
    if (!c.is_out) continue;
    uint64_t n = run.slice_len(c.part, tile);
    uint64_t at = run.parts.start(c.part) - run.out_origin + tile * run.slice;
    while (n > 0) {
      uint64_t have;
      void* p = run.call.out.locate(at, run.elem_size, &have);
      have = std::min(have, n);
      const void* src = p;
      run.complete(&p, 1, &src, 1, have, static_cast<double>(n_));
      at += have;
      n -= have;
    }
  }
}

}  // namespace pycomm
