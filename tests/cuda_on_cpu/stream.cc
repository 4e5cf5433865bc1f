// Streams and events: queues of tasks with an OS thread each. See grid.h.
//
// An event holds how often it was recorded and which records have not been reached; waiting for it means
// waiting for the record that was the last one when the wait was called, also when a later one, on another
// stream, is reached before. With Settings::seed a stream waits
// up to 200 microseconds before some of its tasks, so that work that only seems ordered is caught. Handles
// are kept alive by the tasks that use them, so they may be destroyed at any time, as CUDA's. Whether a
// stream is captured, and what that forbids, is asked first (graph.h).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "graph.h"
#include "grid.h"

namespace cuda_on_cpu {
namespace {

constexpr size_t kMaxTasks = 1024;  // then the host is kept waiting, as by a GPU
std::atomic<int> n_kept_hosts{0};

class Stream {
 public:
  explicit Stream(StreamTraits traits) : traits_(traits), thread_([this] { work(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();  // after the tasks that are left
  }
  void push(std::function<void()> task) {
    {
      std::unique_lock lock(mutex_);
      n_kept_hosts++;
      room_.wait(lock, [this] { return tasks_.size() < kMaxTasks; });
      n_kept_hosts--;
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return tasks_.empty() && !busy_;
  }
  int device() const { return traits_.device; }
  const StreamTraits& traits() const { return traits_; }

 private:
  void work() {
    Random random{settings().seed * 747796405u + 2891336453u};
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      room_.notify_one();
      busy_ = true;
      lock.unlock();
      if (settings().seed != 0 && random.next() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random.next() % 200));
      }
      task();
      task = nullptr;
      lock.lock();
      busy_ = false;
      if (tasks_.empty()) idle_.notify_all();
    }
  }

  const StreamTraits traits_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_, room_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false, stop_ = false;
  std::thread thread_;  // last: it uses the others
};

struct Event {
  std::mutex mutex;
  std::condition_variable reached;
  uint64_t n_recorded = 0;
  std::set<uint64_t> under_way;  // records that are not reached
  std::chrono::steady_clock::time_point time;

  uint64_t begin_record() {
    const std::lock_guard lock(mutex);
    under_way.insert(++n_recorded);
    return n_recorded;
  }
  void reach(uint64_t record) {
    const std::lock_guard lock(mutex);
    under_way.erase(record);
    if (record == n_recorded) time = std::chrono::steady_clock::now();
    reached.notify_all();
  }
  uint64_t last_record() {
    const std::lock_guard lock(mutex);
    return n_recorded;
  }
  void wait_for(uint64_t record) {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return !under_way.contains(record); });
  }
  bool passed() const { return !under_way.contains(n_recorded); }  // by whoever holds the mutex
};

// All streams and events; never freed, since tasks may run until the process ends.
struct Handles {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> null_streams;
  std::map<void*, std::shared_ptr<Event>> events;
};
Handles& handles() {
  static Handles* const all = new Handles;
  return *all;
}

std::shared_ptr<Stream> find(cudaStream_t stream) {
  need_context();
  Handles& h = handles();
  const std::lock_guard lock(h.mutex);
  if (stream == nullptr) {
    auto& null_stream = h.null_streams[current_device()];
    if (!null_stream) null_stream = std::make_shared<Stream>(StreamTraits{current_device(), true});
    return null_stream;
  }
  const auto it = h.streams.find(stream);
  if (it == h.streams.end()) fail("a stream is used that does not exist (never created, or destroyed)");
  return it->second;
}

std::shared_ptr<Event> find(cudaEvent_t event) {
  need_context();
  Handles& h = handles();
  const std::lock_guard lock(h.mutex);
  const auto it = h.events.find(event);
  if (it == h.events.end()) fail("an event is used that does not exist (never created, or destroyed)");
  return it->second;
}

}  // namespace

cudaError_t enqueue(cudaStream_t stream, std::function<void()> task) {
  const auto s = find(stream);
  if (const Captured c = capture_task(stream, task)) return *c;
  s->push(std::move(task));
  return cudaSuccess;
}

int n_kept() { return n_kept_hosts; }

StreamTraits traits_of(cudaStream_t stream) { return find(stream)->traits(); }

