// A communicator: the ranks that call collectives together, and the order of this rank's calls.
//
// Collectives run in program order. A synchronous call on an idle communicator runs on the caller's thread;
// otherwise, and for asynchronous calls, a progress thread runs the queue. It leaves a small call, when that
// is all there is, to a caller who comes to wait for it, but no longer than kPatienceS. Every method may be
// called from any thread; two threads that call collectives at once are served one after the other (their
// order across ranks is the callers' affair). Point-to-point transfers have a life of their own
// (engine/p2p.h).
#pragma once

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "engine/device_engine.h"
#include "engine/engine.h"
#include "engine/hierarchy.h"
#include "engine/select.h"
#include "engine/shrink.h"
#include "engine/work.h"

namespace pycomm {

class PointToPoint;

struct Request {
  Call call;
  // call.counts, send_counts and recv_counts point here when the request outlives its caller's arguments.
  std::vector<uint64_t> counts, send_counts, recv_counts;
  bool deterministic = false;
  std::string refusal;          // not empty: refuse, instead of calling
  Code refused_as = Code::kOk;  // how the call then ends here; kOk: well, whoever refuses says it himself
  double timeout_s = 0;         // 0: the communicator's
  std::shared_ptr<DeviceTurn> turn;  // of a call on device tensors: from its making to its issue
  std::shared_ptr<DeviceEnd> end;    // once it is issued
};

// Switching to the progress thread and back costs 10 to 100 us; torch's functional collectives take 50 us
// from making a call to waiting for it.
inline constexpr double kPatienceS = 200e-6;
// How long after such a call the thread looks every kPatienceS, so that the next one needs not wake it.
inline constexpr double kWatchS = 20e-3;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // `controls`: the offset of every rank's control block. The ranks of a fresh node use offset 0.
  static Status create(std::shared_ptr<Node> node, std::vector<int> node_ranks, int rank, double timeout_s,
                       const std::vector<uint64_t>& controls, std::shared_ptr<Communicator>* out);
  // Of ranks on several hosts. `node_ranks`, `controls` and `local_rank` are those of this host's ranks,
  // `across` says who is where.
  struct Across {
    std::shared_ptr<Net> net;
    std::vector<int> host_of;    // of each rank
    std::vector<int> job_ranks;  // of each rank: the process
    uint64_t id = 0;             // the same on all ranks, and no other communicator's of these processes
    int rank = 0;
  };
  static Status create(std::shared_ptr<Node> node, std::vector<int> node_ranks, int local_rank,
                       double timeout_s, const std::vector<uint64_t>& controls, Across across,
                       std::shared_ptr<Communicator>* out);
  ~Communicator();

  int rank() const { return hierarchy_ == nullptr ? group_->rank() : hierarchy_->placement().rank; }
  int size() const { return hierarchy_ == nullptr ? group_->size() : hierarchy_->placement().n_ranks(); }
  // Null when all ranks are on this host.
  const Placement* placement() const { return hierarchy_ == nullptr ? nullptr : &hierarchy_->placement(); }
  // The group's rank of one of ours; -1 when that is on another host.
  int local_rank(int q) const;
  std::string describe(int q) const;  // "rank 3 (host b, pid 811, sleeping)"
  // The ranks of this host.
  Group& group() { return *group_; }
  Selector& selector() { return selector_; }
  // Between hosts; null when all ranks are on this one.
  HostSelector* host_selector() { return hierarchy_ == nullptr ? nullptr : &hierarchy_->selector(); }
  PointToPoint& p2p() { return *p2p_; }
  // On CUDA; null before the first call on CUDA tensors, and once closed.
  DeviceTables& device_tables() { return device_tables_; }
  std::shared_ptr<DeviceEngine> device() const {
    if (!has_device_.load(std::memory_order_acquire)) return nullptr;  // every call on the host asks
    const std::lock_guard lock(device_mutex_);
    return device_;
  }

  // Fills in algorithm, tile size and hash; kValue or kType when the request cannot be served
  // (communicator_prepare.cc).
  Status prepare(Request* request, const char* algorithm);
  Status run(Request& request, CallerHooks* hooks);
  std::shared_ptr<Work> start(std::unique_ptr<Request> request);
  // Runs the call of this work on the calling thread, if it is small, the next, and begun by nobody. A larger
  // one is the progress thread's even when that is late: its waiter may leave it (Ctrl-C). `out`: how it
  // ended for this caller; kInterrupt: Ctrl-C came, and the communicator has failed.
  bool run_here(const Work& work, CallerHooks* hooks, Status* out);
  // Has the progress thread begin what is queued.
  void hurry();

