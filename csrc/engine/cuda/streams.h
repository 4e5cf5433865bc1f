// DeviceStreams: the two streams of a device on which pycomm works, and the events between them.
//
// `comm` has everything that moves data between devices, in one order; `reduce` has the local kernels, so
// that they overlap with the next transfer. They are non-blocking streams: nothing orders them against the
// caller's but events. Used by one thread at a time; every call has the device set.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/kernels.h"

struct CUevent_st;

namespace pycomm::cuda {

using Event = CUevent_st*;

// Whether the stream is captured into a CUDA graph, so that what is put on it runs at the graph's replays,
// and not now. kValue when nothing can be put on it: its capture has been invalidated by something that CUDA
// does not allow, or it is the legacy default stream and another stream of the device is captured.
Status capture_state(Stream stream, const char* what, bool* captured);

class DeviceStreams {
 public:
  static Status make(int device, std::unique_ptr<DeviceStreams>* out);
  ~DeviceStreams();  // the work that is left ends first
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;

  int device() const { return device_; }
  Stream comm() const { return comm_; }
  Stream reduce() const { return reduce_; }
  // Event `number` happens when what is on the stream by now has ended. A wait means the last record before
  // it, so an event may be recorded again at once.
  Status record(Stream stream, size_t number);
  // What is put on the stream from now on begins after that.
  Status wait(Stream stream, size_t number);
  Status order(Stream earlier, Stream later, size_t number);  // record, then wait

  // Around each operation on comm(), so that operations pass one after another also where CUDA graphs hold
  // some: a replay comes after what was put on comm() before its launch, and before what is put there, or
  // launched, after it, whatever stream it was launched on. (NCCL does the same for its own.)
  Status begin_operation(const char* what);
  Status end_operation(const char* what);

 private:
  explicit DeviceStreams(int device) : device_(device) {}
  int device_;
  Stream comm_ = nullptr, reduce_ = nullptr;
  std::vector<Event> events_;
  Event turn_ = nullptr;  // recorded at the end of every operation
};

}  // namespace pycomm::cuda
