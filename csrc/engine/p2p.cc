#include "engine/p2p.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>

namespace pycomm {

namespace {
std::vector<int> identity(int n) {
  std::vector<int> out(static_cast<size_t>(n));
  for (int q = 0; q < n; q++) out[static_cast<size_t>(q)] = q;
  return out;
}
}  // namespace

PointToPoint::PointToPoint(Group& group)
    : group_(group),
      rank_(group.rank()),
      local_of_(identity(group.size())),
      pipes_(group),
      mailbox_(group.size()),
      outbound_(static_cast<size_t>(group.size())) {}

PointToPoint::PointToPoint(Group& group, int rank, std::vector<int> local_of, std::shared_ptr<Net> net,
                           uint64_t id, std::vector<int> job_ranks)
    : group_(group),
      rank_(rank),
      local_of_(std::move(local_of)),
      pipes_(group),
      mailbox_(static_cast<int>(local_of_.size())),
      outbound_(local_of_.size()),
      far_(std::make_unique<Far>(*this, std::move(net), id, std::move(job_ranks))) {}

PointToPoint::~PointToPoint() {
  stop();
  far_.reset();  // while what it calls is there
}

bool PointToPoint::begin_far(Work& work) {
  Status s = check_usable();
  if (s.ok())
    active_++;
  else
    work.finish(s.clone());
  return s.ok();
}

void PointToPoint::end_far(Work& work) {
  active_--;
  work.finish(Status());
  pipes_.ring(group_.rank());  // whoever waits in finish()
}

void PointToPoint::add_far(int from, const CellHeader& header, const std::byte* data) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  try {
    const std::shared_ptr<Arrival> whole = mailbox_.add(from, header, data);
    if (whole != nullptr) complete(*whole);
  } catch (const std::bad_alloc&) {
    no_memory();
  }
  pipes_.ring(group_.rank());
}

void PointToPoint::fail_far(int from, uint64_t n_bytes, uint64_t n_awaited) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  const Status failure = Status::error(
      Code::kPeerLost,
      format(
          "send/recv on rank %d: rank %d sent a piece of %llu bytes that is of no message (%llu bytes of one "
          "were still to come): do all ranks run the same pycomm?",
          rank_, from, static_cast<unsigned long long>(n_bytes), static_cast<unsigned long long>(n_awaited)));
  group_.fail(failure);
  fail_all(failure);
  pipes_.ring(group_.rank());
}

void PointToPoint::no_memory() {
  const Status failure = Status::error(
      Code::kSystem, format("rank %d has no memory for a message that it has not received yet", rank_));
  group_.fail(failure);
  fail_all(failure);
}

std::string PointToPoint::describe(int peer) const {
  const int local = local_of_[static_cast<size_t>(peer)];
  return local < 0 ? far_->name(peer) : group_.describe(local);
}

std::string PointToPoint::who(int peer) const {
  const int local = local_of_[static_cast<size_t>(peer)];
  return local < 0 ? far_->name(peer) : group_.who(local);
}

// Why it is no use to wait for this rank (-1: any).
Status PointToPoint::hopeless(int peer, const std::string& here) const {
  if (far_ == nullptr) return group_.trouble(peer, here, "");
  if (peer < 0) {
    PYCOMM_RETURN_IF_ERROR(group_.failed_peer(here));
    Status s;  // hopeless only when none is left
    for (size_t q = 0; q < local_of_.size(); q++) {
      if (static_cast<int>(q) == rank_) continue;
      s = hopeless(static_cast<int>(q), here);
      if (s.ok()) break;
    }
    return s;
  }
  const int local = local_of_[static_cast<size_t>(peer)];
  if (local >= 0) return group_.trouble(local, here, "");
  const std::string* why = far_->gone(peer);
  return why == nullptr ? Status()
                        : Status::error(Code::kPeerLost, format("%s: %s", here.c_str(), why->c_str()));
}

void PointToPoint::stop() {
  if (group_.node()->forked()) {  // the thread and whoever holds the mutex are the parent's
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
    return;
  }
  std::thread thread;  // close and abort may come from two threads at once: one of them joins
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    thread.swap(thread_);
    // close() after abort() may come before the thread has seen why.
    fail_all(group_.failed()
                 ? group_.failure()
                 : Status::error(Code::kClosed, "the communicator was closed while a transfer was pending"));
  }
  cv_.notify_all();
  if (thread.joinable()) {
    group_.own().bell.word.fetch_add(1);
    futex_wake_all(group_.own().bell.word, Half::kLow);
    thread.join();
  }
}

void PointToPoint::leave(const std::string& why) {
  if (far_ != nullptr) far_->leave(why);
}

Status PointToPoint::check_usable() const {
  if (group_.failed()) return group_.failure();
  return ended_ ? Status::error(Code::kClosed, "the communicator is closed") : Status();
}

std::shared_ptr<Work> PointToPoint::send(int peer, int tag, DType dtype, const void* data, size_t n_bytes,
                                         double timeout_s) {
  auto work = std::make_shared<Work>();
  if (local_of_[static_cast<size_t>(peer)] < 0) {
    far_->send({peer, tag, monotonic_s() + timeout_s, work, 0}, dtype, static_cast<const std::byte*>(data),
               n_bytes);
    return work;
  }
  std::lock_guard lock(mutex_);
  Status s = check_usable();
  if (s.ok()) s = pipes_.open();
  if (!s.ok()) {
    work->finish(std::move(s));
    return work;
  }
  outbound_[peer].push_back(
      {tag, dtype, static_cast<const std::byte*>(data), n_bytes, 0, false, monotonic_s() + timeout_s, work});
  active_++;
  sending_++;
  calls_.fetch_add(1, std::memory_order_relaxed);
  progress();
  return work;
}

