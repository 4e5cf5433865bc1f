#include "engine/p2p.h"

#include <algorithm>
#include <cstring>

#include "engine/communicator.h"

namespace pycomm {

namespace {
constexpr uint64_t kCells = 8;
constexpr size_t kCellBytes = size_t{32} << 10;

struct CellHeader {
  uint64_t message_bytes;  // of the whole message, in its first cell
  uint32_t n_bytes;        // in this cell
  int32_t tag;
  uint32_t dtype;
  uint32_t first;
};
}  // namespace

struct PointToPoint::Pipe {
  Flag filled;   // cells filled since the beginning, by the owner
  Flag drained;  // cells drained, by the peer
  struct alignas(64) Cell {
    CellHeader header;
    std::byte data[kCellBytes];
  } cells[kCells];
};

struct PointToPoint::Message {
  int tag;
  DType dtype;
  const std::byte* data;
  size_t n_bytes;
  size_t sent = 0;
  bool begun = false;
  double deadline_s;
  std::shared_ptr<Work> work;
};

struct PointToPoint::Posted {
  int peer;
  int tag;
  DType dtype;
  std::byte* data;
  size_t n_bytes;
  double deadline_s;
  std::shared_ptr<Work> work;
};

struct PointToPoint::Arrival {
  int from = 0;
  int tag = 0;
  DType dtype = DType::kUInt8;
  size_t n_bytes = 0;
  size_t have = 0;
  std::byte* data = nullptr;  // the recv's tensor, or `own`
  std::vector<std::byte> own;
  bool matched = false;
  Posted posted{};  // when matched
};

struct PointToPoint::Inbound {
  std::shared_ptr<Arrival> current;
};

PointToPoint::PointToPoint(Group& group) : group_(group), outbound_(group.size()) {
  for (int q = 0; q < group.size(); q++) inbound_.push_back(std::make_unique<Inbound>());
}

PointToPoint::~PointToPoint() { stop(); }

void PointToPoint::stop() {
  std::thread thread;  // close and abort may come from two threads at once: one of them joins
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    thread.swap(thread_);
    fail_all(Status::error(Code::kClosed, "the communicator was closed while a transfer was pending"));
  }
  cv_.notify_all();
  if (thread.joinable()) {
    group_.own().bell.word.fetch_add(1);
    futex_wake_all(group_.own().bell.word, Half::kLow);
    thread.join();
  }
}

Status PointToPoint::open_pipes() {
  if (pipes_offset_ != 0) return Status();
  PYCOMM_RETURN_IF_ERROR(
      group_.node()->arena()->allocate(sizeof(Pipe) * static_cast<size_t>(group_.size()), &pipes_offset_));
  Pipe* const mine = reinterpret_cast<Pipe*>(group_.arena_base(group_.rank()) + pipes_offset_);
  for (int q = 0; q < group_.size(); q++) {
    Pipe* p = mine + q;
    p->filled.word.store(0, std::memory_order_relaxed);
    p->drained.word.store(0, std::memory_order_relaxed);
  }
  group_.own().pipes.word.store(pipes_offset_, std::memory_order_release);
  return Status();
}

// The pipe owner -> to, or null while the owner has never sent.
PointToPoint::Pipe* PointToPoint::pipe(int owner, int to) const {
  const uint64_t offset = owner == group_.rank()
                              ? pipes_offset_
                              : group_.control(owner).pipes.word.load(std::memory_order_acquire);
  if (offset == 0) return nullptr;
  return reinterpret_cast<Pipe*>(group_.arena_base(owner) + offset) + to;
}

void PointToPoint::ring(int q) {
  Control& c = group_.control(q);
  c.bell.word.fetch_add(1, std::memory_order_seq_cst);
  if (c.bell_sleepers.word.load(std::memory_order_seq_cst) != 0) futex_wake_all(c.bell.word, Half::kLow);
}

Status PointToPoint::check_usable() const {
  if (group_.failed()) return group_.failure();
  return ended_ ? Status::error(Code::kClosed, "the communicator is closed") : Status();
}

std::shared_ptr<Work> PointToPoint::send(int peer, int tag, DType dtype, const void* data, size_t n_bytes,
                                         double timeout_s) {
  auto work = std::make_shared<Work>();
  std::lock_guard lock(mutex_);
  Status s = check_usable();
  if (s.ok()) s = open_pipes();
  if (!s.ok()) {
    work->finish(std::move(s));
    return work;
  }
  outbound_[peer].push_back(
      {tag, dtype, static_cast<const std::byte*>(data), n_bytes, 0, false, monotonic_s() + timeout_s, work});
  active_++;
  progress();
  return work;
}

