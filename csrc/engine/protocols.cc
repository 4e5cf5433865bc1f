// How a call is carried: eager, tiled or direct (engine/engine.h), and the two calls that need no plan.
#include <cstring>

#include "engine/run.h"

namespace pycomm {

namespace {
// What a refused call counts for on every rank: more than the tiles that a rank may have staged before it
// learns of the refusal, so that their heads are not taken for the next call's; and its head is not where the
// refused one was, which a late peer still has to read.
constexpr uint32_t kRefusedPositions = kSlots + 1;

uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
}  // namespace

Status Engine::run_tiles(Run& run) {
  const Plan& plan = *run.plan;
  const size_t n_scratch = 2 * plan.own.n_private * run.stride_bytes;
  if (scratch_.size() < n_scratch) scratch_.resize(n_scratch);
  const uint32_t lag_b = plan.n_stages == 2 ? 2 : 1;
  const bool scale = run.complete != nullptr && !plan.fused_scale;
  const auto n_instrs = static_cast<uint32_t>(plan.own.instrs.size());
  for (uint32_t i = 0; i < run.n_tiles + lag_b; i++) {
    if (i < run.n_tiles) PYCOMM_RETURN_IF_ERROR(stage_tile(run, i));
    if (i >= 1 && i - 1 < run.n_tiles) {
      const uint32_t t = i - 1;
      run.waiting.progress.n_bytes = run.done_bytes(t);
      if (t == 0 && run.first_tile > 0) PYCOMM_RETURN_IF_ERROR(await_heads(run, 0));
      PYCOMM_RETURN_IF_ERROR(await_heads(run, run.first_tile + t));
      PYCOMM_RETURN_IF_ERROR(run_instrs(run, t, 0, plan.second_stage));
    }
    if (i >= lag_b && i - lag_b < run.n_tiles) {
      if (lag_b == 2) PYCOMM_RETURN_IF_ERROR(run_instrs(run, i - 2, plan.second_stage, n_instrs));
      if (scale) scale_outputs(run, i - lag_b);
    }
  }
  for (int q = 0; q < n_; q++) posts_before_[q] += static_cast<uint64_t>(run.n_tiles) * plan.n_posts[q];
  return Status();
}

// The whole of a small one-shot call in one place: run_tiles would do the same steps, at twice the cost.
Status Engine::run_eager_one_shot(Run& run) {
  const Call& call = run.call;
  const size_t n_bytes = call.sig.count * run.elem_size;
  PYCOMM_RETURN_IF_ERROR(free_slot(run, 0));
  hold_slot(0, 2, 0);
  const uint32_t at = slot_of(0);
  const bool tiny = n_bytes <= kTinyBytes;
  const auto data = [&](int q) {
    Slot& s = group_.control(q).slots[at];
    return tiny ? reinterpret_cast<std::byte*>(s.head.tiny) : s.stage;
  };
  if (n_bytes > 0) std::memcpy(data(rank_), call.in.data(), n_bytes);
  post_head(run, 0);
  PYCOMM_RETURN_IF_ERROR(await_heads(run, 0));
  for (int q = 0; q < n_; q++) srcs_[q] = data(q);
  dsts_[0] = call.out.data();
  const ReduceFn fn = run.complete != nullptr ? run.complete : run.reduce;
  fn(dsts_.data(), 1, srcs_.data(), n_, call.sig.count, static_cast<double>(n_));
  return Status();
}

Status Engine::run_direct(Run& run) {
  const Plan& plan = *run.plan;
  run.slice = std::max<uint64_t>(run.parts.max_len, 1);
  run.stride_bytes = round_up(run.slice * run.elem_size, 64);
  const size_t n_scratch = 2 * plan.own.n_private * run.stride_bytes;
  if (scratch_.size() < n_scratch) scratch_.resize(n_scratch);
  PYCOMM_RETURN_IF_ERROR(run_instrs(run, 0, 0, static_cast<uint32_t>(plan.own.instrs.size())));
  for (const Wait& w : plan.own.exit_waits) PYCOMM_RETURN_IF_ERROR(await_post(run, 0, w));
  if (run.complete != nullptr && !plan.fused_scale) scale_outputs(run, 0);
  for (int q = 0; q < n_; q++) posts_before_[q] += plan.n_posts[q];
  return Status();
}

Status Engine::plan_for(const Call& call, uint8_t algorithm, PlanMode mode, const Plan** out) {
  const PlanKey key{algorithm, call.sig.root, static_cast<int>(mode)};
  // The same call as last time is the rule, and small calls feel the look-up.
  if (key == last_key_) [[likely]] {
    *out = last_plan_;
    return Status();
  }
  auto& slot = plans_[key];
  if (slot == nullptr) {
    PYCOMM_RETURN_IF_ERROR(make_plan(catalog()[algorithm], rank_, n_, call.sig.root, 0, mode, &slot));
  }
  last_key_ = key;
  *out = last_plan_ = slot.get();
  return Status();
}

// Opens a call above kEagerBytes: publishes where the tensors lie. A rank whose tensors are private knows at
// once that the call is tiled; the others look at all heads, and all conclude alike.
Status Engine::offer_direct(Run& run, bool* direct) {
  const Call& call = run.call;
  const Algorithm& algorithm = catalog()[call.direct_algorithm];
  const Arena& arena = *group_.node()->arena();
  bool has_in = false, has_out = false;
  for (const ChunkPlace& c : run.plan->own.chunks) {
    has_in = has_in || c.is_in;
    has_out = has_out || c.is_out;
  }
  const auto offset = [&](bool needed, const Buffer& b, uint64_t origin) {
    if (!needed) return uint64_t{0};
    if (!b.single() || b.data() == nullptr || !arena.owns(b.data())) return kNoAddress;
    return arena.offset_of(b.data()) - origin * run.elem_size;  // wraps; only sums are used
  };
  const uint32_t slot = slot_of(0);
  PYCOMM_RETURN_IF_ERROR(free_slot(run, 0));
  hold_slot(0, 3, run.last_position);
  auto& mine = group_.own().slots[slot].head.address;
  mine.in = offset(has_in, call.in, run.in_origin);
  mine.out = offset(has_out, call.out, run.out_origin);
  const bool same = has_in && has_out && mine.in == mine.out;
  mine.detail = static_cast<uint64_t>(!has_in || !has_out ? InPlace::kEither
                                      : same              ? InPlace::kYes
                                                          : InPlace::kNo);
  const bool offered = mine.in != kNoAddress && mine.out != kNoAddress;
  post_head(run, 0);
  *direct = false;
  if (!offered) return Status();
  PYCOMM_RETURN_IF_ERROR(await_heads(run, 0));
  bool some_in_place = false, some_not = false;
  run.addresses.resize(n_);
  for (int q = 0; q < n_; q++) {
    const auto& a = group_.control(q).slots[slot].head.address;
    if (a.in == kNoAddress || a.out == kNoAddress) return Status();
    some_in_place = some_in_place || a.detail == static_cast<uint64_t>(InPlace::kYes);
    some_not = some_not || a.detail == static_cast<uint64_t>(InPlace::kNo);
    run.addresses[q] = {group_.arena_base(q) + a.in, group_.arena_base(q) + a.out};
  }
  if ((some_in_place && some_not) || (some_in_place && !algorithm.in_place)) return Status();
  const Plan* plan = nullptr;
  PYCOMM_RETURN_IF_ERROR(plan_for(call, call.direct_algorithm,
                                  some_in_place ? PlanMode::kDirectInPlace : PlanMode::kDirect, &plan));
  if (!plan->direct_ok) return Status();
  run.last_position = 0;
  hold_slot(0, 1, 0);
  run.plan = plan;
  run.parts = Partition(call.sig.count, plan->n_parts, run.elem_size, call.counts);
  *direct = true;
  return Status();
}

Status Engine::reduces_at_once(const Call& call, bool* out) {
  const Plan* plan = nullptr;
  PYCOMM_RETURN_IF_ERROR(plan_for(call, call.sig.algorithm, PlanMode::kTiled, &plan));
  *out = plan->fused_scale;
  return Status();
}

Status Engine::run_collective(Run& run) {
  const Call& call = run.call;
  const Plan& plan = *run.plan;
  const ReduceOp op = call.sig.op == ReduceOp::kPremulSum ? ReduceOp::kSum : call.sig.op;
  if (call.sig.kind == CallKind::kAllReduce || call.sig.kind == CallKind::kReduce ||
      call.sig.kind == CallKind::kReduceScatter) {
    run.reduce = find_reduce(call.dtype(), op == ReduceOp::kAvg ? ReduceOp::kSum : op);
    if (op == ReduceOp::kAvg && n_ > 1) run.complete = find_reduce(call.dtype(), ReduceOp::kAvg);
  }
  if (plan.one_shot && call.sig.count * run.elem_size <= kEagerBytes && call.in.single() &&
      call.out.single()) {
    return run_eager_one_shot(run);
  }
  // A tensor that holds only part of the vector begins at its own part.
  const auto origin = [&](bool in) {
    uint64_t at = call.sig.count;
    for (const ChunkPlace& c : plan.own.chunks) {
      if (in ? c.is_in : c.is_out) at = std::min(at, run.parts.start(c.part));
    }
    return at;
  };
  run.in_origin = origin(true);
  run.out_origin = origin(false);

  const uint64_t room = std::min(call.tile_bytes, kStageBytes) / plan.max_exposed / 64 * 64 / run.elem_size;
  run.slice = std::max<uint64_t>(1, std::min<uint64_t>(run.parts.max_len, std::max<uint64_t>(room, 1)));
  const uint64_t n_tiles = std::max<uint64_t>(1, (run.parts.max_len + run.slice - 1) / run.slice);
  const bool eager = n_tiles == 1 && call.sig.count * run.elem_size <= kEagerBytes;
  run.n_tiles = static_cast<uint32_t>(n_tiles);
  run.stride_bytes = round_up(run.slice * run.elem_size, 64);
  run.tiny = eager && plan.max_exposed == 1 && run.slice * run.elem_size <= kTinyBytes;
  run.first_tile = eager ? 0 : 1;
  run.last_position = run.first_tile + run.n_tiles - 1;
  run.waiting.progress = {0, plan.n_rounds, 0, call.sig.count * run.elem_size};
  if (!eager) {
    bool direct = false;
    PYCOMM_RETURN_IF_ERROR(offer_direct(run, &direct));
    if (direct) return run_direct(run);
  }
  return run_tiles(run);
}

Status Engine::run_barrier(Run& run) {
  PYCOMM_RETURN_IF_ERROR(free_slot(run, 0));
  hold_slot(0, 1, 0);
  post_head(run, 0);
  return await_heads(run, 0);
}

Status Engine::run(const Call& call, CallerHooks* hooks, double timeout_s) {
  if (group_.failed()) return group_.failure();
  const Plan* plan = nullptr;
  const bool planned = call.sig.kind != CallKind::kAllToAll && call.sig.kind != CallKind::kBarrier;
  if (planned) PYCOMM_RETURN_IF_ERROR(plan_for(call, call.sig.algorithm, PlanMode::kTiled, &plan));
  begin_call(call.sig.kind);
  Run run(call, group_, hooks, timeout_s, call_, planned ? plan->n_parts : 1);
  run.plan = plan;
  Status s = planned                               ? run_collective(run)
             : call.sig.kind == CallKind::kBarrier ? run_barrier(run)
                                                   : run_all_to_all(run);
  return conclude(run, std::move(s));
}

Status Engine::agree(const Signature& sig, CallerHooks* hooks, double timeout_s) {
  if (group_.failed()) return group_.failure();
  Call call;
  call.sig = sig;
  begin_call(sig.kind);
  Run run(call, group_, hooks, timeout_s, call_, 1);
  return conclude(run, run_barrier(run));
}

// Of a communicator of several hosts, Hierarchy says what its ranks are in.
void Engine::begin_call(CallKind kind) {
  call_++;
  if (!group_.across_hosts()) group_.enter(kind, call_);
}

Status Engine::conclude(Run& run, Status s) {
  if (!group_.across_hosts()) group_.exit();
  if (s.ok()) {
    base_ += run.last_position + 1;
    return s;
  }
  if (s.code() == Code::kRefused) {
    // A peer that is late may still look at this call's head; tiles staged behind it nobody will read.
    for (uint32_t at = 0; at < kSlots; at++) {
      Until& u = slot_free_[slot_of(at)];
      if (reached(u.position, base_ + 1))
        u = at == 0 ? Until{base_ + kRefusedPositions, slot_of(kRefusedPositions)} : Until{base_, slot_of(0)};
    }
    base_ += kRefusedPositions;
    return s;
  }
  // A stopped peer that wakes up later finishes the instruction it was in, and may write where we offered.
  for (const Buffer* b : {&run.call.in, &run.call.out}) group_.node()->arena()->quarantine(b->data());
  fail_group(run, s);
  return s;
}

// What peers and later calls will see; our Ctrl-C is not theirs.
void Engine::fail_group(const Run& run, const Status& s) {
  group_.fail(s.code() == Code::kInterrupt
                  ? Status::error(Code::kClosed, run.waiting.here() + " was interrupted (Ctrl-C)")
                  : s.clone());
}

Status Engine::refuse(const std::string& why, CallerHooks* hooks, double timeout_s) {
  return post_refusal(kOwnRefusal + why, hooks, timeout_s);
}

Status Engine::pass_on(const std::string& message, CallerHooks* hooks, double timeout_s) {
  return post_refusal(kPassedOn + message, hooks, timeout_s);
}

Status Engine::post_refusal(const std::string& text, CallerHooks* hooks, double timeout_s) {
  if (group_.failed()) return group_.failure();
  Call call;
  call.sig.kind = CallKind::kRefused;
  begin_call(CallKind::kRefused);
  Run run(call, group_, hooks, timeout_s, call_, 1);
  Status s = free_slot(run, 0);
  if (!s.ok()) {
    fail_group(run, s);
    return s;
  }
  hold_slot(0, kRefusedPositions, kRefusedPositions - 1);
  char* to = reinterpret_cast<char*>(group_.own().slots[slot_of(0)].stage);
  const size_t n = utf8_prefix(text, 1000);
  std::memcpy(to, text.data(), n);
  to[n] = 0;
  post_head(run, 0);
  base_ += kRefusedPositions;
  if (!group_.across_hosts()) group_.exit();
  return Status();
}

}  // namespace pycomm
