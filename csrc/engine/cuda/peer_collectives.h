// Collectives over peers' memory (kernels/cuda/peer.h), as one rank of a machine calls them.
//
// A call cuts its message into tiles that fit half of the staging, and enqueues one launch a tile; nothing
// else happens on the host, no other rank is spoken to, and nothing is waited for. So all ranks must make the
// same calls in the same order with the same sizes, each on one stream at a time (calls on several streams
// need events between them). Tensors in PeerMemory are used where they lie when they are aligned to 16 bytes,
// others are staged; ranks may differ in that. Calls can be captured into CUDA graphs, since all numbering is
// the device's, and replayed between other calls, in the same order on all ranks. A graph holds addresses: of
// the tensors, of PeerMemory, of this object's pinned words; so it is replayed while all these live. A call
// that fails while it is captured has failed alone: nothing has run, and the communicator stays as it was.
//
// A watchdog thread reads what the kernels tell in pinned memory (no CUDA call, so it disturbs no capture).
// It says abort when a block has been waiting for timeout_s, or for the longest time that calls were
// allowed, when give_up() is called, when a kernel has stopped by itself (its peers have, or called something
// else), or when trouble() has news; the kernels then end within microseconds, saying whom they waited for.
// So a replay, which nobody else watches, has the longest limit of the calls before it. A failed
// PeerCollectives stays failed: each call returns the same Status. What a call has written is valid when its
// stream has passed it and failure() is OK after that.
//
// Methods may be called from any thread, collectives by one thread at a time. Sizes are bytes or elements, as
// named. Cost of a launch: kOneShot one meeting of the blocks, the rest one or two (kernels/cuda/peer.cuh).
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "kernels/cuda/peer.h"
#include "transport/cuda/peer_memory.h"

namespace pycomm {

// All_reduce and broadcast have two ways; kAuto takes the one-shot for small messages.
enum class PeerWay : uint8_t { kAuto, kOneShot, kTwoShot };

struct PeerOptions {
  double timeout_s = 300;  // allow() may make it longer
  // Alike on all ranks (create refuses otherwise):
  size_t half_bytes = size_t{16} << 20;  // of staging; multiple of 256
  unsigned max_blocks = cuda::kMaxPeerBlocks;
  unsigned n_threads = cuda::kMaxPeerThreads;
  size_t one_shot_bytes = size_t{256} << 10;  // kAuto: at most that many
  // If any rank says so: all write to peers, one at a time, instead of reading. So where some peer is reached
  // over PCIe.
  bool push = false;
  // Called by the watchdog. describe: "rank 3 (host b, pid 811)"; trouble: not OK when a peer is lost.
  std::function<std::string(int)> describe;
  std::function<Status()> trouble;
};

class PeerCollectives {
 public:
  // What PeerMemory must reserve, and how much of that be zero.
  static size_t reserved_bytes(size_t half_bytes);
  static size_t zero_bytes();

  // Collective. `memory` outlives this object, and has 1 to 8 ranks. Makes a call that shows whether the
  // memory works; kSystem on all ranks where it does not.
  static Status create(PeerMemory* memory, const PeerOptions& options, const Exchange& exchange,
                       std::unique_ptr<PeerCollectives>* out);
  // Stops the watchdog. The streams must have passed all calls (abort() makes them pass).
  ~PeerCollectives();

  // out may be in, exactly. scalar: what avg divides by, or premul_sum multiplies with.
  Status all_reduce(const void* in, void* out, size_t n_elems, DType dtype, ReduceOp op, double scalar,
                    PeerWay way, cuda::Stream stream);
  // in: n_ranks * n_elems; out: n_elems, may be this rank's part of in, exactly.
  Status reduce_scatter(const void* in, void* out, size_t n_elems, DType dtype, ReduceOp op, double scalar,
                        cuda::Stream stream);
  // in: n_bytes, may be this rank's part of out, exactly; out: n_ranks * n_bytes.
  Status all_gather(const void* in, void* out, size_t n_bytes, cuda::Stream stream);
  Status broadcast(void* data, size_t n_bytes, int root, PeerWay way, cuda::Stream stream);

  bool pushes() const { return push_; }
  // From here on blocks may wait so long, if that is longer than before.
  void allow(double timeout_s);
  // The time of a call that is under way, which was waited_s, is over: its kernel stops, and failure() will
  // name whom it waited for. False: none waits here, so this rank or nobody is to blame.
  bool give_up(double waited_s);
  Status failure() const;  // OK while usable
  // Kernels stop waiting, here at once, at peers when they meet this rank next. The first reason stays.
  void abort(Status why);
  // Its kernels may still run, or begin to: what they touch is kept until the process ends
  // (PeerMemory::keep), and nothing is watched any more.
  static void keep(std::unique_ptr<PeerCollectives> peers);

 private:
  PeerCollectives(PeerMemory* memory, const PeerOptions& options)
      : memory_(memory), options_(options), limit_s_(options.timeout_s) {}
  Status allocate_words();
  Status agree_on_options(Status mine, const Exchange& exchange);
  Status prove(const Exchange& exchange);  // peer_proof.cc
  // What a collective hands to its launches; key tells dtype and operation apart.
  struct Message {
    cuda::PeerKind kind;
    const char* in;
    char* out;
    uint64_t n_bytes;  // all_reduce, broadcast: of all; else of one rank
    int root = 0;
    uint64_t key = 0;
  };
  using Launch = std::function<Status(const cuda::PeerCall&, unsigned n_blocks)>;
  Status run(const char* what, const Message& message, cuda::Stream stream, const Launch& launch);
  uint64_t tile_bytes(cuda::PeerKind kind) const;
  cuda::PeerCall tile_of(const Message& message, uint64_t begin, uint64_t n_bytes, unsigned* n_blocks) const;
  uint64_t place_of(const void* p, size_t n_bytes) const;
  Status check_reduce(const char* what, DType dtype, ReduceOp op) const;

  bool is_idle() const;  // no block waits
  void watch();
  void end_watch();
  bool look(double now_s);
  Status told_by_kernels(const Status& otherwise) const;
  std::string name(int rank) const;

  PeerMemory* const memory_;
  const PeerOptions options_;
  unsigned max_blocks_ = 1;
  bool push_ = false;
  cuda::PeerWords* words_ = nullptr;         // as the host sees them
  cuda::PeerWords* device_words_ = nullptr;  // as the device does

  struct Seen {
    uint64_t entered = 0;
    double since_s = 0;
  };
  std::atomic<double> limit_s_;
  std::atomic<double> given_up_s_{0};  // give_up() was called: what was waited; 0: it was not
  Seen seen_[cuda::kMaxPeerBlocks];    // the watchdog's
  double waited_s_ = 0;                // that which it gave up for
  double gave_up_s_ = 0;               // when it said abort at a deadline; 0: it has not
  double ending_since_s_ = 0;          // when it saw a kernel stop; 0: none has

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  mutable std::condition_variable failure_known_;
  Status failure_;
  std::atomic<bool> failed_{false};
  bool stop_ = false;
  std::thread watchdog_;
};

}  // namespace pycomm
