// What a DeviceEngine consists of (engine/device_engine.h): shared by the files device_*.cc.
//
//   device_engine.cc   what a communicator has: peers' memory, NCCL
//   device_choice.cc   which way serves a call: tables, and what each way can do
//   device_issue.cc    one call, from its turn to its end
//   device_coded.cc    all_gather of codes
//   device_staged.cc   the collectives that peers' memory has not, made of those that it has
//   device_watch.cc    what goes wrong after a call was issued
//   device_end.cc      turns and ends
//   device_context.cc  what communicators share
//   device_arena.cc    memory that peers reach: when it may be used again
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/cuda/device_arena.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/nccl_native.h"
#include "engine/cuda/nccl_rounds.h"
#include "engine/cuda/peer_collectives.h"
#include "engine/device_engine.h"
#include "transport/cuda/peer_memory.h"
#include "transport/cuda/runtime.h"

namespace pycomm {

// Why the communicator has failed on the device; ends of calls outlive the engine, and look here. The first
// to find it calls `tell`, before anybody sees it: a rank that has seen it may leave, and then its peers
// would know that only.
struct DeviceFailure {
  std::function<void(const Status&)> tell;  // the peers; none after the engine
  std::atomic<bool> failed{false};
  std::atomic<double> at_s{0};
  std::mutex mutex;
  Status why;

  Status get() {
    if (!failed.load(std::memory_order_acquire)) return Status();
    const std::lock_guard lock(mutex);
    return why.clone();
  }
  void set(const Status& s) {  // the first one stays
    const std::lock_guard lock(mutex);
    if (failed.load(std::memory_order_relaxed)) return;
    why = s.clone();
    if (tell) tell(why);
    at_s.store(monotonic_s());
    failed.store(true, std::memory_order_release);
  }
  void forget_engine() {
    const std::lock_guard lock(mutex);
    tell = nullptr;
  }
};

struct DeviceTurn::Impl {
  std::shared_ptr<cuda::DeviceContext> context;
  std::shared_ptr<cuda::HeldEvent> ready;  // what was on the caller's stream before
  bool is_captured = false;                // the caller's stream is, into a CUDA graph
  uint64_t turn = 0;
};

struct DeviceEnd::Impl {
  std::shared_ptr<cuda::DeviceContext> context;
  std::shared_ptr<DeviceFailure> failure;
  std::shared_ptr<cuda::HeldEvent> event;
  bool is_captured = false;  // then the event is the graph's, and nobody can ask it
  void* caller = nullptr;    // whose stream
  std::atomic<bool> is_ordered{false};
  bool ask() const;  // whether the event has passed; an error of the device fails the communicator
};

// NCCL's communicator, with nothing under way on it.
struct DeviceHeritage {
  nccl::NcclComm comm;
  std::vector<int> excluded;  // of its ranks
};

struct DeviceEngine::Impl {
  Link link;
  int device = 0;
  std::shared_ptr<cuda::DeviceContext> context;
  std::shared_ptr<DeviceFailure> failure = std::make_shared<DeviceFailure>();

  std::shared_ptr<PeerMemory> memory;  // tensors in it hold it, and so does whatever frees it after the end
  std::unique_ptr<PeerCollectives> peers;
  std::shared_ptr<cuda::DeviceArena> arena;  // where there are peers
  std::string why_no_peers;

  bool has_nccl = false;  // on all ranks, and devices that it takes
  std::string why_no_nccl, nccl_text;
  std::mutex history_mutex;
  std::string history;  // how NCCL's communicator was made where not anew, and what its abort has left behind
  // Whoever issues a call holds context->issuing() and then this. What ends calls takes this one only: the
  // issuing thread may be kept by another communicator's, or in a launch, whose queue is full.
  std::mutex comm_mutex;
  nccl::NcclComm comm;  // made by the first call that needs it
  std::atomic<bool> comm_is_revoked{false};
  std::atomic<bool> has_comm{false};
  std::unique_ptr<cuda::NcclRounds> rounds;
  std::mutex plans_mutex;  // ways() asks from any thread
  std::map<std::tuple<int, int, bool>, std::unique_ptr<cuda::RoundPlan>> plans;  // algorithm, root, in place

  // ---- device_engine.cc
  Status make_peers();
  Status need_nccl(double timeout_s);
  Status make_nccl(double timeout_s);
  Status inherit_nccl(double timeout_s);
  Status all_good(Status mine);
  nccl::Patience patience(double timeout_s);

