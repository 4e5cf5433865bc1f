#include "engine/work.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "engine/communicator.h"
#include "engine/p2p.h"

namespace pycomm {

void Completions::push(uint64_t id) {
  {
    std::lock_guard lock(mutex_);
    ids_.push_back(id);
  }
  cv_.notify_one();
}

void Completions::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  cv_.notify_all();
}

bool Completions::pop(uint64_t* id) {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return stop_ || !ids_.empty(); });
  if (ids_.empty()) return false;
  *id = ids_.front();
  ids_.pop_front();
  return true;
}

void Work::finish(Status status) {
  decltype(listeners_) listeners;
  {
    std::lock_guard lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return;
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);
    listeners.swap(listeners_);
  }
  cv_.notify_all();
  for (const auto& [completions, id] : listeners) completions->push(id);
}

Status Work::result() const {
  std::lock_guard lock(mutex_);
  if (status_.ok() && end_ != nullptr) return end_->failure();
  return status_.clone();
}

Status Work::wait(double timeout_s, CallerHooks* hooks, bool* finished) {
  *finished = true;
  if (issued()) return result();
  if (forked()) {  // before any lock: it may have been held by a thread that is not in this process
    return Status::error(Code::kClosed,
                         "this call was made in the parent of this forked process, which alone can wait for "
                         "it; a child (a DataLoader worker, for example) makes its own communicator with "
                         "pycomm.init(), or does without");
  }
  if (const auto communicator = communicator_.lock()) {
    if (is_transfer_ && !(timeout_s >= 0 && timeout_s < 1))
      return communicator->p2p().await(*this, hooks, timeout_s, finished);
    if (timeout_s >= 0)  // shorter, it may be, than the call
      hurry();
    else if (Status s; communicator->run_here(*this, hooks, &s))
      return s;
  }
  if (hooks != nullptr) hooks->before_block();
  const double end = timeout_s < 0 ? INFINITY : monotonic_s() + timeout_s;
  std::unique_lock lock(mutex_);
  while (!issued()) {
    const double left = end - monotonic_s();
    if (left <= 0) {
      *finished = false;
      return Status();
    }
    cv_.wait_for(lock, std::chrono::duration<double>(std::min(left, 0.001 * kSliceMs)));
    if (hooks == nullptr || issued()) continue;
    lock.unlock();
    PYCOMM_RETURN_IF_ERROR(hooks->poll());
    lock.lock();
  }
  return status_.clone();
}

void Work::announce(std::shared_ptr<Completions> completions, uint64_t id) {
  if (forked()) return completions->push(id);  // wait() says why
  {
    std::lock_guard lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      listeners_.emplace_back(std::move(completions), id);
      completions = nullptr;
    }
  }
  if (completions != nullptr) {
    completions->push(id);
  } else {
    hurry();  // nobody needs to wait for it
  }
}

void Work::hurry() const {
  const auto communicator = communicator_.lock();
  if (communicator == nullptr) return;
  if (is_transfer_)
    communicator->p2p().hurry();
  else
    communicator->hurry();
}

}  // namespace pycomm
