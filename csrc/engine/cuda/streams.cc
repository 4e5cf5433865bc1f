#include "engine/cuda/streams.h"

#include "transport/cuda/runtime.h"

namespace pycomm::cuda {

Status capture_state(Stream stream, const char* what, bool* captured) {
  cudaStreamCaptureStatus now = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &now);
  *captured = error == cudaSuccess && now == cudaStreamCaptureStatusActive;
  if (error == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();  // or the next launch would report it
    return Status::error(
        Code::kValue, format("%s on the default stream, while a stream that it waits for is captured into a "
                             "CUDA graph: call it on the captured stream, or capture a non-blocking stream",
                             what));
  }
  if (error == cudaSuccess && now == cudaStreamCaptureStatusInvalidated) {
    return Status::error(
        Code::kValue, format("%s cannot be captured: an earlier call has invalidated the capture of this "
                             "stream; end it, and leave out what CUDA does not allow in a graph (waiting for "
                             "the device, allocating, events of streams that are not captured)",
                             what));
  }
  return cuda_status(error, "cudaStreamIsCapturing");
}

Status DeviceStreams::make(int device, std::unique_ptr<DeviceStreams>* out) {
  const DeviceGuard guard(device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  std::unique_ptr<DeviceStreams> made(new DeviceStreams(device));
  for (Stream* s : {&made->comm_, &made->reduce_}) {
    PYCOMM_RETURN_IF_ERROR(
        cuda_status(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
  }
  PYCOMM_RETURN_IF_ERROR(cuda_status(cudaEventCreateWithFlags(&made->turn_, cudaEventDisableTiming),
                                     "cudaEventCreateWithFlags"));
  *out = std::move(made);
  return Status();
}

DeviceStreams::~DeviceStreams() {
  const DeviceGuard guard(device_);
  for (const Event e : events_) (void)cudaEventDestroy(e);
  if (turn_ != nullptr) (void)cudaEventDestroy(turn_);
  for (const Stream s : {comm_, reduce_}) {
    if (s != nullptr) (void)cudaStreamDestroy(s);
  }
}

Status DeviceStreams::record(Stream stream, size_t number) {
  while (events_.size() <= number) {
    Event e = nullptr;
    PYCOMM_RETURN_IF_ERROR(
        cuda_status(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
    events_.push_back(e);
  }
  return cuda_status(cudaEventRecord(events_[number], stream), "cudaEventRecord");
}

Status DeviceStreams::wait(Stream stream, size_t number) {
  return cuda_status(cudaStreamWaitEvent(stream, events_[number], 0), "cudaStreamWaitEvent");
}

// Within a capture the flags ask for nodes that wait and record at each replay.
Status DeviceStreams::begin_operation(const char* what) {
  bool captured = false;
  PYCOMM_RETURN_IF_ERROR(capture_state(comm_, what, &captured));
  return cuda_status(
      cudaStreamWaitEvent(comm_, turn_, captured ? cudaEventWaitExternal : cudaEventWaitDefault),
      "cudaStreamWaitEvent");
}

Status DeviceStreams::end_operation(const char* what) {
  bool captured = false;
  PYCOMM_RETURN_IF_ERROR(capture_state(comm_, what, &captured));
  return cuda_status(
      cudaEventRecordWithFlags(turn_, comm_, captured ? cudaEventRecordExternal : cudaEventRecordDefault),
      "cudaEventRecordWithFlags");
}

Status DeviceStreams::order(Stream earlier, Stream later, size_t number) {
  PYCOMM_RETURN_IF_ERROR(record(earlier, number));
  return wait(later, number);
}

}  // namespace pycomm::cuda
