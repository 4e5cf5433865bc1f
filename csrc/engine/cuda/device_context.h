// DeviceContext: what all communicators of a process share on one device.
//
// The communication stream and the reduce stream (streams.h), scratch memory that calls use one after the
// other (they are on one stream, so nothing else orders them), events, and the turns: every call takes the
// next number when its caller makes it, and is issued when all before it are. Programs that make the same
// calls in the same order on all ranks, over whatever communicators, therefore issue them in one order
// everywhere, without which NCCL and kernels that wait for peers deadlock.
//
// All of a process, whatever pycomm.init() they come from. A rank is a process; tests that have ranks as
// threads give each a device of its own. Scratch only grows, by a quarter at least: what was outgrown stays
// until the context goes, since cudaFree would wait for kernels that wait for peers. Any thread, but scratch
// and streams: by whoever holds issuing().
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "engine/cuda/streams.h"

namespace pycomm::cuda {

class HeldEvent;

class DeviceContext {
 public:
  // The one of this device, made when there is none.
  static Status get(int device, std::shared_ptr<DeviceContext>* out);
  // What is on its streams does not end: it stays until the process ends, and get() makes another one.
  static void keep(std::shared_ptr<DeviceContext> context);
  ~DeviceContext();

  int device() const { return device_; }
  DeviceStreams& streams() { return *streams_; }
  std::mutex& issuing() { return issuing_; }
  Status scratch(size_t n_bytes, std::byte** p);  // aligned to 256; kSystem: no memory, nothing has changed
  bool has_scratch(size_t n_bytes) const { return n_bytes <= n_scratch_bytes_; }

  Status take_event(Event* out);
  void give_event(Event event);
  // The end of the last call that was issued and not captured: all that calls have put on comm() so far comes
  // before it. Null: there was none.
  void note_end(std::shared_ptr<HeldEvent> event);
  std::shared_ptr<HeldEvent> last_end();

  uint64_t take_turn();
  void end_turn(uint64_t turn);
  // False after `slice_s` when it is not that one's yet.
  bool await_turn(uint64_t turn, double slice_s);

 private:
  explicit DeviceContext(int device) : device_(device) {}

  const int device_;
  std::unique_ptr<DeviceStreams> streams_;
  std::mutex issuing_;
  std::vector<void*> blocks_;  // the last one is in use
  size_t n_scratch_bytes_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  std::shared_ptr<HeldEvent> last_end_;
  uint64_t next_turn_ = 0, now_ = 0;
  std::set<uint64_t> ended_early_;  // turns behind now_ that are over
};

// An event of a context, which gets it back when nobody holds it any more; where the context is gone by then,
// it is destroyed. (Whoever needs the context as well holds that: it holds an event itself.)
class HeldEvent {
 public:
  static Status take(const std::shared_ptr<DeviceContext>& context, std::shared_ptr<HeldEvent>* out);
  ~HeldEvent();
  HeldEvent(const HeldEvent&) = delete;
  HeldEvent& operator=(const HeldEvent&) = delete;
  Event get() const { return event_; }

 private:
  HeldEvent(const std::shared_ptr<DeviceContext>& context, Event event)
      : context_(context), device_(context->device()), event_(event) {}
  const std::weak_ptr<DeviceContext> context_;
  const int device_;
  const Event event_;
};

}  // namespace pycomm::cuda
