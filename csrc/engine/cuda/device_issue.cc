// One call on the device: behind the caller's stream, onto the communication stream, up to its end event.
//
// Tensors in several pieces, as DDP's buckets are, are packed by one kernel and unpacked by one: into memory
// that peers reach, where the call goes over that and it has room (DeviceArena), so that nothing is staged;
// else into scratch. Scratch is laid out anew by each call: [packed input and output] [what the way needs].
//
// Over peers' memory premul_sum multiplies first, into scratch, then adds; low precision then runs in float32
// and is rounded at the end. So do the CPU engine (engine/convert.h) and the rounds over NCCL: the same bits.
#include <algorithm>

#include "engine/cuda/device_coded.h"
#include "engine/cuda/rounds_binding.h"
#include "schedule/catalog.h"
#include "transport/cuda/device_memory.h"

namespace pycomm {

namespace {
bool is_rounds(uint8_t way) { return way < catalog().size(); }
}  // namespace

Status DeviceEngine::Impl::copy(void* to, const void* from, size_t n_bytes) const {
  if (n_bytes == 0 || to == from) return Status();
  return cuda_status(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, stream()), "cudaMemcpyAsync");
}

namespace {
template <class Piece>
std::vector<Piece> blocks_of(const Buffer& b, size_t size) {
  std::vector<Piece> blocks;
  for (uint64_t at = 0; at < b.n_elems();) {
    uint64_t run = 0;
    std::byte* const p = b.locate(at, size, &run);
    run = std::min(run, b.n_elems() - at);
    blocks.push_back({p, run});
    at += run;
  }
  return blocks;
}
}  // namespace

Status DeviceEngine::Impl::gather_pieces(const Buffer& from, std::byte* to, DType t) const {
  return cuda::pack(t, to, t, blocks_of<ConstBlock>(from, dtype_size(t)), 1.0f, stream());
}

Status DeviceEngine::Impl::spread_pieces(const std::byte* from, const Buffer& to, DType t) const {
  return cuda::unpack(t, blocks_of<Block>(to, dtype_size(t)), t, from, 1.0f, stream());
}

cuda::RoundsCall DeviceEngine::Impl::rounds_call(const Call& call, const Plain& plain,
                                                 const cuda::RoundPlan* plan) const {
  cuda::RoundsCall r;
  r.plan = plan;
  r.in = plain.in;
  r.out = plain.out;
  r.count = call.sig.count;
  r.counts = call.counts;
  r.dtype = call.sig.dtype;
  r.op = call.sig.op;
  r.scalar = call.scalar;
  r.deterministic = call.sig.deterministic;
  if (call.sig.compression != Compression::kNone) r.codes = code_dtype(call.sig.compression);
  r.residual = call.residual;
  return r;
}

cuda::NativeCall DeviceEngine::Impl::native_call(const Call& call, const Plain& plain) const {
  cuda::NativeCall native;
  native.collective = static_cast<Collective>(call.sig.kind);
  native.in = plain.in;
  native.out = plain.out;
  native.count = call.sig.count;
  native.counts = call.counts;
  native.dtype = call.sig.dtype;
  native.op = call.sig.op;
  native.scalar = call.scalar;
  native.root = call.sig.root;
  native.deterministic = call.sig.deterministic;
  return native;
}

// One address for what both tensors hold of the vector.
bool DeviceEngine::Impl::in_place(const Call& call, const Plain& plain) const {
  if (plain.in == nullptr || plain.out == nullptr) return false;
  const CallParts parts(call, link.n_ranks);
  const uint64_t before = parts.start[static_cast<size_t>(link.rank)] * dtype_size(call.sig.dtype);
  const bool in_part = call.sig.kind == CallKind::kAllGather || call.sig.kind == CallKind::kGather;
  const bool out_part = call.sig.kind == CallKind::kReduceScatter || call.sig.kind == CallKind::kScatter;
  return plain.in - (in_part ? before : 0) == plain.out - (out_part ? before : 0);
}

// What the way needs, beside packed tensors.
Status DeviceEngine::Impl::scratch_bytes(const Call& call, size_t* out) {
  *out = 0;
  if (link.n_ranks == 1 || call.sig.kind == CallKind::kAllToAll) return Status();
  if (is_coded_gather(call)) return coded_scratch_bytes(call, out);
  if (!is_rounds(call.sig.algorithm)) {
    if (call.sig.algorithm == static_cast<uint8_t>(DeviceWay::kNccl)) return Status();
    if (call.sig.op != ReduceOp::kPremulSum) {
      *out = staged_bytes(call);
      return Status();
    }
    const Call sum = as_sum(call);
    const size_t size = dtype_size(sum.sig.dtype);
    *out = cuda::aligned(call.in.n_elems() * size) + cuda::aligned(call.out.n_elems() * size) +
           staged_bytes(sum);
    return Status();
  }
  // In place or not, the larger; a copy of the input where the algorithm cannot run in place.
  for (const bool same : {false, true}) {
    if (same && !catalog()[call.sig.algorithm].in_place) continue;
    const cuda::RoundPlan* plan = nullptr;
    size_t n = 0;
    PYCOMM_RETURN_IF_ERROR(plan_of(call, call.sig.algorithm, same, &plan));
    PYCOMM_RETURN_IF_ERROR(rounds->scratch_bytes(rounds_call(call, {}, plan), &n));
    *out = std::max(*out, n);
  }
  *out = cuda::aligned(*out) + cuda::aligned(call.in.n_elems() * dtype_size(call.sig.dtype));
  return Status();
}

