// Block: runs the CUDA threads of one block as fibers on the calling OS thread.
//
// A thread runs until it must wait: at __syncthreads, in a warp operation, or at a spin point (a poll of
// memory that somebody else writes). Which thread goes next depends on Settings::seed (the longest ready,
// any, or the last ready), so that a kernel that relies on an order is caught. When no thread can run and
// some have not ended, the kernel has deadlocked: the process ends with a message that counts who waits
// where. Barriers count the threads that have not ended, as GPUs since Volta do. One Block serves one OS
// thread at a time and is reused for the next block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime_api.h"
#include "fiber.h"

namespace cuda_on_cpu {

struct Settings {
  // 0: threads run in order, streams start at once. Odd: any thread goes next; even: the one that became
  // ready last, so that a few threads run far ahead. Both: streams are late now and then.
  uint32_t seed = 0;
};
Settings& settings();

// A small random number generator, so that a run can be repeated from its seed.
struct Random {
  uint32_t state;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  }
};

struct LaunchShape {
  dim3 grid, block;
  size_t n_dynamic_bytes;
};

// What the body of a kernel does, called once by every thread.
struct Body {
  void (*call)(void* kernel);
  void* kernel;
};

// What device code sees of the thread that runs it.
struct ThreadView {
  uint3 thread_idx, block_idx;
  dim3 block_dim, grid_dim;
};
// Initial-exec: read at every threadIdx, from other libraries as well.
extern constinit thread_local ThreadView* current_thread __attribute__((tls_model("initial-exec")));

// Runs block number block_idx to its end on the calling OS thread.
void run_block(const LaunchShape& shape, uint3 block_idx, Body body);

// Called by device code, on the fiber of a CUDA thread.
void barrier();
void spin_point();
void* dynamic_shared();
unsigned lane_index();

// Every lane of mask gives a value and gets all of them, after all have arrived; lanes that have ended are
// not waited for. `lanes` says which gave one. Only __syncwarp orders memory.
struct Exchange {
  uint64_t values[32];
  unsigned lanes;
};
Exchange exchange(unsigned mask, uint64_t value, bool orders_memory);

[[noreturn]] void fail(const char* what);

}  // namespace cuda_on_cpu
