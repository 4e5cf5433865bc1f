#include "transport/fork.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

namespace pycomm {

namespace {
std::atomic<uint64_t> generation{0};
std::mutex mutex;
std::set<std::pair<ForkOrder, Forkable*>>& watched() {
  static auto* objects = new std::set<std::pair<ForkOrder, Forkable*>>;  // lives as long as the handlers
  return *objects;
}

void before() {
  mutex.lock();
  for (const auto& [order, f] : watched()) f->lock_for_fork();
}

void in_parent() {
  for (const auto& [order, f] : watched()) f->unlock_after_fork();
  mutex.unlock();
}

void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (const auto& [order, f] : watched()) {
    f->close_in_child();
    f->unlock_after_fork();
  }
  mutex.unlock();
}
}  // namespace

void watch_forks(Forkable* object, ForkOrder order) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(before, in_parent, in_child); });
  std::lock_guard lock(mutex);
  watched().emplace(order, object);
}

void forget_forks(Forkable* object) {
  std::lock_guard lock(mutex);
  std::erase_if(watched(), [object](const auto& w) { return w.second == object; });
}

uint64_t fork_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace pycomm
