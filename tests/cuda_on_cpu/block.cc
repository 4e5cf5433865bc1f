// The threads of a block: ring of those that can run, barrier, warp operations. See block.h and fiber.h.
#include "block.h"

#include <sched.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace cuda_on_cpu {

constinit thread_local ThreadView* current_thread = nullptr;

namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kLanes = 32;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif

// Which of the threads that can run goes next. kLast lets a few run far ahead of the others.
enum class Order : uint8_t { kFirst, kAny, kLast };

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kEnded };

struct Thread {
  ThreadView view;
  Fiber fiber;
  unsigned index;
  State state;
  uint32_t wanted_mask;  // of the warp operation that it waits in
  Exchange got;          // by the last warp operation
};

struct Warp {
  uint64_t values[kLanes];
  uint32_t arrived;  // lanes that wait in a warp operation
  uint32_t alive;
  unsigned n_done;  // operations completed
  char order[3];    // addresses for ThreadSanitizer: whole-warp operations in turn, others
};

class Block {
 public:
  Block() {
    threads_ = new Thread[kMaxThreads];
    ready_ = new Thread*[kMaxThreads];
  }
  ~Block() {
    if (stacks_ != nullptr) munmap(stacks_, n_stacks_ * kStackBytes);
    delete[] threads_;
    delete[] ready_;
    std::free(dynamic_);
  }

  void run(const LaunchShape& shape, uint3 block_idx, Body body);
  void run_thread() {
    Fiber::arrived(os_thread_);
    order_acquire(&started_);
    body_.call(body_.kernel);
    order_release(&ended_);
    end_thread();
  }
  void barrier();
  void spin_point();
  Exchange exchange(uint32_t mask, uint64_t value, bool orders_memory);
  void* dynamic_shared() { return dynamic_; }
  Thread* running() { return running_; }

 private:
  void make_ready(Thread* t) {
    t->state = State::kReady;
    ready_at(n_ready_++) = t;
  }
  Thread*& ready_at(unsigned i) { return ready_[(ready_head_ + i) % kMaxThreads]; }
  Thread* pop_ready() {
    const unsigned last = n_ready_ - 1;
    switch (order_) {
      case Order::kFirst: break;
      case Order::kAny: std::swap(ready_at(0), ready_at(random_.next() % n_ready_)); break;
      case Order::kLast: {
        --n_ready_;
        return ready_at(last);
      }
    }
    Thread* t = ready_at(0);
    ready_head_ = (ready_head_ + 1) % kMaxThreads;
    --n_ready_;
    return t;
  }
  // Behind all others, whatever the order: a thread that polls must not keep them from running.
  void make_ready_last(Thread* t) {
    if (order_ != Order::kLast) return make_ready(t);
    ready_head_ = (ready_head_ + kMaxThreads - 1) % kMaxThreads;
    ++n_ready_;
    ready_at(0) = t;
  }
  void resume(Thread* t) {
    running_ = t;
    current_thread = &t->view;
  }
  void reserve_stacks(unsigned n);
  void wait_as(State state);
  void release_barrier();
  void release_warp(unsigned warp);
  [[noreturn]] void end_thread();
  [[noreturn]] void deadlock();

  char* stacks_ = nullptr;
  unsigned n_stacks_ = 0;
  Thread* threads_;
  Thread** ready_;
  unsigned ready_head_ = 0, n_ready_ = 0;
  unsigned n_threads_ = 0, n_alive_ = 0, n_at_barrier_ = 0, barrier_generation_ = 0;
  unsigned n_spins_ = 0;
  Warp warps_[kMaxThreads / kLanes];
  Fiber os_thread_;
  Thread* running_ = nullptr;
  Body body_{};
  void* dynamic_ = nullptr;
  size_t n_dynamic_bytes_ = 0;
  Random random_{1};
  Order order_ = Order::kFirst;
  char started_ = 0, ended_ = 0, barrier_order_[2] = {};
};

