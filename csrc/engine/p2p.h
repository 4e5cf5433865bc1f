// send and recv between two ranks of a communicator, matched by (source, tag) in order.
//
// Each rank owns a *pipe* to every peer: a ring of kCells cells in its arena, filled by it and drained by the
// peer. A message is cut into cells; the first carries tag and size. A message that nobody has asked for yet
// is drained into memory of the receiver (so that two large sends with tags in the other order, or isend and
// irecv on both sides, cannot deadlock) and copied out when the recv comes. Every rank has one *bell*, rung
// by a peer that filled or drained a cell of a pipe between the two; whoever waits here sleeps on it.
//
// Transfers progress independently of collectives: in the blocking call that waits, and in a progress thread
// that is started by the first isend or irecv that cannot finish at once. Thread-safe.
// Cost: each byte is copied twice, in cells that stay in cache.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/group.h"

namespace pycomm {

class Work;

class PointToPoint {
 public:
  explicit PointToPoint(Group& group);
  ~PointToPoint();

  // peer -1 (recv only): any source. n_bytes is the whole contiguous message; dtype is compared.
  std::shared_ptr<Work> send(int peer, int tag, DType dtype, const void* data, size_t n_bytes,
                             double timeout_s);
  std::shared_ptr<Work> recv(int peer, int tag, DType dtype, void* data, size_t n_bytes, double timeout_s);
  // Blocks until the work is done, moving data itself.
  Status finish(const std::shared_ptr<Work>& work, CallerHooks* hooks);
  // Lets the progress thread take care of what is pending.
  void in_background();
  void stop();

 private:
  struct Pipe;
  struct Message;  // being sent
  struct Posted;   // a recv that has found no message yet
  struct Arrival;  // a message that is arriving or has arrived
  struct Inbound;  // what comes from one peer
  class Finisher;  // a caller that waits in finish()

  Status open_pipes();
  Status check_usable() const;
  Pipe* pipe(int owner, int to) const;
  bool progress();
  bool push(int to);
  bool pull(int from);
  void begin_arrival(int from, Inbound& in, const void* cell);
  void complete(Arrival& a);
  void deliver(Arrival& a, const Posted& p);
  void ring(int q);
  Status find_hopeless() const;
  void expire();
  void fail_all(const Status& status);
  void serve();

  Group& group_;
  std::mutex mutex_;
  std::condition_variable cv_;
  uint64_t pipes_offset_ = 0;
  std::vector<std::deque<Message>> outbound_;
  std::vector<std::unique_ptr<Inbound>> inbound_;
  std::list<Posted> posted_;
  std::list<std::shared_ptr<Arrival>> unexpected_;  // in order of arrival, over all sources
  int active_ = 0;                                  // pending transfers
  double expired_at_s_ = 0;
  bool background_ = false;
  bool stop_ = false;
  bool ended_ = false;  // all transfers were failed, and no cell is touched any more
  std::thread thread_;
};

}  // namespace pycomm
