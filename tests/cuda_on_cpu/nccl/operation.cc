#include "operation.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace loopback {

namespace {

// Copies between the ring, from position `pos` on, and contiguous memory.
void copy_ring(Channel& c, uint64_t pos, char* memory, size_t n, bool into_ring) {
  for (size_t i = 0; i < n;) {
    const size_t at = (pos + i) % kChannelBytes, k = std::min(n - i, kChannelBytes - at);
    if (into_ring) {
      std::memcpy(c.data + at, memory + i, k);
    } else {
      std::memcpy(memory + i, c.data + at, k);
    }
    i += k;
  }
}

// A device's turn. Relaxed, so that ThreadSanitizer does not take it for an order between streams.
std::atomic<bool>& device_turn(int device) {
  static std::atomic<bool> taken[256];
  return taken[device & 255];
}

bool devices_are_shared() {
  const char* text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return text != nullptr && std::atoi(text) != 0;
}

int connection_of(const Call& c) {
  return c.kind == Kind::kSend || c.kind == Kind::kRecv ? c.root : kMaxRanks;
}

}  // namespace

Queue& Operation::queue(int peer, bool sends, Lane lane) {
  Segment& s = *core_->segment;
  Channel& c = sends ? s.channel(core_->rank, peer, lane) : s.channel(peer, core_->rank, lane);
  return queues_.try_emplace({peer, sends, lane}, c, peer, sends).first->second;
}

Header Operation::header(const Call& call, size_t n_bytes) const {
  if (call.kind == Kind::kSend || call.kind == Kind::kRecv) return {n_bytes, 0, 0, 0, 0, is_replayed_};
  const bool reduces = call.kind != Kind::kAllGather && call.kind != Kind::kBroadcast;
  return {n_bytes,
          static_cast<uint32_t>(call.kind),
          static_cast<uint32_t>(call.type),
          reduces ? static_cast<uint32_t>(std::min<int>(call.op, nccl::kNumOps)) : 0,
          static_cast<uint32_t>(call.root),
          is_replayed_};
}

void Operation::send(const Call& call, int peer, const void* data, size_t n_bytes, Lane lane) {
  queue(peer, true, lane)
      .transfers.push_back({header(call, n_bytes), static_cast<char*>(const_cast<void*>(data))});
}
void Operation::recv(const Call& call, int peer, void* data, size_t n_bytes, Lane lane) {
  queue(peer, false, lane).transfers.push_back({header(call, n_bytes), static_cast<char*>(data)});
}

bool Operation::must_connect() const {
  const std::lock_guard lock(core_->mutex);
  return std::any_of(calls_.begin(), calls_.end(),
                     [&](const Call& c) { return !core_->connected.contains(connection_of(c)); });
}
void Operation::connect() {
  const std::lock_guard lock(core_->mutex);
  for (const Call& c : calls_) core_->connected.insert(connection_of(c));
}

Reduction Operation::reduction(const Call& call) {
  if (call.op < nccl::kNumOps) return {static_cast<nccl::RedOp>(call.op)};
  const std::lock_guard lock(core_->mutex);
  const MadeOp& made = core_->made[static_cast<size_t>(call.op - nccl::kNumOps)];
  return {nccl::kSum, true, made.at != nullptr ? read_scalar(made.at, made.type) : made.factor};
}

// Ranks are added in their order, on all of them alike.
void Operation::finish_reduction(const Call& call, const Reduction& r,
                                 const std::vector<std::vector<char>>& all) {
  std::vector<char> acc = all[0];
  for (size_t q = 1; q < all.size(); q++) loopback::add(acc.data(), all[q].data(), call.count, call.type, r);
  finish(acc.data(), call.count, call.type, r, core_->n_ranks);
  if (!acc.empty()) std::memcpy(call.dst, acc.data(), acc.size());
}

// all_reduce, reduce_scatter, reduce: everybody multiplies its own, gets what it needs of everybody, adds it
// itself.
void Operation::plan_reduction(const Call& call) {
  const int n = core_->n_ranks, me = core_->rank;
  const size_t n_bytes = call.count * nccl::type_size(call.type);
  const bool scatters = call.kind == Kind::kReduceScatter;
  const bool receives = call.kind != Kind::kReduce || call.root == me;
  const Reduction r = reduction(call);
  auto mine = std::make_shared<std::vector<char>>(scatters ? n_bytes * static_cast<size_t>(n) : n_bytes);
  const Reduction then =
      begin(mine->data(), call.src, mine->size() / nccl::type_size(call.type), call.type, r, n);
  auto all = std::make_shared<std::vector<std::vector<char>>>(static_cast<size_t>(n));
  for (int q = 0; q < n; q++) {
    const char* block = mine->data() + (scatters ? static_cast<size_t>(q) * n_bytes : 0);
    if (q == me) {
      (*all)[static_cast<size_t>(q)].assign(block, block + n_bytes);
      continue;
    }
    if (call.kind != Kind::kReduce || call.root == q) send(call, q, block, n_bytes, Lane::kCollective);
    if (!receives) continue;
    auto& from = (*all)[static_cast<size_t>(q)];
    from.resize(n_bytes);
    recv(call, q, from.data(), n_bytes, Lane::kCollective);
  }
  endings_.push_back([this, call, then, all, mine, receives] {  // and keeps `mine` until then
    if (receives) finish_reduction(call, then, *all);
  });
}