Status DeviceEngine::Impl::by_rounds(const Call& call, const Plain& plain, std::byte* scratch,
                                     double timeout_s) {
  Plain p = plain;
  const bool same = in_place(call, p);
  const bool copied = same && !catalog()[call.sig.algorithm].in_place;
  const size_t n_bytes = call.in.n_elems() * dtype_size(call.sig.dtype);
  if (copied) {
    PYCOMM_RETURN_IF_ERROR(copy(scratch, p.in, n_bytes));
    p.in = scratch;
  }
  const cuda::RoundPlan* plan = nullptr;
  PYCOMM_RETURN_IF_ERROR(plan_of(call, call.sig.algorithm, same && !copied, &plan));
  return rounds->run(rounds_call(call, p, plan), scratch + cuda::aligned(n_bytes), patience(timeout_s));
}

// The call after the inputs were multiplied.
Call DeviceEngine::Impl::as_sum(const Call& call) {
  Call sum = call;
  sum.sig.op = ReduceOp::kSum;
  if (is_low_precision(call.sig.dtype)) sum.sig.dtype = DType::kFloat32;
  return sum;
}

Status DeviceEngine::Impl::multiplied_by_peers(const Call& call, const Plain& plain, std::byte* scratch) {
  const Call sum = as_sum(call);
  const DType from = call.sig.dtype, to = sum.sig.dtype;
  const size_t n_in = cuda::aligned(call.in.n_elems() * dtype_size(to));
  const size_t n_out = cuda::aligned(call.out.n_elems() * dtype_size(to));
  if (to == from) {
    const void* const src = plain.in;
    const cuda::ReduceSegment segment{scratch, &src, call.in.n_elems()};
    PYCOMM_RETURN_IF_ERROR(cuda::reduce(from, ReduceOp::kPremulSum, {&segment, 1}, 1, call.scalar, stream()));
    return by_peers(sum, {scratch, plain.out}, scratch + n_in + n_out);
  }
  const cuda::CastSegment widen{scratch, plain.in, call.in.n_elems()};
  PYCOMM_RETURN_IF_ERROR(cuda::cast(to, from, {&widen, 1}, static_cast<float>(call.scalar), stream()));
  std::byte* const result = plain.out != nullptr ? scratch + n_in : nullptr;
  PYCOMM_RETURN_IF_ERROR(by_peers(sum, {scratch, result}, scratch + n_in + n_out));
  const cuda::CastSegment narrow{plain.out, result, call.out.n_elems()};
  return result == nullptr ? Status() : cuda::cast(from, to, {&narrow, 1}, 1.0f, stream());
}

// The only rank: nothing travels.
Status DeviceEngine::Impl::alone(const Call& call, const Plain& plain) {
  const uint64_t n = call.out.n_elems();
  if (call.sig.op != ReduceOp::kPremulSum) return copy(plain.out, plain.in, n * dtype_size(call.sig.dtype));
  const void* const src = plain.in;
  const cuda::ReduceSegment segment{plain.out, &src, n};
  return cuda::reduce(call.sig.dtype, call.sig.op, {&segment, 1}, 1, call.scalar, stream());
}

Status DeviceEngine::Impl::by_way(const Call& call, const Plain& plain, std::byte* scratch,
                                  double timeout_s) {
  if (link.n_ranks == 1) return alone(call, plain);
  if (is_coded_gather(call)) return gather_coded(call, plain, scratch, timeout_s);
  const Signature& sig = call.sig;
  if (sig.kind == CallKind::kAllToAll) {
    return cuda::run_all_to_all(comm, stream(), all_to_all(call, plain), patience(timeout_s));
  }
  if (is_rounds(sig.algorithm)) return by_rounds(call, plain, scratch, timeout_s);
  if (sig.algorithm != static_cast<uint8_t>(DeviceWay::kNccl)) {
    return sig.op == ReduceOp::kPremulSum ? multiplied_by_peers(call, plain, scratch)
                                          : by_peers(call, plain, scratch);
  }
  return cuda::run_native(comm, stream(), native_call(call, plain), patience(timeout_s));
}

