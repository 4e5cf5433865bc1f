// NcclComm: one rank's NCCL communicator, whose every call on the host ends by a deadline.
//
// It is made non-blocking (blocking = 0), so that NCCL never keeps the calling thread: where NCCL answers "in
// progress", settle() polls until it is done, until Patience::poll says to stop (Ctrl-C, a peer known to be
// dead) or until the deadline. After a failure only abort() is left. Functions that NCCL offers no
// non-blocking form of (abort, destroy) run on a thread of their own, which is left behind when it hangs.
//
// Times are seconds. The calls of one device, of all its communicators, are made one at a time, in an order
// that is the same on all ranks; else NCCL deadlocks. The caller has set the device. Cost: NCCL 2.24 and
// newer answer "in progress" to every group, and put it on the stream by a thread of their own, for tens of
// microseconds; settle() polls without sleeping for the first 200. Older ones do so where they connect only.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/cuda/nccl.h"

namespace pycomm::nccl {

struct Patience {
  double timeout_s = 30;
  std::function<Status()> poll;  // may be empty; looked at every 100 ms while waiting
};

class NcclComm {
 public:
  NcclComm() = default;
  ~NcclComm();  // aborts, for at most kAbortTimeout_s, what was neither finalized nor aborted
  NcclComm(NcclComm&& other) noexcept;
  NcclComm& operator=(NcclComm&& other) noexcept;

  // One rank makes the id and gives it to all.
  static Status make_id(UniqueId* out);
  // Collective. kTimeout when not all ranks have come by the deadline.
  static Status init(const UniqueId& id, int n_ranks, int rank, int device, const Patience& patience,
                     NcclComm* out);
  // Collective of the ranks that stay: those without the excluded. `abort_first` ends what is under way.
  Status shrink(std::span<const int> excluded, bool abort_first, const Patience& patience, NcclComm* out);
  bool can_shrink() const { return valid() && has(api().comm_shrink != nullptr, kShrinkVersion); }
  // Ends what is under way on this rank; then only shrink and abort are left.
  Status revoke(const Patience& patience);
  bool can_revoke() const { return valid() && has(api().comm_revoke != nullptr, kRevokeVersion); }

  // What is between start_group and end_group is one operation for NCCL: it starts together and cannot
  // deadlock within itself. end_group returns when all is on its stream. After a failed call the group is
  // ended as well.
  Status start_group();
  Status end_group(const Patience& patience);
  // The result of a call within a group ("ncclSend to rank 3") as a Status; closes the group if it failed.
  Status in_group(Result result, const char* what);
  // Messages within a group, of bytes; an empty one does not travel.
  Status send(const void* from, size_t n_bytes, int peer, Stream stream);
  Status recv(void* to, size_t n_bytes, int peer, Stream stream);
  // Of a single call outside of a group.
  Status settle(Result result, const char* what, const Patience& patience);

  // Errors of operations that are under way: kPeerLost where NCCL lost a peer, kSystem otherwise.
  Status async_error();

  // When all that was issued has been done: frees it all.
  Status finalize(const Patience& patience);
  // Ends what is under way and frees what it can. kTimeout when NCCL's own function hangs: says what is left.
  // From any thread, also while another is kept in a call of this one: that finds no communicator afterwards.
  Status abort(double timeout_s = kAbortTimeout_s);
  static constexpr double kAbortTimeout_s = 5;

  // NCCL makes a connection for the first message to a peer, or from it, which the capture of a CUDA graph
  // may forbid. kValue, with the remedy, where no group with one (send, recv) has ended yet.
  Status check_exchange(const std::string& what, int peer, bool sent) const;

  bool valid() const { return raw() != nullptr; }
  Comm raw() const { return comm_.load(std::memory_order_acquire); }
  const Api& api() const { return library_->api; }
  const Library& library() const { return *library_; }
  int rank() const { return rank_; }
  int n_ranks() const { return n_ranks_; }
  int device() const { return device_; }

 private:
  Status failure(Result result, const std::string& what) const;
  Status adopt(std::unique_ptr<Comm> place, Result result, const char* what, const Patience& patience,
               NcclComm* out);
  Status in_time(std::function<Result(Comm)> fn, Comm comm, const char* what, double timeout_s,
                 Result* result) const;
  Status end_in_time(Result (*fn)(Comm), const char* what, double timeout_s);
  bool has(bool symbol, int version) const { return symbol && library_->version >= version; }

  const Library* library_ = nullptr;
  std::atomic<Comm> comm_{nullptr};
  int rank_ = 0, n_ranks_ = 0, device_ = 0;
  std::set<std::pair<int, bool>> exchanged_;  // peers, and whether they were sent to
  std::vector<std::pair<int, bool>> in_group_;
};

}  // namespace pycomm::nccl