void Operation::plan(const Call& call) {
  const int n = core_->n_ranks, me = core_->rank;
  const size_t n_bytes = call.count * nccl::type_size(call.type);
  char* const dst = static_cast<char*>(call.dst);
  switch (call.kind) {
    case Kind::kSend: send(call, call.root, call.src, n_bytes, Lane::kPointToPoint); return;
    case Kind::kRecv: recv(call, call.root, dst, n_bytes, Lane::kPointToPoint); return;
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
    case Kind::kReduce: plan_reduction(call); return;
    case Kind::kAllGather:
      for (int q = 0; q < n; q++) {
        if (q == me) continue;
        send(call, q, call.src, n_bytes, Lane::kCollective);
        recv(call, q, dst + static_cast<size_t>(q) * n_bytes, n_bytes, Lane::kCollective);
      }
      endings_.push_back([=] {
        if (n_bytes > 0) std::memmove(dst + static_cast<size_t>(me) * n_bytes, call.src, n_bytes);
      });
      return;
    case Kind::kBroadcast:
      if (me != call.root) {
        recv(call, call.root, dst, n_bytes, Lane::kCollective);
        return;
      }
      for (int q = 0; q < n; q++) {
        if (q != me) send(call, q, call.src, n_bytes, Lane::kCollective);
      }
      endings_.push_back([=] {
        if (n_bytes > 0 && dst != call.src) std::memmove(dst, call.src, n_bytes);
      });
      return;
  }
}

// Moves what can be moved of one transfer; true when something was.
bool Operation::move_bytes(Queue& q, Transfer& t) {
  Channel& c = q.channel;
  const uint64_t head = c.head.load(q.sends ? std::memory_order_relaxed : std::memory_order_acquire);
  const uint64_t tail = c.tail.load(q.sends ? std::memory_order_acquire : std::memory_order_relaxed);
  size_t room = q.sends ? kChannelBytes - (head - tail) : head - tail;
  const bool in_header = t.done < sizeof(Header);
  if (in_header && room < sizeof(Header)) return false;  // headers move in one piece
  const size_t before = t.done;
  uint64_t pos = q.sends ? head : tail;
  if (in_header) {
    Header theirs = t.header;
    copy_ring(c, pos, reinterpret_cast<char*>(&theirs), sizeof(Header), q.sends);
    if (theirs != t.header) {
      const auto caller = [](const Header& h) { return h.is_replayed != 0 ? "a graph" : "a call"; };
      std::fprintf(
          stderr,
          "loopback NCCL: rank %d, in %s, expects %zu bytes (call %u, type %u, op %u, root %u) of rank %d, "
          "which, in %s, sends %zu (call %u, type %u, op %u, root %u)\n",
          core_->rank, caller(t.header), static_cast<size_t>(t.header.n_bytes), t.header.kind, t.header.type,
          t.header.op, t.header.root, q.peer, caller(theirs), static_cast<size_t>(theirs.n_bytes),
          theirs.kind, theirs.type, theirs.op, theirs.root);
      core_->fail(nccl::kInvalidUsage, "ranks have made different calls; see stderr");
      q.broken = true;  // the others go on, so that the peer finds out as well
      return false;
    }
    t.done += sizeof(Header);
    pos += sizeof(Header);
    room -= sizeof(Header);
  }
  const size_t n = std::min(room, t.total() - t.done);
  if (n > 0) copy_ring(c, pos, t.data + (t.done - sizeof(Header)), n, q.sends);
  t.done += n;
  (q.sends ? c.head : c.tail).fetch_add(t.done - before, std::memory_order_release);
  return t.done > before;
}

bool Operation::move(Queue& q) {
  bool moved = false;
  while (!q.broken && q.at < q.transfers.size()) {
    Transfer& t = q.transfers[q.at];
    if (!move_bytes(q, t) && t.done < t.total()) break;
    moved = true;
    if (t.done < t.total()) break;
    q.at++;
  }
  if (moved) core_->segment->ring(q.peer);
  return moved;
}

void Operation::stall() {
  core_->segment->wait(
      core_->rank, [] { return false; }, [&] { return core_->aborted.load(); });
}

void Operation::progress() {
  while (!core_->aborted) {
    const uint32_t seen = core_->segment->bell(core_->rank);
    bool moved = false, done = true;
    for (auto& [key, q] : queues_) {
      moved |= move(q);
      done &= q.done();
    }
    if (done) return;
    if (!moved) core_->segment->sleep(core_->rank, seen);
  }
}

void Operation::run() {
  if (is_replayed_) core_->begin_busy();
  std::atomic<bool>& turn = device_turn(core_->device);
  bool has_turn = false;
  while (!devices_are_shared() && !core_->aborted) {
    has_turn = !turn.exchange(true, std::memory_order_relaxed);
    if (has_turn) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  const int number = core_->n_operations++;
  // Not when it was launched after an abort, since there was no room on the stream: its tensors may be gone.
  if (!core_->aborted) {
    for (const Call& c : calls_) plan(c);
    if (number == core_->faults.error_at) {
      core_->fail(nccl::kRemoteError, "planted by LOOPBACK_NCCL_FAULT");
      stall();
    } else if (number == core_->faults.stall_at) {
      stall();
    } else {
      progress();
    }
  }
  if (!core_->aborted) {
    for (const auto& ending : endings_) ending();
  }
  if (has_turn) turn.store(false, std::memory_order_relaxed);
  queues_.clear();
  endings_.clear();
  core_->end_busy();
}

}  // namespace loopback