thread_local Block* active = nullptr;

void thread_entry() { active->run_thread(); }

void Block::reserve_stacks(unsigned n) {
  if (n <= n_stacks_) return;
  if (stacks_ != nullptr) munmap(stacks_, n_stacks_ * kStackBytes);
  void* at = mmap(nullptr, n * kStackBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail("no memory for the stacks of a block's threads");
  stacks_ = static_cast<char*>(at);
  n_stacks_ = n;
}

void Block::run(const LaunchShape& shape, uint3 block_idx, Body body) {
  const dim3& d = shape.block;
  n_threads_ = n_alive_ = d.x * d.y * d.z;
  n_at_barrier_ = n_ready_ = ready_head_ = n_spins_ = barrier_generation_ = 0;
  reserve_stacks(n_threads_);
  body_ = body;
  if (shape.n_dynamic_bytes > n_dynamic_bytes_) {
    std::free(dynamic_);
    n_dynamic_bytes_ = (shape.n_dynamic_bytes + 127) / 128 * 128;
    dynamic_ = std::aligned_alloc(128, n_dynamic_bytes_);
  }
  if (n_dynamic_bytes_ > 0) std::memset(dynamic_, 0xa5, n_dynamic_bytes_);
  random_.state =
      (settings().seed + 1) * 2654435761u + block_idx.x * 40503u + block_idx.y * 9973u + block_idx.z;
  if (random_.state == 0) random_.state = 1;
  const uint32_t seed = settings().seed;
  order_ = seed == 0 ? Order::kFirst : seed % 2 == 1 ? Order::kAny : Order::kLast;
  for (unsigned w = 0; w < kMaxThreads / kLanes; ++w) {
    warps_[w].arrived = warps_[w].alive = warps_[w].n_done = 0;
  }
  os_thread_.adopt_os_thread();
  for (unsigned i = 0; i < n_threads_; ++i) {
    Thread& t = threads_[i];
    t.view = {{i % d.x, i / d.x % d.y, i / (d.x * d.y)}, block_idx, d, shape.grid};
    t.index = i;
    t.fiber.prepare(stacks_ + i * kStackBytes, kStackBytes, thread_entry);
    warps_[i / kLanes].alive |= 1u << (i % kLanes);
    make_ready(&t);
  }
  Block* const outer = active;
  active = this;
  order_release(&started_);
  Thread* first = pop_ready();
  resume(first);
  os_thread_.switch_to(first->fiber);
  order_acquire(&ended_);
  active = outer;
  current_thread = nullptr;
}

// The running thread cannot go on: the next one that can does. Returns when the thread is resumed.
void Block::wait_as(State state) {
  Thread* self = running_;
  self->state = state;
  if (n_ready_ == 0) deadlock();
  Thread* next = pop_ready();
  resume(next);
  if (next != self) self->fiber.switch_to(next->fiber);
}

void Block::release_barrier() {
  n_at_barrier_ = 0;
  n_spins_ = 0;
  ++barrier_generation_;
  for (unsigned i = 0; i < n_threads_; ++i) {
    if (threads_[i].state == State::kAtBarrier) make_ready(&threads_[i]);
  }
}

void Block::barrier() {
  // Two addresses in turn: a thread that is already at the next barrier must not seem to have been at this.
  char* order = &barrier_order_[barrier_generation_ & 1];
  order_release(order);
  running_->state = State::kAtBarrier;
  if (++n_at_barrier_ == n_alive_) release_barrier();
  wait_as(running_->state);
  order_acquire(order);
}

void Block::spin_point() {
  Thread* self = running_;
  // Nobody else in this block can go on, or all have polled in vain: let other OS threads run.
  if (n_ready_ == 0 || ++n_spins_ >= n_ready_) {
    n_spins_ = 0;
    sched_yield();
  }
  if (n_ready_ == 0) return;
  make_ready_last(self);
  Thread* next = pop_ready();
  resume(next);
  if (next != self) self->fiber.switch_to(next->fiber);
}

// Releases the lanes of a warp whose operation is complete, with the values of all of them.
void Block::release_warp(unsigned warp) {
  Warp& w = warps_[warp];
  Thread* lanes = threads_ + warp * kLanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (!(w.arrived >> lane & 1)) continue;
    const uint32_t wanted = lanes[lane].wanted_mask & w.alive;
    if ((w.arrived & wanted) != wanted) continue;
    for (unsigned to = 0; to < kLanes; ++to) {
      if (!(wanted >> to & 1)) continue;
      if ((lanes[to].wanted_mask & w.alive) != wanted) {
        fail("the lanes of one warp operation name different masks");
      }
      lanes[to].got.lanes = wanted;
      for (unsigned from = 0; from < kLanes; ++from) lanes[to].got.values[from] = w.values[from];
      make_ready(&lanes[to]);
    }
    w.arrived &= ~wanted;
    ++w.n_done;
  }
}

