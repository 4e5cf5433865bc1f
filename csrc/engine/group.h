// The ranks of one communicator as seen from one of them: control blocks, waiting, and what went wrong.
//
// Ranks here are the communicator's; `node_rank` maps them to the node's. A Group is used by one thread at a
// time, except `abort`, `fail` and `failure`, which any thread may call. Once failed, a group stays failed:
// every later call returns the same status, and peers that wait see our state and fail too, naming the cause.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/board.h"
#include "engine/call.h"
#include "engine/control.h"
#include "transport/node.h"

namespace pycomm {

// What the calling thread needs while it blocks (null on progress threads).
class CallerHooks {
 public:
  virtual ~CallerHooks() = default;
  virtual void before_block() = 0;  // may be called several times
  virtual Status poll() = 0;        // Ctrl-C
};

// A control block in this rank's arena, its flags zero. A node's first block is one already.
Status allocate_control(Node& node, uint64_t* offset);

class Group {
 public:
  // `controls`: the offset of every rank's control block in its arena (allocate_control).
  Group(std::shared_ptr<Node> node, std::vector<int> node_ranks, int rank, double timeout_s,
        const std::vector<uint64_t>& controls);
  ~Group();

  // In a communicator of several hosts a group is the ranks of one of them: what its ranks are called there.
  void set_names(std::vector<int> names) { names_ = std::move(names); }
  int name(int q) const { return names_.empty() ? q : names_[static_cast<size_t>(q)]; }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(node_ranks_.size()); }
  const std::shared_ptr<Node>& node() const { return node_; }
  int node_rank(int q) const { return node_ranks_[q]; }
  std::byte* arena_base(int q) const { return bases_[q]; }
  Control& control(int q) const { return *controls_[q]; }
  Control& own() const { return *controls_[rank_]; }
  const WaitPolicy& policy() const { return policy_; }
  void set_policy(WaitPolicy p) { policy_ = p; }
  double timeout_s() const { return timeout_s_; }
  void set_timeout_s(double s) { timeout_s_ = s; }

  // Marks this rank as gone: peers that still need it get PeerLostError, with `why` where it says something.
  void leave(const std::string& why);
  void abort(const std::string& why);
  // Records the first failure and shows it to the peers.
  void fail(const Status& status);
  Status failure() const;  // ok while usable; `left_out` counts more than what came before
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // What a shrink has decided on this host, if anything.
  Board& board() { return board_; }
  // The others went on without this rank (engine/shrink.h): says so; else ok.
  Status left_out() const;

  // A word that peers may read at any time, whatever this rank is in: 0 at first.
  void set_note(uint64_t note);
  uint64_t note(int q) const { return control(q).note.word.load(std::memory_order_relaxed); }

  // The first rank here that has failed, as an error; OK: none has.
  Status failed_peer(const std::string& here) const;
  // The first rank here that has died without leaving, as an error; OK: none has.
  Status dead_peer(const std::string& here) const;
  // What makes it hopeless to wait for `peer` (-1: any of them): a rank that failed, or the peer has gone.
  // `progress` is added where this rank saw it first.
  Status trouble(int peer, const std::string& here, const std::string& progress) const;

