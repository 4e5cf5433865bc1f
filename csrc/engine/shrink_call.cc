// Communicator::shrink: from the agreement (engine/shrink.h) to the new communicator.
//
// Its control blocks lie in the arenas of the ranks as any child's do; each rank allocates its own before it
// comes, and shows where. The old communicator has failed from then on, also where it was healthy: it would
// not be the same one on all of its ranks any more. The node lets go of ranks that are dead; their arenas
// stay mapped until the communicators that had them are closed and destroyed.
//
// Threads: as split, one at a time.
#include "engine/communicator.h"
#include "engine/p2p.h"

namespace pycomm {

Status Communicator::shrink(const std::vector<int>& exclude, double timeout_s, CallerHooks* hooks,
                            std::shared_ptr<Communicator>* out) {
  out->reset();
  if (group_->node()->forked() || closed()) return check_usable();
  if (size() > Shrink::kMaxRanks)
    return Status::error(Code::kValue,
                         format("shrink: at most %d ranks, here are %d", Shrink::kMaxRanks, size()));
  if (shrunk_)
    return Status::error(Code::kValue, "shrink: this communicator was shrunk already; shrink the new one");
  RankSet excluded;
  for (const int q : exclude) {
    if (q < 0 || q >= size() || q == rank()) {
      return Status::error(Code::kValue, format("shrink: exclude has rank %d, which is no other rank of this "
                                                "communicator of %d (this is rank %d)",
                                                q, size(), rank()));
    }
    excluded.add(q);
  }
  uint64_t offset = 0;
  if (!shrink_->come()) PYCOMM_RETURN_IF_ERROR(allocate_control(*group_->node(), &offset).within("shrink"));
  const std::string who = describe(rank());
  RankSet survivors;
  PYCOMM_RETURN_IF_ERROR(shrink_->run(
      excluded, offset, timeout_s, hooks, [&] { abort(who + " called shrink()"); }, &survivors));
  shrunk_ = true;
  abort("the communicator was shrunk");
  std::vector<int> members, left_out;
  std::vector<uint64_t> offsets;
  Node& node = *group_->node();
  for (int q = 0; q < size(); q++) {
    const int local = local_rank(q);
    const int node_rank = local < 0 ? -1 : group_->node_rank(local);
    if (!survivors.has(q)) {
      left_out.push_back(q);
      if (local >= 0) node.forget(node_rank);
      continue;
    }
    members.push_back(q);
    offsets.push_back(local < 0 ? 0 : shrink_->control_of(local));
    if (local < 0 || node_rank == node.rank()) continue;
    if (offsets.back() == 0 || node.mapping(node_rank) == nullptr)
      return Status::error(Code::kPeerLost, "shrink: " + group_->describe(local) + " is gone already");
  }
  PYCOMM_RETURN_IF_ERROR(make_child(members, offsets, ~uint64_t{0}, out));
  (*out)->was_shrunk_ = true;
  if (const auto engine = device()) (*out)->device_heritage_ = engine->bequeath(std::move(left_out));
  return Status();
}

}  // namespace pycomm
