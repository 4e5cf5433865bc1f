// The end of peers' access, and of the memory. See peer_memory.h.
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "transport/cuda/peer_memory.h"
#include "transport/cuda/runtime.h"

namespace pycomm {

namespace {

std::mutex retired_mutex;  // of both
std::vector<std::shared_ptr<PeerMemory>>& retired() {
  static auto* const all = new std::vector<std::shared_ptr<PeerMemory>>;  // also what is kept
  return *all;
}
std::set<int>& abandoned() {
  static auto* const devices = new std::set<int>;
  return *devices;
}

// Calls `fn` with each, and forgets it where that is true. No lock is held then: fn may wait for kernels that
// wait for another rank of this process, which must be able to retire its own.
template <class Fn>
void visit_retired(int device, const Fn& fn) {
  std::vector<std::shared_ptr<PeerMemory>> here;
  {
    const std::lock_guard lock(retired_mutex);
    if (abandoned().contains(device)) return;
    const auto begin =
        std::stable_partition(retired().begin(), retired().end(),
                              [&](const std::shared_ptr<PeerMemory>& m) { return m->device() != device; });
    here.assign(std::make_move_iterator(begin), std::make_move_iterator(retired().end()));
    retired().erase(begin, retired().end());
  }
  std::erase_if(here, fn);
  const std::lock_guard lock(retired_mutex);
  std::move(here.begin(), here.end(), std::back_inserter(retired()));
}

}  // namespace

void PeerMemory::retire(std::shared_ptr<PeerMemory> memory) {
  if (memory == nullptr) return;
  const std::lock_guard lock(retired_mutex);
  retired().push_back(std::move(memory));
}

void PeerMemory::abandon(int device) {
  const std::lock_guard lock(retired_mutex);
  abandoned().insert(device);
}

void PeerMemory::let_go_of_retired(int device) {
  visit_retired(device, [](const std::shared_ptr<PeerMemory>& m) {
    (void)m->let_go();
    return false;
  });
}

void PeerMemory::free_retired(int device) {
  visit_retired(device, [](const std::shared_ptr<PeerMemory>& m) { return m->let_go() && m->free_memory(); });
}

// True: of all peers' memory. What cannot be closed now, may be later. Handles are closed before their owners
// free, as CUDA asks.
bool PeerMemory::let_go() {
  const bool in_child = options_.node != nullptr && options_.node->forked();  // it is the parent's
  if (kept_.load(std::memory_order_acquire) || in_child) return false;
  const DeviceGuard guard(device());
  if (!guard.status().ok()) return false;
  bool all = true;
  for (Peer& p : peers_) {
    if (p.opened) {
      if (!cuda_status(cudaIpcCloseMemHandle(p.base), "cudaIpcCloseMemHandle").ok()) {
        all = false;
        continue;
      }
      p.opened = false;
    }
    if (p.let_go == nullptr) continue;
    p.let_go->store(1, std::memory_order_release);
    p.let_go = nullptr;
    p.mapped.reset();
  }
  return all;
}

// A process that has died maps nothing, and runs no kernel.
bool PeerMemory::all_let_go() const {
  if (!is_told_) return true;
  for (int r = 0; r < n_ranks(); ++r) {
    if (r == rank() || peers_let_go_[r].load(std::memory_order_acquire) != 0) continue;
    if (options_.node->alive(options_.node_ranks[static_cast<size_t>(r)])) return false;
  }
  return true;
}

// True: it is gone.
bool PeerMemory::free_memory() {
  if (!all_let_go()) return false;
  {
    const std::lock_guard lock(mutex_);
    if (!used_.empty()) return false;
  }
  const DeviceGuard guard(device());
  if (!guard.status().ok() || !cuda_status(cudaFree(base(rank())), "cudaFree").ok()) return false;
  if (pinned_ != nullptr) (void)cudaFreeHost(pinned_);
  if (peers_let_go_ != nullptr) options_.node->arena()->release(peers_let_go_offset_);
  return true;
}

}  // namespace pycomm
