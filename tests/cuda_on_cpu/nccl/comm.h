// Core: what a communicator of the loopback is, shared by its handle and by the operations under way.
//
// `state` is what ncclCommGetAsyncError says: in progress while a call goes on behind the caller's back, an
// error for good once there was one. `n_busy` counts operations and calls that have not ended; abort makes
// them end, destroy and finalize wait for them. `n_in_graphs` counts operations that graphs hold: abort,
// destroy and finalize wait until those graphs are destroyed, as NCCL's do. Guarded by `mutex` where not
// atomic.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "numbers.h"
#include "segment.h"

namespace loopback {

// From LOOPBACK_NCCL_FAULT when the communicator is made: "error=RANK:K,stall=RANK:K,abort_hangs=RANK". On
// that rank the K-th operation (from 0) never ends; with error, NCCL also reports ncclRemoteError.
struct Faults {
  int error_at = -1, stall_at = -1;
  bool abort_hangs = false;
  static Faults of_rank(int rank);
};

struct MadeOp {
  nccl::DataType type;
  double factor;             // kScalarHostImmediate
  const void* at = nullptr;  // kScalarDevice: read when the operation runs
  bool alive = true;
};

struct Core : std::enable_shared_from_this<Core> {
  std::shared_ptr<Segment> segment;
  std::string name;
  int rank = 0, n_ranks = 1, device = 0;
  bool blocking = true;
  Faults faults;

  std::atomic<int> state{nccl::kSuccess};
  std::atomic<bool> aborted{false};  // operations end without having done their work
  std::atomic<bool> revoked{false};
  std::atomic<int> n_operations{0};

  std::mutex mutex;
  std::condition_variable idle;
  int n_busy = 0, n_in_graphs = 0;
  std::string last_error;
  std::vector<MadeOp> made;
  std::set<int> connected;  // peers; kMaxRanks stands for collectives
  uint32_t n_shrinks = 0;

  nccl::Result fail(nccl::Result error,
                    const std::string& why);  // for good, unless the call was only refused
  nccl::Result refuse(nccl::Result error, const std::string& why);
  nccl::Result check_ready();  // as NCCL checks before every call
  void begin_busy();
  void end_busy();
  void wait_idle();
  void hold_graph();
  void release_graph();
  void wait_unused();  // idle, and in no graph
  void stop();         // operations end
  // Runs fn, on a thread where the communicator is not blocking, and lets `state` follow.
  nccl::Result run_call(std::function<nccl::Result()> fn);
};

// Meets the other ranks of that name. Blocks.
nccl::Result meet(const std::shared_ptr<Core>& core);

}  // namespace loopback

struct ncclComm {
  std::shared_ptr<loopback::Core> core;
};
