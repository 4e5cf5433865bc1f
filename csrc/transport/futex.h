// Waking and sleeping on a word of shared memory, and the policy of how long to spin first.
//
// A *flag* is a 64-bit word written by one rank and read by its peers. Its writer publishes with `publish`,
// which is a full barrier: the store must be visible before the writer looks whether anybody sleeps, or a
// wake-up would be lost. A waiter polls, then yields, then registers in the writer's `sleepers` and sleeps in
// the kernel on one 32-bit half of the word, in slices of kSliceMs, so that it also notices deaths,
// deadlines, aborts and Ctrl-C (the `check` of its WaitClient).
//
// Source of the counts: measured, see docs/performance.md.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"

namespace pycomm {

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "futexes here sleep on a named half of a word");

struct alignas(128) Flag {
  std::atomic<uint64_t> word;
};

enum class Half : uint8_t { kLow, kHigh };

inline constexpr int kSliceMs = 100;

struct WaitPolicy {
  int polls = 1000;
  int yields = 3;
  // For `n_local` ranks on the processors this process may use (affinity and cgroup quota counted).
  static WaitPolicy choose(int n_local);
};
int usable_cores();

// What a waiting thread has to do beside waiting; called only on the slow path.
class WaitClient {
 public:
  virtual ~WaitClient() = default;
  virtual void before_block() = 0;     // once, before the first yield or sleep (releases the GIL)
  virtual Status check(int peer) = 0;  // every slice: deadline, deaths, abort, Ctrl-C
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wake_all(const std::atomic<uint64_t>& word, Half half);
// Sleeps while that half still has the value it has in `seen`; returns after at most timeout_ms.
void futex_sleep(const std::atomic<uint64_t>& word, Half half, uint64_t seen, int timeout_ms);

inline void publish(std::atomic<uint64_t>& word, uint64_t value, Half half, const Flag& sleepers) {
  word.exchange(value, std::memory_order_seq_cst);
  if (sleepers.word.load(std::memory_order_seq_cst) != 0) [[unlikely]]
    futex_wake_all(word, half);
}

void thread_yield();

template <class Ready>
[[gnu::noinline]] Status wait_slow(const std::atomic<uint64_t>& word, Half half, Flag& sleepers, Ready ready,
                                   const WaitPolicy& policy, WaitClient& client, int peer) {
  client.before_block();
  for (int i = 0; i < policy.yields; i++) {
    thread_yield();
    if (ready(word.load(std::memory_order_acquire))) return Status();
  }
  for (;;) {
    sleepers.word.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = word.load(std::memory_order_seq_cst);
    const bool done = ready(seen);
    if (!done) futex_sleep(word, half, seen, kSliceMs);
    sleepers.word.fetch_sub(1, std::memory_order_seq_cst);
    if (done || ready(word.load(std::memory_order_acquire))) return Status();
    Status s = client.check(peer);
    if (s.ok()) continue;
    // The peer may have published and then left or failed between our two looks.
    if (s.code() != Code::kInterrupt && ready(word.load(std::memory_order_acquire))) return Status();
    return s;
  }
}

template <class Ready>
inline Status wait(const std::atomic<uint64_t>& word, Half half, Flag& sleepers, Ready ready,
                   const WaitPolicy& policy, WaitClient& client, int peer) {
  for (int i = 0; i < policy.polls; i++) {
    if (ready(word.load(std::memory_order_acquire))) return Status();
    cpu_relax();
  }
  return wait_slow(word, half, sleepers, ready, policy, client, peer);
}

}  // namespace pycomm
