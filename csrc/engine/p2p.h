// send and recv between two ranks of a communicator, matched by (source, tag) in order.
//
// A message travels in cells through the pipe of the sender to the receiver (engine/pipes.h); the receiver's
// mailbox (engine/mailbox.h) finds the recv that it is for. A message that nobody has asked for yet is
// drained into memory of the receiver, so that two large sends with tags in the other order, or isend and
// irecv on both sides, cannot deadlock, and copied out when the recv comes.
//
// Transfers progress independently of collectives: in every call, in whoever waits, and in a progress thread
// that is started by the first isend or irecv that cannot finish at once. The thread stands aside while
// callers come and wait, who do all of its work (two threads that wake for each message cost more than the
// message); it takes over when none has come for kStandAsideS, at once when a send has not found room.
// Thread-safe. Cost: each byte is copied twice, in cells that stay in cache.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/far.h"
#include "engine/mailbox.h"
#include "engine/pipes.h"

namespace pycomm {

inline constexpr double kStandAsideS = 200e-6;
// How long after the last call came it looks that often, so that the next one needs not wake it.
inline constexpr double kStandByS = 20e-3;

class PointToPoint {
 public:
  explicit PointToPoint(Group& group);
  // Of a communicator of several hosts: `local_of` gives the group's rank of each of its ranks, -1 for those
  // on other hosts, which are reached through the net.
  PointToPoint(Group& group, int rank, std::vector<int> local_of, std::shared_ptr<Net> net, uint64_t id,
               std::vector<int> job_ranks);
  ~PointToPoint();

  // peer -1 (recv only): any source. n_bytes is the whole contiguous message; dtype is compared.
  std::shared_ptr<Work> send(int peer, int tag, DType dtype, const void* data, size_t n_bytes,
                             double timeout_s);
  std::shared_ptr<Work> recv(int peer, int tag, DType dtype, void* data, size_t n_bytes, double timeout_s);
  // Blocks until the work of a blocking call is done, moving data itself.
  Status finish(const std::shared_ptr<Work>& work, CallerHooks* hooks);
  // Likewise for an asynchronous one, which goes on after Ctrl-C (kInterrupt), and when timeout_s is over
  // (negative: never; to a tenth of a second): `finished` is false then.
  Status await(const Work& work, CallerHooks* hooks, double timeout_s, bool* finished);
  // Has the thread take over at once: nobody comes to wait.
  void hurry();
  // Lets the progress thread take care of what is pending.
  void in_background();
  void stop();
  // Tells the ranks of other hosts, too, that this one is gone.
  void leave(const std::string& why);

 private:
  struct Message {  // being sent
    int tag;
    DType dtype;
    const std::byte* data;
    size_t n_bytes;
    size_t sent = 0;
    bool begun = false;
    double deadline_s;
    std::shared_ptr<Work> work;
  };
  friend class Far;
  class Finisher;  // a caller that waits in finish()

  Status check_usable() const;
  bool is_far(int peer) const { return local_of_[static_cast<size_t>(peer)] < 0; }
  // Far's: a send to another host begins (false: it has failed) and ends; a piece of a message has come.
  bool begin_far(Work& work);
  void end_far(Work& work);
  void add_far(int from, const CellHeader& header, const std::byte* data);
  // What this rank sent is no piece of a message.
  void fail_far(int from, uint64_t n_bytes, uint64_t n_awaited);
  void no_memory();
  Status hopeless(int peer, const std::string& here) const;
  std::string describe(int peer) const;
  std::string who(int peer) const;  // without its state
  bool progress();
  bool push(int to);
  bool pull(int from);
  void complete(const Arrival& a);
  // What a caller waits for.
  struct Awaited {
    bool is_send = false, found = false;
    int peer = -1, tag = 0;
    double deadline_s = 0;
  };
  Awaited awaited(const Work& work) const;
  Status find_hopeless() const;
  void expire();
  void fail_all(const Status& status);
  void serve();
  bool stand_aside(std::unique_lock<std::mutex>& lock);

  Group& group_;
  int rank_;
  std::vector<int> local_of_;
  std::mutex mutex_;
  std::condition_variable cv_;
  Pipes pipes_;
  Mailbox mailbox_;
  std::vector<std::deque<Message>> outbound_;  // to each rank
  int active_ = 0;                             // pending transfers
  int sending_ = 0;                            // of them: sends
  double expired_at_s_ = 0;
  bool background_ = false;
  std::atomic<bool> resting_{false};  // the thread looks only when it is told to, not every kStandAsideS
  uint64_t calls_seen_ = 0;           // by the thread
  std::atomic<uint64_t> calls_{0};    // so far, of send, recv and finish
  std::atomic<int> callers_{0};       // in finish
  bool stop_ = false;
  bool ended_ = false;  // all transfers were failed, and no cell is touched any more
  std::thread thread_;
  std::map<int, std::string> known_;  // what ranks of other hosts do, in words: of those that are waited for
  std::unique_ptr<Far> far_;          // null: all ranks are on this host
};

}  // namespace pycomm
