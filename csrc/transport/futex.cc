#include "transport/futex.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace pycomm {

namespace {
const char* half_of(const std::atomic<uint64_t>& word, Half half) {
  return reinterpret_cast<const char*>(&word) + (half == Half::kHigh ? 4 : 0);
}

// Cores granted by the cgroup's cpu.max ("quota period" in microseconds, or "max"), 0 when unlimited.
int cgroup_quota_cores() {
  std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "re");
  if (f == nullptr) return 0;
  char quota[32];
  double period = 0;
  const int n = std::fscanf(f, "%31s %lf", quota, &period);
  std::fclose(f);
  if (n != 2 || quota[0] == 'm' || period <= 0) return 0;
  return std::max(1, static_cast<int>(std::ceil(std::atof(quota) / period)));
}
}  // namespace

void futex_wake_all(const std::atomic<uint64_t>& word, Half half) {
  syscall(SYS_futex, half_of(word, half), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_sleep(const std::atomic<uint64_t>& word, Half half, uint64_t seen, int timeout_ms) {
  const timespec t{timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
  const auto expected = static_cast<uint32_t>(half == Half::kHigh ? seen >> 32 : seen);
  syscall(SYS_futex, half_of(word, half), FUTEX_WAIT, expected, &t, nullptr, 0);
}

void thread_yield() { sched_yield(); }

int usable_cores() {
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                      : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const int quota = cgroup_quota_cores();
  if (quota > 0) n = std::min(n, quota);
  return std::max(n, 1);
}

WaitPolicy WaitPolicy::choose(int n_local) {
  // A core each: spin about as long as a futex wake would cost. More ranks than cores: give the core away
  // soon, but not at once (a wake costs 15-20 us), and never without bound.
  if (n_local <= usable_cores()) return {.polls = 1000, .yields = 4};
  return {.polls = 20, .yields = 8};
}

}  // namespace pycomm