std::shared_ptr<Work> PointToPoint::recv(int peer, int tag, DType dtype, void* data, size_t n_bytes,
                                         double timeout_s) {
  auto work = std::make_shared<Work>();
  if (far_ != nullptr && (peer < 0 || is_far(peer))) far_->greet(peer);
  std::lock_guard lock(mutex_);
  progress();  // what has come already comes first
  if (Status s = check_usable(); !s.ok()) {
    work->finish(std::move(s));
    return work;
  }
  active_++;
  calls_.fetch_add(1, std::memory_order_relaxed);
  const auto arrival = mailbox_.take(
      {peer, tag, dtype, static_cast<std::byte*>(data), n_bytes, monotonic_s() + timeout_s, work});
  if (arrival != nullptr && arrival->whole()) complete(*arrival);
  return work;
}

void PointToPoint::complete(const Arrival& a) {
  if (!a.matched) return;
  active_--;
  Status s = a.deliver(rank_);
  if (!s.ok()) group_.fail(s);
  a.posted.work->finish(std::move(s));
}

bool PointToPoint::push(int to) {
  auto& queue = outbound_[to];
  bool moved = false;
  while (!queue.empty()) {
    Pipe& pipe = *pipes_.to(local_of_[static_cast<size_t>(to)]);
    Cell* const cell = pipe.to_fill();
    if (cell == nullptr) break;
    Message& m = queue.front();
    const size_t n = std::min(kCellBytes, m.n_bytes - m.sent);
    cell->header = {m.n_bytes, static_cast<uint32_t>(n), m.tag, static_cast<uint32_t>(m.dtype),
                    m.begun ? 0u : 1u};
    if (n > 0) std::memcpy(cell->data, m.data + m.sent, n);
    m.begun = true;
    m.sent += n;
    pipe.filled();
    moved = true;
    pipes_.ring(local_of_[static_cast<size_t>(to)]);
    if (m.sent == m.n_bytes) {
      active_--;
      sending_--;
      m.work->finish(Status());
      queue.pop_front();
    }
  }
  return moved;
}

bool PointToPoint::pull(int from) {
  const int local = local_of_[static_cast<size_t>(from)];
  Pipe* const pipe = pipes_.from(local);
  if (pipe == nullptr) return false;
  bool moved = false;
  while (const Cell* cell = pipe->to_drain()) {
    const std::shared_ptr<Arrival> whole = mailbox_.add(from, cell->header, cell->data);
    pipe->drained();
    moved = true;
    pipes_.ring(local);
    if (whole != nullptr) complete(*whole);
  }
  return moved;
}

bool PointToPoint::progress() {
  bool moved = false;
  if (ended_) return false;
  try {
    for (size_t q = 0; q < local_of_.size(); q++) {
      if (local_of_[q] < 0) continue;
      moved = push(static_cast<int>(q)) || moved;
      moved = pull(static_cast<int>(q)) || moved;
    }
  } catch (const std::bad_alloc&) {  // a message that nobody has asked for yet is too large to keep
    no_memory();
  }
  return moved;
}

void PointToPoint::fail_all(const Status& status) {
  ended_ = true;
  for (auto& queue : outbound_) {
    for (Message& m : queue) m.work->finish(status.clone());
    queue.clear();
  }
  mailbox_.fail_all(status);
  if (far_ != nullptr) far_->fail_all(status);
  active_ = sending_ = 0;
}

void PointToPoint::in_background() {
  std::lock_guard lock(mutex_);
  if (active_ == 0 || stop_) return;
  background_ = true;
  try {
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& e) {  // nobody would move what is pending
    const Status failure =
        Status::error(Code::kSystem, format("cannot start the progress thread: %s", e.what()));
    group_.fail(failure);
    fail_all(failure);
  }
  if (sending_ > 0 || resting_) cv_.notify_all();
}

// Waits until the thread is needed; false: it shall end.
bool PointToPoint::stand_aside(std::unique_lock<std::mutex>& lock) {
  int n_quiet = 0;  // looks since the last call came
  while (!stop_) {
    const bool is_needed = background_ && active_ > 0 && callers_.load() == 0;
    const uint64_t calls = calls_.load(std::memory_order_relaxed);
    if (is_needed && (calls == calls_seen_ || sending_ > 0)) return true;
    n_quiet = calls == calls_seen_ ? n_quiet + 1 : 0;
    calls_seen_ = calls;
    if (is_needed || n_quiet < kStandByS / kStandAsideS) {
      cv_.wait_for(lock, std::chrono::duration<double>(kStandAsideS));
      continue;
    }
    resting_ = true;  // before the look at callers_, as they count themselves out before they look at it
    cv_.wait(lock, [this] { return stop_ || (background_ && active_ > 0 && callers_.load() == 0); });
    resting_ = false;
  }
  return false;
}

void PointToPoint::serve() {
  Control& own = group_.own();
  for (;;) {
    uint64_t seen = 0;
    {
      std::unique_lock lock(mutex_);
      if (!stand_aside(lock)) return;
      seen = own.bell.word.load(std::memory_order_seq_cst);
      if (progress()) continue;
      expire();
      if (active_ == 0) {
        background_ = false;
        continue;
      }
    }
    bool rung = false;
    for (int i = 0; i < group_.policy().polls && !rung; i++) {
      rung = own.bell.word.load(std::memory_order_acquire) != seen;
      cpu_relax();
    }
    if (rung) continue;
    own.bell_sleepers.word.fetch_add(1, std::memory_order_seq_cst);
    if (own.bell.word.load(std::memory_order_seq_cst) == seen)
      futex_sleep(own.bell.word, Half::kLow, seen, kSliceMs);
    own.bell_sleepers.word.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace pycomm
