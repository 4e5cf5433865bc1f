// Communicators of some of the ranks: split and new_group.
//
// One all-gather tells everybody each rank's color, key, the offset of the control block that it has made for
// the child, and a hash of what must be the same on all ranks. The members of a color, in the order of their
// keys, then make the child from what they know: no further message.
//
// Threads: as a collective call. Cost: one all-gather of 32 bytes a rank; the child's control block lies in
// the arena until all of its ranks have let go of it.
#include <algorithm>

#include "engine/communicator.h"

namespace pycomm {

Status Communicator::split(int64_t color, int64_t key, int64_t plan, CallerHooks* hooks,
                           std::shared_ptr<Communicator>* out) {
  constexpr size_t kRow = 4;
  out->reset();
  uint64_t offset = 0;
  PYCOMM_RETURN_IF_ERROR(check_usable());
  n_splits_++;
  Status allocated = allocate_control(*group_->node(), &offset);
  if (!allocated.ok()) {  // no memory: the peers must not wait for us
    Request refusal;
    refusal.refusal = allocated.message();
    PYCOMM_RETURN_IF_ERROR(run(refusal, hooks));
    return allocated;
  }
  const int64_t mine[kRow] = {color, key, static_cast<int64_t>(offset), plan};
  std::vector<int64_t> all(kRow * static_cast<size_t>(size()));
  const auto row = [&](int q) { return &all[kRow * static_cast<size_t>(q)]; };
  Request request;
  request.call.sig.kind = CallKind::kAllGather;
  request.call.sig.dtype = DType::kInt64;
  request.call.sig.count = all.size();
  request.counts.assign(static_cast<size_t>(size()), kRow);
  request.call.in = Buffer(const_cast<int64_t*>(mine), kRow);
  request.call.out = Buffer(all.data(), all.size());
  PYCOMM_RETURN_IF_ERROR(prepare(&request, nullptr));
  Status gathered = run(request, hooks);
  // Refused: no peer has seen the offset. After any other failure one may have, so the block stays.
  if (gathered.code() == Code::kRefused) group_->node()->arena()->release(offset);
  PYCOMM_RETURN_IF_ERROR(std::move(gathered));
  for (int q = 1; q < size(); q++) {
    if (row(q)[3] == row(0)[3]) continue;
    group_->node()->arena()->release(offset);
    const Status failure = Status::error(
        Code::kMismatch, format("new_group: rank 0 and rank %d gave different lists of ranks (or one of them "
                                "called split); all ranks must give the same list in the same order",
                                q));
    group_->fail(failure);
    return failure.clone();
  }
  if (color < 0) {
    group_->node()->arena()->release(offset);
    return Status();
  }
  std::vector<int> members;
  for (int q = 0; q < size(); q++) {
    if (row(q)[0] == color) members.push_back(q);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return row(a)[1] < row(b)[1]; });
  std::vector<uint64_t> offsets;
  for (const int q : members) offsets.push_back(static_cast<uint64_t>(row(q)[2]));
  return make_child(members, offsets, n_splits_ << 32 ^ static_cast<uint64_t>(color), out);
}

// The communicator of these ranks of ours, which this rank is one of.
Status Communicator::make_child(const std::vector<int>& members, const std::vector<uint64_t>& offsets,
                                uint64_t salt, std::shared_ptr<Communicator>* out) {
  const Placement* const here = placement();
  Across across{net_, {}, {}, id_, 0};
  std::vector<int> node_ranks;
  std::vector<uint64_t> controls;
  int local = 0;
  for (size_t i = 0; i < members.size(); i++) {
    const auto q = static_cast<size_t>(members[i]);
    const bool on_this_host = here == nullptr || here->host_of[q] == here->host;
    if (members[i] == rank()) {
      across.rank = static_cast<int>(i);
      local = static_cast<int>(node_ranks.size());
    }
    if (here != nullptr) {
      across.host_of.push_back(here->host_of[q]);
      across.job_ranks.push_back(job_ranks_[q]);
    }
    if (!on_this_host) continue;
    node_ranks.push_back(group_->node_rank(here == nullptr ? members[i] : here->local_of[q]));
    controls.push_back(offsets[i]);
  }
  const double timeout_s = group_->timeout_s();
  if (here == nullptr) {
    PYCOMM_RETURN_IF_ERROR(create(group_->node(), node_ranks, local, timeout_s, controls, out));
    (*out)->device_tables_ = device_tables_;
    return Status();
  }
  across.id = (static_cast<uint64_t>(hash_mix(id_, salt)) << 32 | hash_mix(salt, ~id_)) & ~uint64_t{1};
  PYCOMM_RETURN_IF_ERROR(
      create(group_->node(), node_ranks, local, timeout_s, controls, std::move(across), out));
  (*out)->device_tables_ = device_tables_;
  return Status();
}

}  // namespace pycomm