bool DeviceEngine::Impl::needs_nccl(const Call& call) const {
  return link.n_ranks > 1 && (call.sig.kind == CallKind::kAllToAll || is_rounds(call.sig.algorithm) ||
                              call.sig.algorithm == static_cast<uint8_t>(DeviceWay::kNccl));
}

// What the call has to be packed into, and its scratch. Ranks may differ in what they find: so may places of
// peers' memory (PeerCollectives).
Status DeviceEngine::Impl::find_room(const Call& call, bool is_captured, Room* out) {
  const size_t size = dtype_size(call.sig.dtype);
  // In place, in pieces: in place when packed, too.
  const bool shared = !call.in.single() && !call.out.single() && call.in.n_elems() == call.out.n_elems() &&
                      call.in.data() == call.out.data();
  out->packed_in = call.in.single() ? 0 : cuda::aligned(call.in.n_elems() * size);
  out->packed_out = call.out.single() || shared ? 0 : cuda::aligned(call.out.n_elems() * size);
  const size_t n_packed = out->packed_in + out->packed_out;
  const bool by_peers = link.n_ranks > 1 && !needs_nccl(call) && !is_coded_gather(call);
  // Else peers see what it was multiplied into, and not what it is packed into.
  const bool is_seen = call.sig.op != ReduceOp::kPremulSum || !is_low_precision(call.sig.dtype);
  if (n_packed > 0 && by_peers && is_seen) out->packing = arena->packing(n_packed, is_captured);
  return scratch_bytes(call, &out->way);
}

// What a call makes when it is the first of its kind cannot be made while a stream is captured.
Status DeviceEngine::Impl::can_be_captured(const Call& call) {
  const auto refuse = [&](const char* what) {
    return Status::error(
        Code::kValue, format("%s cannot be captured into a CUDA graph: %s; make the same call once, before "
                             "the capture",
                             call.sig.text().c_str(), what));
  };
  if (needs_nccl(call) && !comm.valid()) return refuse("its NCCL communicator is not there yet");
  Room room;
  PYCOMM_RETURN_IF_ERROR(find_room(call, false, &room));
  if (!context->has_scratch(room.scratch())) return refuse("it needs more scratch memory");
  if (link.n_ranks == 1) return Status();
  const Plain plain{call.in.data(), call.out.data()};
  if (call.sig.kind == CallKind::kAllToAll) {
    return cuda::all_to_all_can_be_captured(comm, all_to_all(call, plain));
  }
  if (call.sig.algorithm == static_cast<uint8_t>(DeviceWay::kNccl)) {
    return cuda::native_can_be_captured(comm, native_call(call, plain));
  }
  if (!is_rounds(call.sig.algorithm)) return Status();
  const bool same = in_place(call, plain) && catalog()[call.sig.algorithm].in_place;
  const cuda::RoundPlan* plan = nullptr;
  PYCOMM_RETURN_IF_ERROR(plan_of(call, call.sig.algorithm, same, &plan));
  return rounds->can_be_captured(rounds_call(call, {}, plan));
}

// Whether it can depends on what each rank has done before: the first that cannot refuses it for all.
Status DeviceEngine::Impl::agree_to_capture(const Call& call) {
  struct Verdict {
    bool good = false;
    char why[511] = {};
  } mine;
  const Status own = can_be_captured(call);
  mine.good = own.ok();
  mine.why[own.message().copy(mine.why, utf8_prefix(own.message(), sizeof mine.why - 1))] = 0;
  std::vector<Verdict> all(static_cast<size_t>(link.n_ranks));
  PYCOMM_RETURN_IF_ERROR(link.exchange(&mine, sizeof mine, all.data()));
  for (size_t q = 0; q < all.size(); q++) {
    if (all[q].good) continue;
    return Status::error(Code::kValue,
                         format("%s: %s", link.describe(static_cast<int>(q)).c_str(), all[q].why));
  }
  return Status();
}

Status DeviceEngine::Impl::issue(const Call& call, bool is_captured, double timeout_s) {
  if (needs_nccl(call)) PYCOMM_RETURN_IF_ERROR(need_nccl(timeout_s));
  Room room;
  PYCOMM_RETURN_IF_ERROR(find_room(call, is_captured, &room));
  std::byte* scratch = nullptr;
  PYCOMM_RETURN_IF_ERROR(context->scratch(room.scratch(), &scratch));
  std::byte* const packed = room.packing != nullptr ? room.packing : scratch;
  if (room.packing == nullptr) scratch += room.packed_in + room.packed_out;
  Plain plain{call.in.data(), call.out.data()};
  if (room.packed_in > 0) {
    PYCOMM_RETURN_IF_ERROR(gather_pieces(call.in, packed, call.sig.dtype));
    plain.in = packed;
  }
  const bool pack_out = !call.out.single();
  if (pack_out) plain.out = room.packed_out > 0 ? packed + room.packed_in : packed;
  PYCOMM_RETURN_IF_ERROR(by_way(call, plain, scratch, timeout_s));
  return pack_out ? spread_pieces(plain.out, call.out, call.sig.dtype) : Status();
}

