// Grids, streams and errors: what lies between a launch and the blocks of block.h.
//
// A stream is an OS thread that takes tasks from a queue in order; a grid is a task that runs its blocks on
// worker threads and ends when all have. So work on different streams overlaps for real, and only events,
// synchronisation and the order of one stream order it. The null stream is a stream of its own here, which
// synchronises with no other: stricter than CUDA's.
#pragma once

#include <functional>
#include <memory>

#include "block.h"
#include "cuda_runtime_api.h"

namespace cuda_on_cpu {

constexpr int kMultiprocessors = 16;
constexpr int kResidentBlocks = 4 * kMultiprocessors;  // a resident launch of more is refused

// The launch of a kernel that is n-th from now on, by whatever thread, is refused.
void refuse_launch(int n);
cudaError_t enqueue_grid(const LaunchShape& shape, bool resident, cudaStream_t stream,
                         std::shared_ptr<void> kernel, void (*call)(void*));

// Runs the blocks of a grid to their end; called on a stream's thread.
void run_grid(const LaunchShape& shape, bool resident, Body body);

// Adds a task to a stream, or to the graph that the stream is captured into. The null stream is the current
// device's. An error where the capture does not allow it.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> task);

struct StreamTraits {
  int device;
  bool is_blocking;  // by CUDA's rule: the legacy stream waits for it, and it for the legacy stream
};
StreamTraits traits_of(cudaStream_t stream);
int n_kept();  // threads that wait for room on a stream
// Waits until every stream of the current device is idle.
void synchronize_device();

int current_device();
int bus_of(int device);  // a number that no other device of the machine has
bool devices_reach_each_other();
// By a call that needs a context: the current device's, where the thread has none.
void need_context();
// Whether the device's primary context has been made, by whatever thread, since forget_context().
bool has_context(int device);
void forget_context(int device);
// As after a fault of a kernel: every question for an event of the device is answered with that error. What
// is on its streams goes on, unlike there.
void break_device(int device, cudaError_t error);
cudaError_t device_error(int device);
// Remembers the error for cudaGetLastError and returns it.
cudaError_t report(cudaError_t error);

}  // namespace cuda_on_cpu