  // ---- device_choice.cc
  // kOk, or why this way cannot run the call: "all_reduce/ring …: why".
  Status supports(const Call& call, uint8_t way);
  std::vector<uint8_t> schedules_for(const Signature& sig) const;
  Status choose(const DeviceTables& tables, Call* call);
  Status plan_of(const Call& call, uint8_t algorithm, bool in_place, const cuda::RoundPlan** out);

  // ---- device_issue.cc
  // Contiguous memory of the call: the tensors' own, or what they are packed into.
  struct Plain {
    const std::byte* in = nullptr;
    std::byte* out = nullptr;
  };
  Status can_be_captured(const Call& call);
  Status agree_to_capture(const Call& call);
  Status issue(const Call& call, bool is_captured, double timeout_s);
  Status issue_behind(const DeviceTurn& turn, const Call& call, double timeout_s);
  Status mark_end(bool is_captured, bool is_whole, const Call& call, std::shared_ptr<DeviceEnd>* end);
  Status alone(const Call& call, const Plain& plain);
  Status by_way(const Call& call, const Plain& plain, std::byte* scratch, double timeout_s);
  bool needs_nccl(const Call& call) const;
  struct Room {
    size_t packed_in = 0, packed_out = 0;
    size_t way = 0;                // of scratch: what the way needs
    std::byte* packing = nullptr;  // in memory that peers reach; null: packed in scratch, too
    size_t scratch() const { return way + (packing == nullptr ? packed_in + packed_out : 0); }
  };
  Status find_room(const Call& call, bool is_captured, Room* out);
  static Call as_sum(const Call& call);
  Status multiplied_by_peers(const Call& call, const Plain& plain, std::byte* scratch);
  Status by_rounds(const Call& call, const Plain& plain, std::byte* scratch, double timeout_s);
  cuda::RoundsCall rounds_call(const Call& call, const Plain& plain, const cuda::RoundPlan* plan) const;
  cuda::NativeCall native_call(const Call& call, const Plain& plain) const;
  static cuda::AllToAll all_to_all(const Call& call, const Plain& plain) {
    return {plain.in, plain.out, call.send_counts, call.recv_counts, call.sig.dtype};
  }
  Status scratch_bytes(const Call& call, size_t* out);
  bool in_place(const Call& call, const Plain& plain) const;
  Status copy(void* to, const void* from, size_t n_bytes) const;
  Status gather_pieces(const Buffer& from, std::byte* to, DType dtype) const;
  Status spread_pieces(const std::byte* from, const Buffer& to, DType dtype) const;
  cuda::Stream stream() const { return context->streams().comm(); }

  // ---- device_coded.cc
  Status coded_scratch_bytes(const Call& call, size_t* out);
  Status gather_coded(const Call& call, const Plain& plain, std::byte* scratch, double timeout_s);

  // ---- device_staged.cc
  size_t staged_bytes(const Call& call) const;
  Status by_peers(const Call& call, const Plain& plain, std::byte* scratch);

  // ---- device_watch.cc
  struct Pending {
    std::shared_ptr<DeviceEnd> end;
    std::shared_ptr<cuda::HeldEvent> ready;
    double limit_s, until_s;
    std::string what;
  };
  std::mutex watch_mutex;  // of all below
  std::condition_variable watch_changed;
  std::deque<Pending> pending;
  uint64_t n_passed = 0;      // calls that were not captured
  bool has_captured = false;  // graphs may replay calls at any time
  bool stop = false;
  std::thread watcher;
  void watch_for(std::shared_ptr<DeviceEnd> end, std::shared_ptr<cuda::HeldEvent> ready, double timeout_s,
                 const Call& call);
  void watch_replays();
  void begin_watch();
  void watch();
  Status note_passed(std::unique_lock<std::mutex>& lock);
  Status overdue();
  Status look();
  Status named(Status s);
  void fail(const Status& why);
  std::unique_lock<std::mutex> lock_comm();
  void end_nccl();
  bool is_busy();
  bool await_end();
  void keep();
  void end();
};

// The length of rank q's part, and where it begins: of a call with counts.
struct CallParts {
  CallParts(const Call& call, int n_ranks);
  std::vector<uint64_t> len, start;
  uint64_t longest = 0;
  bool equal = true;
};

}  // namespace pycomm