Status DeviceEngine::Impl::issue_behind(const DeviceTurn& turn, const Call& call, double timeout_s) {
  PYCOMM_RETURN_IF_ERROR(
      cuda_status(cudaStreamWaitEvent(stream(), turn.impl->ready->get(), 0), "cudaStreamWaitEvent"));
  PYCOMM_RETURN_IF_ERROR(context->streams().begin_operation(call_kind_name(call.sig.kind)));
  return issue(call, turn.is_captured(), timeout_s);
}

// Behind all that has been issued of the call. Where that is not all of it, it still reads and writes the
// tensors until it has ended.
Status DeviceEngine::Impl::mark_end(bool is_captured, bool is_whole, const Call& call,
                                    std::shared_ptr<DeviceEnd>* end) {
  cuda::DeviceStreams& streams = context->streams();
  if (!is_whole) PYCOMM_RETURN_IF_ERROR(streams.order(streams.reduce(), streams.comm(), 0));
  PYCOMM_RETURN_IF_ERROR(streams.end_operation(call_kind_name(call.sig.kind)));
  std::shared_ptr<cuda::HeldEvent> event;
  PYCOMM_RETURN_IF_ERROR(cuda::HeldEvent::take(context, &event));
  auto made = std::make_shared<DeviceEnd>();
  PYCOMM_RETURN_IF_ERROR(cuda_status(cudaEventRecord(event->get(), stream()), "cudaEventRecord"));
  if (!is_captured) context->note_end(event);
  made->impl.reset(new DeviceEnd::Impl{context, failure, std::move(event), is_captured, call.stream});
  *end = std::move(made);
  return Status();
}

void DeviceEngine::set_free_cached(void (*free_cached)()) { pycomm::set_free_cached(free_cached); }

Status DeviceEngine::reserve(const DeviceTables& tables, Call* call) {
  Impl& d = *impl_;
  const uint8_t asked = call->sig.algorithm;  // what ranks compare
  Impl::Room room;
  Status s = choose(tables, call);
  const bool is_known =
      s.ok() && (!d.needs_nccl(*call) || d.comm.valid()) && d.find_room(*call, false, &room).ok();
  call->sig.algorithm = asked;
  if (!is_known) return Status();  // its first call, or one that all ranks refuse
  const std::lock_guard lock(d.context->issuing());
  if (d.context->has_scratch(room.scratch())) return Status();
  const DeviceGuard guard(d.device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  std::byte* ignored = nullptr;
  return d.context->scratch(room.scratch(), &ignored).within(call->sig.text());
}

Status DeviceEngine::run(const Call& call, const DeviceTurn& turn, double timeout_s,
                         std::shared_ptr<DeviceEnd>* end) {
  Impl& d = *impl_;
  if (Status s = failure(); !s.ok()) {
    d.fail(s);
    return s;
  }
  const bool is_captured = turn.is_captured();
  if (is_captured) PYCOMM_RETURN_IF_ERROR(d.agree_to_capture(call));
  if (d.peers != nullptr) d.peers->allow(timeout_s);
  const auto issue = [&]() -> Status {
    const std::lock_guard lock(d.context->issuing());
    const std::lock_guard own(d.comm_mutex);
    PYCOMM_RETURN_IF_ERROR(d.failure->get());  // another call's, meanwhile
    const DeviceGuard guard(d.device);
    PYCOMM_RETURN_IF_ERROR(guard.status());
    Status issued = d.issue_behind(turn, call, timeout_s);
    if (!issued.ok() && is_captured) return issued;  // nothing has run
    Status marked = d.mark_end(is_captured, issued.ok(), call, end);
    return issued.ok() ? std::move(marked) : std::move(issued);
  };
  Status s = issue();
  if (!s.ok()) {
    s = d.named(std::move(s)).within(call.sig.text());
    const bool interrupted = s.code() == Code::kInterrupt;
    if (!is_captured)
      d.fail(interrupted ? Status::error(Code::kClosed, call.sig.text() + " was interrupted (Ctrl-C)")
                         : s.clone());
    return s;
  }
  if (is_captured) {
    d.watch_replays();
    return Status();
  }
  d.watch_for(*end, turn.impl->ready, timeout_s, call);
  if (d.failure->failed.load()) d.end_nccl();  // it may have been made after the failure had ended it
  return d.failure->get();
}

}  // namespace pycomm