void synchronize_device() {
  need_context();
  std::set<std::shared_ptr<Stream>> mine;
  {
    Handles& h = handles();
    const std::lock_guard lock(h.mutex);
    for (const auto& [key, s] : h.streams) {
      if (s->device() == current_device()) mine.insert(s);
    }
    for (const auto& [device, s] : h.null_streams) {
      if (device == current_device()) mine.insert(s);
    }
  }
  for (const auto& s : mine) s->wait();
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaDeviceSynchronize(void) {
  const cudaError_t refused = check_host_waits_for_device();
  if (refused != cudaSuccess) return report(refused);
  synchronize_device();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
  if (flags > cudaStreamNonBlocking) return report(cudaErrorInvalidValue);
  need_context();
  auto made = std::make_shared<Stream>(StreamTraits{current_device(), (flags & cudaStreamNonBlocking) == 0});
  Handles& h = handles();
  const std::lock_guard lock(h.mutex);
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  h.streams[made.get()] = std::move(made);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const auto last = find(stream);  // joined here, outside of the lock
  forget(stream);
  Handles& h = handles();
  const std::lock_guard lock(h.mutex);
  h.streams.erase(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const auto s = find(stream);
  const cudaError_t refused = check_host_sees(stream);
  if (refused != cudaSuccess) return report(refused);
  s->wait();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const auto s = find(stream);
  const cudaError_t refused = check_host_sees(stream);
  if (refused != cudaSuccess) return report(refused);
  return report(s->is_idle() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* user_data) {
  return report(enqueue(stream, [=] { fn(user_data); }));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  need_context();
  auto made = std::make_shared<Event>();
  Handles& h = handles();
  const std::lock_guard lock(h.mutex);
  *event = reinterpret_cast<cudaEvent_t>(made.get());
  h.events[made.get()] = std::move(made);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  (void)find(event);
  forget(event);
  Handles& h = handles();
  const std::lock_guard lock(h.mutex);
  h.events.erase(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto e = find(event);
  (void)find(stream);
  if (const Captured c = capture_record(stream, event)) return report(*c);
  return report(enqueue(stream, [e, record = e->begin_record()] { e->reach(record); }));
}

// External: the graph records it, at each launch for all that comes after, and it is an event like others.
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  if (flags == cudaEventRecordDefault) return cudaEventRecord(event, stream);
  const auto e = find(event);
  (void)find(stream);
  if (flags != cudaEventRecordExternal) return report(cudaErrorInvalidValue);
  const Captured c =
      capture_made_task(stream, [e] { return [e, record = e->begin_record()] { e->reach(record); }; });
  if (!c.has_value()) return report(cudaErrorInvalidValue);  // there is no capture
  if (*c == cudaSuccess) forget(event);
  return report(*c);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  const auto e = find(event);
  const auto wait = [e] { return [e, record = e->last_record()] { e->wait_for(record); }; };
  if (flags == cudaEventWaitExternal) {  // for the last record before each launch of the graph
    (void)find(stream);
    const Captured c = capture_made_task(stream, wait);
    return report(c.has_value() ? *c : cudaErrorInvalidValue);
  }
  if (flags != cudaEventWaitDefault) return report(cudaErrorInvalidValue);
  if (const Captured c = capture_wait(stream, event)) return report(*c);
  return report(enqueue(stream, wait()));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto e = find(event);
  const cudaError_t refused = check_host_sees(event);
  if (refused != cudaSuccess) return report(refused);
  e->wait_for(e->last_record());
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto e = find(event);
  const cudaError_t refused = check_host_sees(event);
  if (refused != cudaSuccess) return report(refused);
  const cudaError_t broken = device_error(current_device());
  if (broken != cudaSuccess) return report(broken);
  const std::lock_guard lock(e->mutex);
  return report(e->passed() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  const auto a = find(from), b = find(to);
  for (const cudaEvent_t e : {from, to}) {
    const cudaError_t refused = check_host_sees(e);
    if (refused != cudaSuccess) return report(refused);
  }
  const std::scoped_lock lock(a->mutex, b->mutex);
  if (a->n_recorded == 0 || b->n_recorded == 0) return report(cudaErrorInvalidResourceHandle);
  if (!a->passed() || !b->passed()) return report(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(b->time - a->time).count();
  return cudaSuccess;
}

}  // extern "C"