Exchange Block::exchange(uint32_t mask, uint64_t value, bool orders_memory) {
  Thread* self = running_;
  const unsigned warp = self->index / kLanes, lane = self->index % kLanes;
  Warp& w = warps_[warp];
  if (!(mask >> lane & 1)) fail("a lane calls a warp operation whose mask does not name it");
  char* const order = &w.order[(mask & w.alive) == w.alive ? w.n_done & 1 : 2];
  if (orders_memory) order_release(order);
  w.values[lane] = value;
  self->wanted_mask = mask;
  self->state = State::kInWarp;
  w.arrived |= 1u << lane;
  release_warp(warp);
  wait_as(self->state);
  if (orders_memory) order_acquire(order);
  return self->got;
}

void Block::end_thread() {
  Thread* self = running_;
  self->state = State::kEnded;
  --n_alive_;
  const unsigned warp = self->index / kLanes;
  warps_[warp].alive &= ~(1u << (self->index % kLanes));
  release_warp(warp);
  if (n_alive_ > 0 && n_at_barrier_ == n_alive_) release_barrier();
  if (n_alive_ == 0) self->fiber.finish_to(os_thread_);
  if (n_ready_ == 0) deadlock();
  Thread* next = pop_ready();
  resume(next);
  self->fiber.finish_to(next->fiber);
}

void Block::deadlock() {
  unsigned n_in_warp = 0;
  for (unsigned i = 0; i < n_threads_; ++i) n_in_warp += threads_[i].state == State::kInWarp;
  const uint3 b = threads_[0].view.block_idx;
  std::fprintf(stderr,
               "cuda_on_cpu: deadlock in block (%u, %u, %u): of %u threads %u have ended, %u wait at "
               "__syncthreads, %u in a warp operation that other lanes of its mask have not reached\n",
               b.x, b.y, b.z, n_threads_, n_threads_ - n_alive_, n_at_barrier_, n_in_warp);
  std::abort();
}

Block& require_active() {
  if (active == nullptr) fail("device code was called outside of a kernel");
  return *active;
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
  std::abort();
}

Settings& settings() {
  static Settings value;
  return value;
}

void run_block(const LaunchShape& shape, uint3 block_idx, Body body) {
  // On the heap: a library that is opened at run time, as an extension is, has little room for such
  // variables.
  static thread_local const auto block = std::make_unique<Block>();
  block->run(shape, block_idx, body);
}

void barrier() { require_active().barrier(); }
void spin_point() { require_active().spin_point(); }
void* dynamic_shared() { return require_active().dynamic_shared(); }
unsigned lane_index() { return require_active().running()->index % kLanes; }
Exchange exchange(unsigned mask, uint64_t value, bool orders_memory) {
  return require_active().exchange(mask, value, orders_memory);
}

}  // namespace cuda_on_cpu