std::shared_ptr<Work> PointToPoint::recv(int peer, int tag, DType dtype, void* data, size_t n_bytes,
                                         double timeout_s) {
  auto work = std::make_shared<Work>();
  std::lock_guard lock(mutex_);
  if (Status s = check_usable(); !s.ok()) {
    work->finish(std::move(s));
    return work;
  }
  active_++;
  const Posted posted{peer, tag, dtype, static_cast<std::byte*>(data), n_bytes, monotonic_s() + timeout_s,
                      work};
  progress();  // what has come already comes first
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    const std::shared_ptr<Arrival> a = *it;
    if ((peer >= 0 && a->from != peer) || a->tag != tag) continue;
    unexpected_.erase(it);
    deliver(*a, posted);
    if (a->have == a->n_bytes) complete(*a);
    return work;
  }
  posted_.push_back(posted);
  return work;
}

void PointToPoint::deliver(Arrival& a, const Posted& p) {
  a.matched = true;
  a.posted = p;
}

void PointToPoint::complete(Arrival& a) {
  if (!a.matched) return;
  const Posted& p = a.posted;
  p.work->source = a.from;
  active_--;
  if (p.n_bytes != a.n_bytes || p.dtype != a.dtype) {
    Status s = Status::error(
        Code::kMismatch,
        format("recv(source %d, tag %d) on rank %d expects %zu bytes of %s, the message has %zu bytes of %s",
               a.from, a.tag, group_.rank(), p.n_bytes, dtype_name(p.dtype), a.n_bytes, dtype_name(a.dtype)));
    group_.fail(s);
    p.work->finish(std::move(s));
    return;
  }
  if (!a.own.empty()) std::memcpy(p.data, a.own.data(), a.n_bytes);
  p.work->finish(Status());
}

bool PointToPoint::push(int to) {
  auto& queue = outbound_[to];
  if (queue.empty()) return false;
  Pipe* p = pipe(group_.rank(), to);
  bool moved = false;
  while (!queue.empty()) {
    const uint64_t at = p->filled.word.load(std::memory_order_relaxed);
    if (at - p->drained.word.load(std::memory_order_acquire) >= kCells) break;
    Message& m = queue.front();
    Pipe::Cell& cell = p->cells[at % kCells];
    const size_t n = std::min(kCellBytes, m.n_bytes - m.sent);
    cell.header = {m.n_bytes, static_cast<uint32_t>(n), m.tag, static_cast<uint32_t>(m.dtype),
                   m.begun ? 0u : 1u};
    if (n > 0) std::memcpy(cell.data, m.data + m.sent, n);
    m.begun = true;
    m.sent += n;
    p->filled.word.store(at + 1, std::memory_order_release);
    moved = true;
    ring(to);
    if (m.sent == m.n_bytes) {
      active_--;
      m.work->finish(Status());
      queue.pop_front();
    }
  }
  return moved;
}

// The first cell of a message: to the first recv that wants it, else kept.
void PointToPoint::begin_arrival(int from, Inbound& in, const void* cell) {
  const CellHeader& h = static_cast<const Pipe::Cell*>(cell)->header;
  auto a = std::make_shared<Arrival>();
  a->from = from;
  a->tag = h.tag;
  a->dtype = static_cast<DType>(h.dtype);
  a->n_bytes = h.message_bytes;
  in.current = a;
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if ((it->peer >= 0 && it->peer != from) || it->tag != a->tag) continue;
    deliver(*a, *it);
    posted_.erase(it);
    if (a->posted.n_bytes == a->n_bytes) a->data = a->posted.data;
    break;
  }
  if (!a->matched) unexpected_.push_back(a);
  if (a->data == nullptr && a->n_bytes > 0) {
    a->own.resize(a->n_bytes);
    a->data = a->own.data();
  }
}

bool PointToPoint::pull(int from) {
  Pipe* p = pipe(from, group_.rank());
  if (p == nullptr) return false;
  Inbound& in = *inbound_[from];
  bool moved = false;
  for (;;) {
    const uint64_t at = p->drained.word.load(std::memory_order_relaxed);
    if (p->filled.word.load(std::memory_order_acquire) == at) return moved;
    const Pipe::Cell& cell = p->cells[at % kCells];
    if (cell.header.first) begin_arrival(from, in, &cell);
    Arrival& a = *in.current;
    if (cell.header.n_bytes > 0) std::memcpy(a.data + a.have, cell.data, cell.header.n_bytes);
    a.have += cell.header.n_bytes;
    p->drained.word.store(at + 1, std::memory_order_release);
    moved = true;
    ring(from);
    if (a.have == a.n_bytes) {
      const std::shared_ptr<Arrival> whole = std::move(in.current);
      complete(*whole);
    }
  }
}