  // Collective over this communicator. Negative color: this rank gets no child (null). `plan` must be the
  // same on all ranks: new_group's list, hashed.
  Status split(int64_t color, int64_t key, int64_t plan, CallerHooks* hooks,
               std::shared_ptr<Communicator>* out);
  // The communicator of the ranks that are left (engine/shrink.h), in their order here, without those of
  // `exclude`. Every one of them calls it, after a failure or not; this one is over then, but for close().
  Status shrink(const std::vector<int>& exclude, double timeout_s, CallerHooks* hooks,
                std::shared_ptr<Communicator>* out);
  void abort(const std::string& why);
  // Waits for what runs and what is queued (bounded by the timeout), then leaves; `why` is for peers that
  // still wait for this rank. Idempotent. kInterrupt: Ctrl-C came; the communicator was aborted, and is
  // closed all the same. What has not ended after limit_s is aborted, too.
  Status close(CallerHooks* hooks, double limit_s = INFINITY, const std::string& why = "");
  // Fails when closed, failed, or inherited by a forked child.
  Status check_usable() const;
  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  struct Job {
    std::unique_ptr<Request> request;
    std::shared_ptr<Work> work;
    bool small = false;          // whoever waits for it may run it
    double patient_until_s = 0;  // monotonic; the progress thread leaves it to the caller until then
  };
  Communicator() = default;
  Status prepare_across(Request* request, const char* algorithm);
  // `salt`: of its id; none of this communicator's other children has it.
  Status make_child(const std::vector<int>& members, const std::vector<uint64_t>& offsets, uint64_t salt,
                    std::shared_ptr<Communicator>* out);
  Status execute(Request& request, CallerHooks* hooks);
  // communicator_device.cc
  Status prepare_on_device(Request* request, const char* algorithm);
  void take_turn(Request* request);
  Status execute_on_device(Request& request, CallerHooks* hooks, double timeout_s);
  void fail_and_tell(const Status& why);
  Status device_trouble() const;
  Status make_device(int device);
  Status exchange(const void* mine, size_t n_bytes, void* all, CallerHooks* hooks, double timeout_s);
  Status compare_splits(const Call& call, CallerHooks* hooks, double timeout_s);
  Status enqueue(std::unique_ptr<Request> request, std::shared_ptr<Work> work, bool small);
  void serve();
  void wait_for_job(std::unique_lock<std::mutex>& lock);
  Status finish(Job job, CallerHooks* hooks);

  std::unique_ptr<Group> group_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<PointToPoint> p2p_;
  Selector selector_;
  std::unique_ptr<Hierarchy> hierarchy_;
  std::unique_ptr<Shrink> shrink_;
  std::vector<int> job_ranks_;  // with a hierarchy
  std::shared_ptr<Net> net_;
  uint64_t id_ = 0, n_splits_ = 0;
  std::atomic<bool> shrunk_{false};
  std::atomic<bool> closed_{false};

  // Whoever sets busy_ runs the engine. waiting_ counts queued jobs, and close(); both are sequentially
  // consistent, so an inline call that ends either sees the queued job or is seen by the progress thread.
  std::atomic<bool> busy_{false};
  std::atomic<int> waiting_{0};
  // Held from a call's turn on the device until its place among this communicator's calls (busy_, or in the
  // queue), so that both are in one order: else two threads' calls would wait for each other.
  std::mutex order_;
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<Job> queue_;
  bool stop_ = false;
  std::atomic<int> first_device_{-1};  // that of the first call on CUDA, which may still be queued
  DeviceTables device_tables_;
  std::atomic<bool> has_device_{false};
  mutable std::mutex device_mutex_;
  std::shared_ptr<DeviceEngine> device_;             // changed by whoever has set busy_, under the mutex
  bool was_shrunk_ = false;                          // it came of another one's shrink()
  std::shared_ptr<DeviceHeritage> device_heritage_;  // of that one, until the first call on CUDA
  CallerHooks* device_hooks_ = nullptr;              // of the call on CUDA that is being executed
  double device_timeout_s_ = 0;
  bool watching_ = false;  // the thread will look by itself, within kPatienceS
  std::thread thread_;
};

}  // namespace pycomm
