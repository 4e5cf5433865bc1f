// The outcome of an asynchronous call, and a queue that tells one listener of many outcomes.
//
// A Work ends once, well or badly. Any number of threads may wait for it; a listener that must not block on
// one of many (Python's thread that completes Futures) has each announced to its Completions instead. Who
// waits for a small call that nobody has begun runs it (Communicator::run_here), and who waits for a transfer
// moves its data (PointToPoint::await): two switches of threads cost more than the call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "engine/device_engine.h"
#include "engine/group.h"

namespace pycomm {

class Communicator;

class Completions {
 public:
  void push(uint64_t id);
  void stop();
  // The next id, in the order of completion; false after stop(), when none is left.
  bool pop(uint64_t* id);

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<uint64_t> ids_;
  bool stop_ = false;
};

class Work {
 public:
  void finish(Status status);
  // A call on device tensors is done when the device has passed it; wait() waits until it is issued only.
  bool done() const { return issued() && (end_ == nullptr || end_->passed()); }
  // Nobody uses the tensors any more; after a failure the device may, for a while.
  bool over() const { return issued() && (end_ == nullptr || end_->over()); }
  bool issued() const { return done_.load(std::memory_order_acquire); }
  void set_end(std::shared_ptr<DeviceEnd> end) { end_ = std::move(end); }  // before finish()
  const std::shared_ptr<DeviceEnd>& end() const { return end_; }           // null before it is issued
  // Of whose queue it is, or (send, recv) whose transfer; before the work is shown to anybody.
  void set_communicator(std::weak_ptr<Communicator> communicator, bool is_transfer = false) {
    communicator_ = std::move(communicator);
    is_transfer_ = is_transfer;
  }
  // Waits at most timeout_s (negative: for ever); false when the time is over. `hooks` as in Engine::run.
  // In a forked child a work of its parent's that has not ended is an error: nobody will end it there.
  Status wait(double timeout_s, CallerHooks* hooks, bool* finished);
  // Pushes `id` when the call ends, at once when it has.
  void announce(std::shared_ptr<Completions> completions, uint64_t id);
  Status result() const;
  int source = -1;  // recv: who sent

 private:
  void hurry() const;
  bool forked() const { return fork_generation_ != pycomm::fork_generation(); }

  std::atomic<bool> done_{false};
  std::weak_ptr<Communicator> communicator_;
  bool is_transfer_ = false;
  const uint64_t fork_generation_ = pycomm::fork_generation();
  mutable std::mutex mutex_;
  std::condition_variable cv_;
  Status status_;
  std::shared_ptr<DeviceEnd> end_;
  std::deque<std::pair<std::shared_ptr<Completions>, uint64_t>> listeners_;
};

}  // namespace pycomm