  // ---- what a rank is in (Shown), and what is said of it ----
  void enter(CallKind kind, uint32_t number) {
    own().shown.call.store(Shown::kInside | static_cast<uint64_t>(kind) << 32 | number,
                           std::memory_order_relaxed);
  }
  void exit() {
    auto& call = own().shown.call;
    call.store(call.load(std::memory_order_relaxed) & ~Shown::kInside, std::memory_order_relaxed);
  }
  bool across_hosts() const { return !names_.empty(); }
  // `name`: the rank in the communicator; -1: anybody.
  void show_wait(int name, double since_s);
  void show_no_wait() { own().shown.waits_for.store(0, std::memory_order_relaxed); }
  void show_transfer(bool is_send, int name, double since_s);
  void show_no_transfer() { own().shown.transfer.store(0, std::memory_order_relaxed); }
  void show_device(uint64_t n_reached, uint64_t n_passed) {
    own().shown.device_reached.store(n_reached, std::memory_order_relaxed);
    own().shown.device_passed.store(n_passed, std::memory_order_relaxed);
  }
  // The ranks whose devices keep that call on CUDA (from 1 on) from ending, and how: those that have not come
  // to it, or else have not ended it where others have. "": all are in it.
  std::string devices_behind(uint64_t call) const;
  // Lets `pycomm ps` find this rank, until it leaves.
  void introduce(const std::string& job, const std::string& label, int rank, int size, int job_rank);
  std::string own_call() const;  // "all_reduce #12"
  uint32_t own_number() const {
    return static_cast<uint32_t>(own().shown.call.load(std::memory_order_relaxed));
  }
  // "is stopped (SIGSTOP)", "is sleeping and has not entered this call (its last: broadcast #11)"; `number`:
  // of the call in which it is waited for, 0: none.
  std::string state(int q, uint32_t number) const;
  // The same without the process and its last call.
  std::string where(int q, uint32_t number) const;
  // Says once that this rank has waited so long; `who` with what is known of it.
  void say_late(double waited_s, const std::string& here, const std::string& who) const;

  // "rank 3 (host b, pid 811)"
  std::string who(int q) const;
  // "rank 3 (host b, pid 811, sleeping)"
  std::string describe(int q) const;
  // What q entered last: "all_reduce/ring(…) #1042".
  std::string last_call(int q) const;

 private:
  void unlist();
  const char* gone(int q) const;                  // how, null while it is there
  void tell(char code, const std::string& text);  // into `failure`, for the peers

  uint64_t control_offset_ = 0;

  std::shared_ptr<Node> node_;
  std::vector<int> node_ranks_;
  std::vector<int> names_;
  int rank_ = 0;
  double timeout_s_ = 300;
  WaitPolicy policy_;
  std::vector<Control*> controls_;
  std::vector<std::byte*> bases_;
  std::vector<std::shared_ptr<PeerArena>> mappings_;  // the node may let go of dead peers
  Board board_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Status failure_;
};

// When a person is told of one wait: after 5 s, 10 s, 20 s …
class Late {
 public:
  static constexpr double kFirstS = 5;
  static constexpr double kAskS = 3.8;  // on another host: an answer shall be there by then
  bool due(double waited_s) {
    if (waited_s < next_s_) return false;
    while (next_s_ <= waited_s) next_s_ *= 2;
    return true;
  }
  void restart() { next_s_ = kFirstS; }
  bool said() const { return next_s_ > kFirstS; }

 private:
  double next_s_ = kFirstS;
};

// A call that may have to wait: the deadline of each wait, and all that ends one early.
class Waiting final : public WaitClient {
 public:
  // How far the call is, for errors; n_rounds 0: not known.
  struct Progress {
    uint32_t round = 0, n_rounds = 0;
    uint64_t n_bytes = 0, of_bytes = 0;
  };
  Progress progress;

  Waiting(Group& group, CallerHooks* hooks, double timeout_s, const char* what, const char* algorithm,
          uint32_t call)
      : group_(group),
        hooks_(hooks),
        timeout_s_(timeout_s),
        what_(what),
        algorithm_(algorithm),
        call_(call) {}
  void before_block() override;
  Status check(int peer) override;  // peer -1: any of them
  std::string here() const;         // "all_reduce/ring #1042"

  // Waits until `word` of `peer` fulfils `ready`.
  template <class Ready>
  Status until(const std::atomic<uint64_t>& word, Half half, int peer, Ready ready) {
    Status s = wait(word, half, group_.control(peer).sleepers, ready, group_.policy(), *this, peer);
    if (shown_) [[unlikely]]
      show_end();
    return s;
  }

 private:
  void show_end();
  std::string progress_text() const;  // "; round 5 of 14, 49152 of 65536 bytes done"

  Group& group_;
  CallerHooks* hooks_;
  double timeout_s_;
  const char* what_;
  const char* algorithm_;  // null: none
  uint32_t call_;
  double started_s_ = 0;
  bool shown_ = false;
  Late late_;
};

double monotonic_s();

}  // namespace pycomm
