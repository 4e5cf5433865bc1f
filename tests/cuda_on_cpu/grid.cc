// Which OS thread runs which block. See grid.h.
//
// Blocks of an ordinary launch are taken in order by as many workers as there are cores; those of a resident
// launch have a worker each. Workers are kept. Under ThreadSanitizer each block gets a new OS thread, so that
// nothing but the launch and the end of the grid orders it against other blocks and other streams, and its
// __shared__ variables are new memory.
#include "grid.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace cuda_on_cpu {
namespace {

uint3 block_at(unsigned i, const dim3& grid) {
  return {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
}

#if !defined(CUDA_ON_CPU_TSAN)
class Workers {
 public:
  void submit(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > n_idle_) std::thread([this] { work(); }).detach();
    wake_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++n_idle_;
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      --n_idle_;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  size_t n_idle_ = 0;
};

Workers& workers() {
  static Workers* const all = new Workers;  // its threads outlive main()
  return *all;
}
#endif

}  // namespace

void run_grid(const LaunchShape& shape, bool resident, Body body) {
  const unsigned n_blocks = shape.grid.x * shape.grid.y * shape.grid.z;
#if defined(CUDA_ON_CPU_TSAN)
  const unsigned at_once = resident ? n_blocks : std::min(n_blocks, 16u);
  for (unsigned first = 0; first < n_blocks; first += at_once) {
    std::vector<std::thread> threads;
    for (unsigned i = first; i < std::min(n_blocks, first + at_once); ++i) {
      threads.emplace_back([&, i] { run_block(shape, block_at(i, shape.grid), body); });
    }
    for (auto& t : threads) t.join();
  }
#else
  static const unsigned n_cores = std::max(1u, std::thread::hardware_concurrency());
  const unsigned n_workers = resident ? n_blocks : std::min(n_blocks, n_cores);
  std::atomic<unsigned> next{0};
  std::mutex mutex;
  std::condition_variable done;
  unsigned n_left = n_workers - 1;
  const auto work = [&] {
    for (unsigned i; (i = next.fetch_add(1)) < n_blocks;) run_block(shape, block_at(i, shape.grid), body);
  };
  for (unsigned i = 1; i < n_workers; ++i) {
    workers().submit([&] {
      work();
      const std::lock_guard lock(mutex);
      if (--n_left == 0) done.notify_one();
    });
  }
  work();
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return n_left == 0; });
#endif
}

namespace {
std::atomic<int> n_until_refused{0};
}
void refuse_launch(int n) { n_until_refused = n; }

cudaError_t enqueue_grid(const LaunchShape& shape, bool resident, cudaStream_t stream,
                         std::shared_ptr<void> kernel, void (*call)(void*)) {
  const size_t n_threads = size_t{shape.block.x} * shape.block.y * shape.block.z;
  const size_t n_blocks = size_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (n_threads == 0 || n_threads > 1024 || shape.block.z > 64 || n_blocks == 0 || shape.grid.y > 65535 ||
      shape.grid.z > 65535 || n_blocks > 0x7fffffff || shape.n_dynamic_bytes > 227 * 1024) {
    return report(cudaErrorInvalidConfiguration);
  }
  if (n_until_refused.fetch_sub(1) == 1) return report(cudaErrorInvalidConfiguration);
  if (resident && n_blocks > kResidentBlocks) return report(cudaErrorCooperativeLaunchTooLarge);
  return report(enqueue(stream, [=] { run_grid(shape, resident, {call, kernel.get()}); }));
}

}  // namespace cuda_on_cpu
