// Collectives of ranks on several hosts: within a host through shared memory, between hosts by schedules.
//
// Words: with H hosts, local rank i < K of each host is an *owner*, K being the fewest ranks that any host of
// the communicator has. Owner i of every host carries *share* i, a K-th of the data, between hosts; so each
// host's interface carries what one rank's would, over K processes. The ranks of one host make a *block*:
// the parts of its ranks, in the order of their local ranks.
//
//   all_reduce      reduce-scatter to the owners, all-reduce of the shares between hosts, all-gather; in
//                   tiles of kTileBytes, so that one travels while the next is reduced
//   reduce_scatter  the same with a reduce-scatter between hosts, of blocks
//   all_gather, gather, scatter, broadcast, reduce   likewise, mirrored
//   all_to_all      straight from rank to rank
//   barrier         the owner 0 of each host, when all of its host have come
//
// Deterministic reductions of ranks whose placement does not keep their order: engine/hierarchy_exact.cc.
//
// Bytes that leave a host: those of the schedule with H ranks; for all_reduce 2 (H-1)/H of the vector.
// Every call begins with an agreement within the host (Engine::agree), so that a mismatch or a refusal there
// is told in the words of the call; between hosts each message bears the signature (engine/remote.h).
#pragma once

#include <bit>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/flight.h"
#include "engine/remote.h"
#include "engine/rounds.h"
#include "engine/select.h"
#include "engine/select_hosts.h"
#include "schedule/exact.h"

namespace pycomm {

// Which ranks are where. Hosts are numbered in the order of their lowest rank.
struct Placement {
  explicit Placement(const std::vector<int>& host_of, int rank);

  int n_ranks() const { return static_cast<int>(host_of.size()); }
  int n_hosts() const { return static_cast<int>(ranks.size()); }
  int n_local() const { return static_cast<int>(ranks[static_cast<size_t>(host)].size()); }
  bool is_owner() const { return local < n_owners; }
  // Whether reducing within each host first, then over hosts, is the canonical tree (docs/numerics.md): the
  // hosts' ranks follow each other, as many on each, a power of two.
  bool keeps_order() const;
  std::string text() const;  // "host 0: ranks 0 1, host 1: ranks 2 3"

  std::vector<int> host_of;             // of each rank
  std::vector<int> local_of;            // its local rank there
  std::vector<std::vector<int>> ranks;  // of each host
  int rank, host = 0, local = 0;
  int n_owners = 0;
  std::vector<int> members;  // the ranks of my share, one for each host (when an owner)
};

// `n` elements of a buffer from `at` on.
Buffer slice_of(const Buffer& from, uint64_t at, uint64_t n, size_t elem_size);
void append_pieces(const Buffer& from, uint64_t at, uint64_t n, size_t elem_size, std::vector<Segment>* to);

class Hierarchy {
 public:
  static constexpr size_t kTileBytes = size_t{2} << 20;

  Hierarchy(Group& group, Engine& engine, const Selector& selector, Placement placement,
            std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks);

  // As Engine::run and refuse, of the communicator's call.
  Status run(const Call& call, CallerHooks* hooks, double timeout_s);
  Status refuse(const std::string& why, CallerHooks* hooks, double timeout_s);
  const Placement& placement() const { return placement_; }
  Remote& remote() { return *remote_; }
  HostSelector& selector() { return host_selector_; }

 private:
  // How long a call that did not end well waits for the kernel to be done with memory sent without a copy:
  // a peer may still complete its call from it.
  static constexpr double kAcknowledgeS = 0.5;
  static constexpr size_t kFlights = 3;  // tiles under way: one reduced, one between hosts, one gathered

  Status dispatch();
  Status settle(Status s, bool told_here);
  Status all_reduce();
  Status all_reduce_alone();
  // Of a tile: which of the kFlights it takes, where it begins, its elements, and every local rank's share.
  using BeginTile =
      std::function<Status(size_t slot, uint64_t at, uint64_t len, const std::vector<uint64_t>& cut)>;
  Status in_tiles(size_t first_work, const BeginTile& begin);
  Status reduce_scatter();
  Status all_gather();
  Status broadcast();
  Status reduce();
  Status gather();
  Status scatter();
  Status all_to_all();
  Status barrier();
  Status all_here();

  // A collective of the ranks of this host, in parts of these counts.
  Status inside(CallKind kind, Buffer in, Buffer out, std::vector<uint64_t> counts, int root);
  // A collective of the owners of this share; nothing on ranks that are none. `at`: of the share's first
  // element in the call's residual.
  Status between(Collective collective, std::byte* in, std::byte* out, uint64_t count,
                 const std::vector<uint64_t>& counts, int root_host, uint64_t at = 0);
  Status start(std::unique_ptr<Flight>* out, Collective collective, std::byte* in, std::byte* to,
               uint64_t count, const std::vector<uint64_t>& counts, int root_host, uint64_t at = 0);
  Status finish(Flight* flight);
  void divide(std::byte* data, uint64_t n);
  Status gather_block(const Buffer& part, std::byte** share);
  Status spread_block(std::byte* own, const std::vector<uint64_t>& block);

  std::vector<uint64_t> shares(uint64_t count) const;
  uint64_t part_len(int rank) const;
  uint64_t block_len(int host) const;
  std::vector<uint64_t> block_shares(int host) const;
  std::vector<uint64_t> share_counts(int owner) const;
  std::vector<uint64_t> share_totals() const;
  Buffer by_owners(const Buffer& whole) const;
  std::byte* work(size_t which, uint64_t n_elems);

  // engine/hierarchy_exact.cc
  struct Partials {
    std::byte* data = nullptr;  // of this owner's share: of each subtree of this host
    uint64_t stride_bytes = 0;  // from one to the next
  };
  Status exact_all_reduce();
  Status exact_reduce_scatter();
  Status exact_reduce();
  Status make_partials(const Buffer& vector, const std::vector<uint64_t>& cut, size_t which, Partials* out);
  Status exchange(const Buffer& vector, const std::vector<uint64_t>& cut, uint64_t at, uint64_t n,
                  Buffer out);
  void reduce_subtrees(const Partials& partials, const std::byte* staged, uint64_t at, uint64_t n);
  Status start_exact(std::unique_ptr<Flight>* out, Collective collective, const Partials& in, std::byte* to,
                     uint64_t count, const std::vector<uint64_t>& counts, int root_host);
  double local_timeout_s() const;
  std::string here() const;

  Group& group_;
  Engine& engine_;
  const Selector& selector_;  // within the host
  HostSelector host_selector_;
  Placement placement_;
  std::unique_ptr<Remote> remote_;
  std::vector<std::vector<std::byte>> work_;

  // Of the call under way.
  const Call* call_ = nullptr;
  CallerHooks* hooks_ = nullptr;
  double timeout_s_ = 0;
  size_t elem_size_ = 1;
  ReduceOp op_ = ReduceOp::kSum;
  uint32_t number_ = 0, n_runs_ = 0, n_inside_ = 0;
  bool inside_refused_ = false;  // by a rank of this host, to all of it
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<uint64_t> sizes_;                                     // all_to_all's, while they travel
  std::map<std::pair<const Algorithm*, int>, Schedule> schedules_;  // by algorithm and root
  const PlacementTree tree_;
  std::map<std::pair<Collective, int>, Schedule> exact_schedules_;  // by collective and root
};

}  // namespace pycomm