bool PointToPoint::progress() {
  bool moved = false;
  if (ended_) return false;
  try {
    for (int q = 0; q < group_.size(); q++) {
      moved = push(q) || moved;
      moved = pull(q) || moved;
    }
  } catch (const std::bad_alloc&) {  // a message that nobody has asked for yet is too large to keep
    const Status failure = Status::error(
        Code::kSystem,
        format("rank %d has no memory for a message that it has not received yet", group_.rank()));
    group_.fail(failure);
    fail_all(failure);
  }
  return moved;
}

void PointToPoint::fail_all(const Status& status) {
  ended_ = true;
  for (auto& queue : outbound_) {
    for (Message& m : queue) m.work->finish(status.clone());
    queue.clear();
  }
  for (Posted& p : posted_) p.work->finish(status.clone());
  posted_.clear();
  for (auto& in : inbound_) {
    if (in->current != nullptr && in->current->matched) in->current->posted.work->finish(status.clone());
    in->current = nullptr;
  }
  active_ = 0;
}

// Looks at every slice whether the transfer has become hopeless: the bell tells only of cells.
class PointToPoint::Finisher final : public WaitClient {
 public:
  Finisher(PointToPoint& p2p, CallerHooks* hooks) : p2p_(p2p), hooks_(hooks) {}
  void before_block() override {
    if (hooks_ != nullptr) hooks_->before_block();
  }
  Status check(int) override {
    if (hooks_ != nullptr) PYCOMM_RETURN_IF_ERROR(hooks_->poll());
    std::lock_guard lock(p2p_.mutex_);
    p2p_.expire();
    return Status();
  }

 private:
  PointToPoint& p2p_;
  CallerHooks* hooks_;
};

Status PointToPoint::finish(const std::shared_ptr<Work>& work, CallerHooks* hooks) {
  Control& own = group_.own();
  Finisher finisher(*this, hooks);
  for (;;) {
    const uint64_t seen = own.bell.word.load(std::memory_order_acquire);
    {
      std::lock_guard lock(mutex_);
      progress();
      expire();
    }
    if (work->done()) return work->result();
    Status s = wait(
        own.bell.word, Half::kLow, own.bell_sleepers, [&](uint64_t w) { return w != seen || work->done(); },
        group_.policy(), finisher, -1);
    if (s.ok()) continue;
    // Ctrl-C. Part of the message may have moved, and its tensor is about to go: nothing can be saved.
    std::lock_guard lock(mutex_);
    const Status failure = Status::error(Code::kClosed, "send/recv was interrupted (Ctrl-C)");
    group_.fail(failure);
    fail_all(failure);
    return s;
  }
}

// The first pending transfer that is past its deadline or whose peer is gone, as an error that names the
// peer.
Status PointToPoint::find_hopeless() const {
  const double now = monotonic_s();
  const auto look = [&](int peer, double deadline_s, const char* what, int tag) {
    const std::string here = format("%s(tag %d) on rank %d", what, tag, group_.rank());
    if (now > deadline_s) {
      return Status::error(Code::kTimeout, format("%s: timed out waiting for %s", here.c_str(),
                                                  peer < 0 ? "any rank" : group_.describe(peer).c_str()));
    }
    return group_.trouble(peer, here, "");
  };
  for (int q = 0; q < group_.size(); q++) {
    if (outbound_[q].empty()) continue;
    PYCOMM_RETURN_IF_ERROR(look(q, outbound_[q].front().deadline_s, "send", outbound_[q].front().tag));
  }
  for (const Posted& p : posted_) PYCOMM_RETURN_IF_ERROR(look(p.peer, p.deadline_s, "recv", p.tag));
  for (int q = 0; q < group_.size(); q++) {
    const auto& a = inbound_[q]->current;
    if (a != nullptr && a->matched) PYCOMM_RETURN_IF_ERROR(look(q, a->posted.deadline_s, "recv", a->tag));
  }
  return Status();
}

void PointToPoint::expire() {
  const double now = monotonic_s();
  if (now - expired_at_s_ < 0.05) return;
  expired_at_s_ = now;
  if (active_ == 0) return;
  if (group_.failed()) return fail_all(group_.failure());
  if (find_hopeless().ok()) return;
  progress();  // the last words of a peer that has gone
  const Status failure = find_hopeless();
  if (failure.ok()) return;
  group_.fail(failure);
  fail_all(failure);
}

void PointToPoint::in_background() {
  std::lock_guard lock(mutex_);
  if (active_ == 0 || stop_) return;
  background_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  cv_.notify_all();
}

void PointToPoint::serve() {
  Control& own = group_.own();
  for (;;) {
    const uint64_t seen = own.bell.word.load(std::memory_order_seq_cst);
    {
      std::unique_lock lock(mutex_);
      cv_.wait(lock, [this] { return stop_ || (background_ && active_ > 0); });
      if (stop_) return;
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
