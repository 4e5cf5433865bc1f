#include "comm.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "cuda_runtime_api.h"

namespace loopback {

Faults Faults::of_rank(int rank) {
  Faults f;
  const char* text = std::getenv("LOOPBACK_NCCL_FAULT");
  while (text != nullptr && *text != '\0') {
    int who = -1, at = -1;
    if (std::sscanf(text, "error=%d:%d", &who, &at) == 2 && who == rank) f.error_at = at;
    if (std::sscanf(text, "stall=%d:%d", &who, &at) == 2 && who == rank) f.stall_at = at;
    if (std::sscanf(text, "abort_hangs=%d", &who) == 1 && who == rank) f.abort_hangs = true;
    text = std::strchr(text, ',');
    if (text != nullptr) text++;
  }
  return f;
}

nccl::Result Core::refuse(nccl::Result error, const std::string& why) {
  const std::lock_guard lock(mutex);
  last_error = why;
  return error;
}

nccl::Result Core::fail(nccl::Result error, const std::string& why) {
  refuse(error, why);
  state = error;
  return error;
}

nccl::Result Core::check_ready() {
  const auto now = static_cast<nccl::Result>(state.load());
  if (now == nccl::kInProgress) {
    return refuse(nccl::kInvalidArgument,
                  "the communicator is used before its previous operation has returned ncclSuccess");
  }
  if (now == nccl::kSuccess && revoked) return refuse(nccl::kInvalidUsage, "the communicator was revoked");
  return now;
}

void Core::begin_busy() {
  const std::lock_guard lock(mutex);
  n_busy++;
}

void Core::end_busy() {
  const std::lock_guard lock(mutex);
  n_busy--;
  idle.notify_all();
}

void Core::wait_idle() {
  std::unique_lock lock(mutex);
  idle.wait(lock, [&] { return n_busy == 0; });
}

void Core::hold_graph() {
  const std::lock_guard lock(mutex);
  n_in_graphs++;
}

void Core::release_graph() {
  const std::lock_guard lock(mutex);
  n_in_graphs--;
  idle.notify_all();
}

void Core::wait_unused() {
  std::unique_lock lock(mutex);
  idle.wait(lock, [&] { return n_busy == 0 && n_in_graphs == 0; });
}

void Core::stop() {
  aborted = true;
  segment->ring(rank);
}

nccl::Result Core::run_call(std::function<nccl::Result()> fn) {
  if (blocking) return fn();
  state = nccl::kInProgress;
  begin_busy();
  std::thread([self = shared_from_this(), fn = std::move(fn)] {
    (void)cudaSetDevice(self->device);
    self->state = fn();
    self->end_busy();
  }).detach();
  return nccl::kInProgress;
}

nccl::Result meet(const std::shared_ptr<Core>& core) {
  Shared& shared = core->segment->shared();
  RankState& me = shared.ranks[core->rank];
  me.pid = getpid();
  me.device = core->device;
  if (me.attached.exchange(1, std::memory_order_acq_rel) != 0) {
    return core->fail(nccl::kInvalidUsage, "two ranks have the same number");
  }
  shared.n_attached.fetch_add(1, std::memory_order_acq_rel);
  core->segment->ring_all();
  const auto all_here = [&] {
    return shared.n_attached.load(std::memory_order_acquire) == static_cast<uint32_t>(core->n_ranks);
  };
  const bool met = core->segment->wait(core->rank, all_here, [&] { return core->aborted.load(); });
  core->segment->unlink();  // nobody else needs the name, or the job has failed
  if (!met) return core->fail(nccl::kInternalError, "aborted while it waited for the other ranks");

  const char* shared_gpu = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (shared_gpu != nullptr && std::atoi(shared_gpu) != 0) return nccl::kSuccess;
  for (int q = 0; q < core->n_ranks; q++) {
    const RankState& other = shared.ranks[q];
    if (q != core->rank && other.pid == me.pid && other.device == me.device) {
      return core->fail(nccl::kInvalidUsage, "Duplicate GPU detected: rank " + std::to_string(core->rank) +
                                                 " and rank " + std::to_string(q) + " both on CUDA device " +
                                                 std::to_string(me.device));
    }
  }
  return nccl::kSuccess;
}

}  // namespace loopback
