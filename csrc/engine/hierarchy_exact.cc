// Deterministic reductions over hosts wherever the ranks are: the bits of one host (docs/numerics.md).
//
// Inside a host its ranks' inputs cannot be summed up as a whole: the canonical tree T mixes them with those
// of other hosts. So every owner gets its share of each local rank's input, and reduces the ranks of each
// maximal subtree (schedule/placement_tree.h) to a *partial*; between hosts the partials of a share are
// combined as schedule/exact.h says; the results go to the ranks of the host as in the other mode
// (engine/hierarchy.h).
//
// Bytes that leave a host with s subtrees, all_reduce: (s + 1)(H - 1)/H of the vector, which is the other
// mode's where s is 1. Memory: s partials of a share. Low precision comes here in float32 (engine/convert.h).
#include <algorithm>
#include <cstring>

#include "engine/hierarchy.h"
#include "kernels/reduce.h"

namespace pycomm {

namespace {
// Of Hierarchy::work: those of engine/hierarchy_calls.cc are 0 to 2.
constexpr size_t kPartials = 0, kSums = 3, kStaged = 6;
}  // namespace

// Elements at … at + n - 1 of every owner's share of `vector`, to the owner, from each rank of this host;
// `out` has them in the order of local ranks.
Status Hierarchy::exchange(const Buffer& vector, const std::vector<uint64_t>& cut, uint64_t at, uint64_t n,
                           Buffer out) {
  const auto part = [&](size_t owner) { return cut[owner] <= at ? 0 : std::min(n, cut[owner] - at); };
  Call call;
  std::vector<uint64_t> send_counts;
  std::vector<Segment> from;
  uint64_t start = 0;
  for (size_t i = 0; i < cut.size(); i++) {
    send_counts.push_back(part(i));
    append_pieces(vector, start + at, part(i), elem_size_, &from);
    start += cut[i];
  }
  const std::vector<uint64_t> recv_counts(cut.size(), part(static_cast<size_t>(placement_.local)));
  call.sig.kind = CallKind::kAllToAll;
  call.sig.dtype = call_->dtype();
  call.sig.count = start;
  call.sig.extra = hash_mix(number_, n_inside_++);
  call.in = Buffer(std::move(from), elem_size_);
  call.out = std::move(out);
  call.send_counts = send_counts;
  call.recv_counts = recv_counts;
  Status s = engine_.run(call, hooks_, local_timeout_s());
  inside_refused_ = s.code() == Code::kRefused;
  return s.code() == Code::kInterrupt || s.ok() ? std::move(s) : std::move(s).within(here());
}

// `vector` holds the shares behind each other, `cut` says how long they are. Uses work(which) and kStaged.
Status Hierarchy::make_partials(const Buffer& vector, const std::vector<uint64_t>& cut, size_t which,
                                Partials* out) {
  const auto mine = static_cast<size_t>(placement_.local);
  if (placement_.n_local() == 1 && vector.single()) {  // the host's only rank: its input is the partial
    *out = {vector.data(), 0};
    return Status();
  }
  const std::vector<int>& subtrees = tree_.of_host[static_cast<size_t>(placement_.host)];
  const uint64_t line = std::max<uint64_t>(1, 64 / elem_size_);
  const uint64_t stride = (cut[mine] + line - 1) / line * line;
  *out = {work(which, stride * subtrees.size()), stride * elem_size_};
  const auto n_local = static_cast<uint64_t>(placement_.n_local());
  const uint64_t piece = std::max<uint64_t>(1, kTileBytes / elem_size_ / n_local);
  std::byte* const staged = work(kStaged, n_local * std::min(piece, cut[mine]));
  // The first share is the longest: all ranks of this host make as many exchanges.
  for (uint64_t at = 0; at < cut[0]; at += piece) {
    const uint64_t n = cut[mine] <= at ? 0 : std::min(piece, cut[mine] - at);
    std::vector<Segment> to;
    for (size_t i = 0; i < subtrees.size() && n > 0; i++) {
      const Subtree& s = tree_.subtrees[static_cast<size_t>(subtrees[i])];
      for (int q = s.lo; q < s.hi; q++) {
        const auto local = static_cast<uint64_t>(placement_.local_of[static_cast<size_t>(q)]);
        std::byte* const partial = out->data + i * out->stride_bytes + at * elem_size_;
        to.push_back({s.hi - s.lo == 1 ? partial : staged + local * n * elem_size_, n});
      }
    }
    PYCOMM_RETURN_IF_ERROR(exchange(vector, cut, at, piece, Buffer(std::move(to), elem_size_)));
    reduce_subtrees(*out, staged, at, n);
  }
  return Status();
}

// A kernel's order over its sources is T (kernels/reduce.h), and a subtree's ranks are a run.
void Hierarchy::reduce_subtrees(const Partials& partials, const std::byte* staged, uint64_t at, uint64_t n) {
  if (n == 0) return;
  const ReduceFn reduce = find_reduce(call_->dtype(), op_);
  std::vector<const void*> srcs;
  std::byte* to = partials.data + at * elem_size_;
  for (const int i : tree_.of_host[static_cast<size_t>(placement_.host)]) {
    const Subtree& s = tree_.subtrees[static_cast<size_t>(i)];
    srcs.clear();
    for (int q = s.lo; q < s.hi; q++)
      srcs.push_back(staged +
                     static_cast<uint64_t>(placement_.local_of[static_cast<size_t>(q)]) * n * elem_size_);
    void* dst = to;
    if (srcs.size() > 1) reduce(&dst, 1, srcs.data(), static_cast<int>(srcs.size()), n, 1.0);
    to += partials.stride_bytes;
  }
}

// As start(), of the schedule that combines partials.
Status Hierarchy::start_exact(std::unique_ptr<Flight>* out, Collective collective, const Partials& in,
                              std::byte* to, uint64_t count, const std::vector<uint64_t>& counts,
                              int root_host) {
  const uint32_t run = n_runs_++;
  if (!placement_.is_owner()) return Status();
  Schedule& schedule = exact_schedules_[{collective, root_host}];
  if (schedule.part.empty()) schedule = exact_between(collective, tree_, placement_.host, root_host);
  *out = std::make_unique<Flight>(*remote_, schedule, counts, placement_.members);
  Rounds::Task& task = (*out)->task;
  task.call = number_;
  task.run = run;
  task.in = in.data;
  task.in_stride_bytes = in.stride_bytes;
  task.out = to;
  task.count = count;
  task.dtype = call_->dtype();
  task.op = op_;
  const auto lock = remote_->net().lock();
  (*out)->begin();
  return Status();
}

Status Hierarchy::exact_all_reduce() {
  const auto mine = static_cast<size_t>(placement_.local);
  return in_tiles(
      kSums, [&](size_t slot, uint64_t at, uint64_t len, const std::vector<uint64_t>& cut) -> Status {
        Partials partials;
        PYCOMM_RETURN_IF_ERROR(
            make_partials(slice_of(call_->in, at, len, elem_size_), cut, kPartials + slot, &partials));
        return start_exact(&flights_[slot], Collective::kAllReduce, partials, work(kSums + slot, cut[mine]),
                           cut[mine], {}, 0);
      });
}

Status Hierarchy::exact_reduce_scatter() {
  const auto mine = static_cast<size_t>(placement_.local);
  const std::vector<uint64_t> totals = share_totals(), block = block_shares(placement_.host);
  Partials partials;
  PYCOMM_RETURN_IF_ERROR(make_partials(by_owners(call_->in), totals, kPartials, &partials));
  std::byte* const own = work(1, block[mine]);
  std::unique_ptr<Flight> flight;
  PYCOMM_RETURN_IF_ERROR(start_exact(&flight, Collective::kReduceScatter, partials, own, totals[mine],
                                     share_counts(placement_.local), 0));
  PYCOMM_RETURN_IF_ERROR(finish(flight.get()));
  divide(own, block[mine]);
  return spread_block(own, block);
}

Status Hierarchy::exact_reduce() {
  const auto mine = static_cast<size_t>(placement_.local);
  const auto root = static_cast<size_t>(call_->sig.root);
  const int root_host = placement_.host_of[root];
  const std::vector<uint64_t> cut = shares(call_->sig.count);
  Partials partials;
  PYCOMM_RETURN_IF_ERROR(make_partials(call_->in, cut, kPartials, &partials));
  std::byte* const sum = work(kSums, cut[mine]);
  std::unique_ptr<Flight> flight;
  PYCOMM_RETURN_IF_ERROR(start_exact(&flight, Collective::kReduce, partials, sum, cut[mine], {}, root_host));
  PYCOMM_RETURN_IF_ERROR(finish(flight.get()));
  if (placement_.host != root_host) return all_here();
  divide(sum, placement_.is_owner() ? cut[mine] : 0);
  return inside(CallKind::kGather, Buffer(sum, cut[mine]),
                placement_.rank == call_->sig.root ? call_->out : Buffer(), cut, placement_.local_of[root]);
}

}  // namespace pycomm
