// Stream capture: what stream.cc, grid.cc and memory.cc ask before they do something.
//
// While a stream is captured, what is put on it becomes a node of a graph and does not run. A node comes
// after the *tips* of its stream: the nodes that the stream has come to. An event that is recorded in a
// captured stream holds its tips; a stream that waits for it joins the capture, and has these tips from then
// on. What CUDA does not allow within a capture returns CUDA's error and invalidates the captures concerned.
//
// Functions named capture_… say whether the stream is captured, and what became of it; those named check_…
// whether the host may do it. All may be called from any thread, and take no other lock of the shim.
#pragma once

#include <functional>
#include <optional>

#include "cuda_runtime_api.h"

namespace cuda_on_cpu {

using Task = std::function<void()>;
// Called by each launch of a graph, before it returns: makes the task of this replay.
using MakeTask = std::function<Task()>;

// Nothing where the stream is not captured: the caller does what was asked for. Else it is done, or refused.
using Captured = std::optional<cudaError_t>;

Captured capture_task(cudaStream_t stream, const Task& task);
Captured capture_made_task(cudaStream_t stream, const MakeTask& make);
Captured capture_record(cudaStream_t stream, cudaEvent_t event);
Captured capture_wait(cudaStream_t stream, cudaEvent_t event);
bool is_captured(cudaStream_t stream);

// The host asks for the state of a stream or an event, or waits for it.
cudaError_t check_host_sees(cudaStream_t stream);
cudaError_t check_host_sees(cudaEvent_t event);
// It waits for the whole current device.
cudaError_t check_host_waits_for_device();
// A call that is not put on a stream, such as cudaMalloc: the modes of captures and of the thread decide.
cudaError_t check_unsafe_call();
// A copy or a memset that waits for its end: it goes over the legacy stream.
cudaError_t check_synchronous_copy();

// The handle is destroyed. A capture that the stream is part of is invalidated.
void forget(cudaStream_t stream);
void forget(cudaEvent_t event);  // or recorded by what is not a capture

}  // namespace cuda_on_cpu
