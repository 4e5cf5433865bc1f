// An operation: what a stream runs of a group, which is the transfers of all calls of one communicator.
//
// All of them progress together; it ends when everything that it sends has been read and everything that it
// expects has come. So, as with NCCL, calls that are grouped cannot wait for each other, and calls that are
// not, or operations that ranks issue in different orders, do. A device runs one operation at a time (unless
// ranks share it, see README.md): operations of several communicators in different orders on several ranks
// hang here for certain, where with NCCL they only may. A graph that an operation is captured into runs it
// anew at each replay; the other ranks' are then replayed too.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "comm.h"

namespace loopback {

enum class Kind : uint32_t { kSend, kRecv, kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce };

struct Call {
  Kind kind;
  const void* src;
  void* dst;
  size_t count;  // of a rank's block for reduce_scatter and all_gather
  nccl::DataType type;
  int op;    // nccl::RedOp, or one that was made
  int root;  // or the peer
  std::shared_ptr<Core> core;
  nccl::Stream stream;
};

// What goes before the data of a message, so that ranks that do not mean the same are found out.
struct Header {
  uint64_t n_bytes;
  uint32_t kind, type, op, root;
  uint64_t is_replayed;  // by a graph: all ranks' calls are, or none
  bool operator==(const Header&) const = default;
};

struct Transfer {
  Header header;
  char* data;
  size_t done = 0;  // of header and data
  size_t total() const { return sizeof(Header) + header.n_bytes; }
};

// The transfers with one peer in one direction, one after another.
struct Queue {
  Queue(Channel& c, int p, bool out) : channel(c), peer(p), sends(out) {}
  Channel& channel;
  int peer;
  bool sends;
  std::vector<Transfer> transfers;
  size_t at = 0;
  bool broken = false;
  bool done() const {
    if (at < transfers.size()) return false;
    return !sends ||
           channel.tail.load(std::memory_order_acquire) == channel.head.load(std::memory_order_relaxed);
  }
};

class Operation {
 public:
  explicit Operation(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  ~Operation() {
    if (is_replayed_) core_->release_graph();
  }

  void add(const Call& call) { calls_.push_back(call); }
  Core& core() { return *core_; }
  const std::vector<Call>& calls() const { return calls_; }
  // Whether NCCL would make connections first, which a non-blocking communicator does behind the caller's
  // back.
  bool must_connect() const;
  void connect();
  void capture() {
    is_replayed_ = true;
    core_->hold_graph();
  }
  void run();

 private:
  Queue& queue(int peer, bool sends, Lane lane);
  void send(const Call& call, int peer, const void* data, size_t n_bytes, Lane lane);
  void recv(const Call& call, int peer, void* data, size_t n_bytes, Lane lane);
  Header header(const Call& call, size_t n_bytes) const;
  Reduction reduction(const Call& call);
  void plan(const Call& call);
  void plan_reduction(const Call& call);
  void finish_reduction(const Call& call, const Reduction& r, const std::vector<std::vector<char>>& all);
  bool move(Queue& q);
  bool move_bytes(Queue& q, Transfer& t);
  void progress();
  void stall();

  std::shared_ptr<Core> core_;
  std::vector<Call> calls_;
  bool is_replayed_ = false;
  // Of one run:
  std::map<std::tuple<int, bool, Lane>, Queue> queues_;
  std::vector<std::function<void()>> endings_;
};

}  // namespace loopback
