// Graphs: replaying what was captured. See graph.h.
//
// A replay keeps the order between nodes that the capture has found, and no other: a *chain* of nodes, each
// of which is the only one after the one before it, runs on an OS thread of its own, started by the last of
// the nodes that it comes after. So branches run side by side, and ThreadSanitizer sees two nodes as ordered
// only when the graph orders them. With Settings::seed a chain begins up to 200 microseconds late. Replays
// of one executable graph follow each other, on whatever streams they were launched, as CUDA's do. Cost: a
// thread per chain and replay.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "graph_nodes.h"
#include "grid.h"

namespace cuda_on_cpu {
namespace {

struct Graph {
  explicit Graph(std::vector<Node> captured) : nodes(std::move(captured)), next(nodes.size()) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      for (const size_t before : nodes[i].after) next[before].push_back(i);
    }
  }
  // The node is the only one after the only one before it.
  bool continues_a_chain(size_t i) const {
    return nodes[i].after.size() == 1 && next[nodes[i].after[0]].size() == 1;
  }

  const std::vector<Node> nodes;
  std::vector<std::vector<size_t>> next;  // who comes after a node
};

// One run of a graph, on the thread of the stream in which it was launched.
class Replay {
 public:
  explicit Replay(const Graph& graph)  // when the graph is launched
      : graph_(graph), n_missing_(graph.nodes.size()), threads_(graph.nodes.size()) {
    for (size_t i = 0; i < n_missing_.size(); ++i) {
      tasks_.push_back(graph.nodes[i].make());
      n_missing_[i] = graph.nodes[i].after.size();
    }
  }
  void run() {
    for (size_t i = 0; i < threads_.size(); ++i) {
      if (graph_.nodes[i].after.empty()) start(i);
    }
    // A chain was started by one whose first node has a lower number: that has been joined, and nothing else
    // is needed to see its thread here.
    for (size_t i = 0; i < threads_.size(); ++i) {
      if (!graph_.continues_a_chain(i)) threads_[i].join();
    }
  }

 private:
  void start(size_t first) {
    threads_[first] = std::thread([this, first] { run_chain(first); });
  }
  void run_chain(size_t i) {
    wait_a_little(i);
    tasks_[i]();
    while (graph_.next[i].size() == 1 && graph_.continues_a_chain(graph_.next[i][0])) {
      i = graph_.next[i][0];
      tasks_[i]();
    }
    for (const size_t after : graph_.next[i]) {
      if (n_missing_[after].fetch_sub(1, std::memory_order_acq_rel) == 1) start(after);
    }
  }
  static void wait_a_little(size_t i) {
    static std::atomic<uint32_t> n_chains{1};
    if (settings().seed == 0) return;
    const uint32_t number = n_chains.fetch_add(1, std::memory_order_relaxed);
    Random random{((settings().seed + number) * 747796405u + static_cast<uint32_t>(i) * 2891336453u) | 1};
    random.next();
    if (random.next() % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random.next() % 200));
    }
  }

  const Graph& graph_;
  std::vector<Task> tasks_;
  std::vector<std::atomic<size_t>> n_missing_;  // of the nodes before a node
  std::vector<std::thread> threads_;  // of the chain that begins with a node; written by who starts it
};

// An executable graph: its launches take turns.
struct Executable {
  explicit Executable(std::shared_ptr<const Graph> of) : graph(std::move(of)) {}
  void run(uint64_t turn, Replay& replay) {
    {
      std::unique_lock lock(mutex);
      ended.wait(lock, [&] { return n_ended == turn; });
    }
    replay.run();
    const std::lock_guard lock(mutex);
    ++n_ended;
    ended.notify_all();
  }
  const std::shared_ptr<const Graph> graph;
  std::mutex mutex;
  std::condition_variable ended;
  uint64_t n_launched = 0, n_ended = 0;
};

template <class Handle, class T>
class Table {
 public:
  Handle add(std::shared_ptr<T> made) {
    const std::lock_guard lock(mutex_);
    const auto handle = reinterpret_cast<Handle>(const_cast<std::remove_const_t<T>*>(made.get()));
    all_[handle] = std::move(made);
    return handle;
  }
  std::shared_ptr<T> find(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto it = all_.find(handle);
    return it == all_.end() ? nullptr : it->second;
  }
  std::shared_ptr<T> take(Handle handle) {  // dropped by the caller, outside of the lock
    const std::lock_guard lock(mutex_);
    const auto node = all_.extract(handle);
    return node.empty() ? nullptr : node.mapped();
  }

 private:
  std::mutex mutex_;
  std::map<Handle, std::shared_ptr<T>> all_;
};
Table<cudaGraph_t, const Graph>& graphs() {
  static auto* const all = new Table<cudaGraph_t, const Graph>;
  return *all;
}
Table<cudaGraphExec_t, Executable>& executables() {
  static auto* const all = new Table<cudaGraphExec_t, Executable>;
  return *all;
}

constexpr unsigned long long kAutoFreeOnLaunch = 1;  // for memory nodes, which do not exist here

}  // namespace
}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  std::vector<Node> nodes;
  const cudaError_t error = end_capture(stream, &nodes);
  if (error != cudaSuccess) return report(error);
  *graph = graphs().add(std::make_shared<const Graph>(std::move(nodes)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  const auto made_from = graphs().find(graph);
  if (made_from == nullptr || (flags & ~kAutoFreeOnLaunch) != 0) return report(cudaErrorInvalidValue);
  *exec = executables().add(std::make_shared<Executable>(made_from));
  return cudaSuccess;
}

// In a captured stream: a node that is the whole graph.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const auto e = executables().find(exec);
  if (e == nullptr) return report(cudaErrorInvalidValue);
  const auto replay_of = [](const std::shared_ptr<const Graph>& graph) {
    return std::make_shared<Replay>(*graph);
  };
  const MakeTask make = [replay_of, graph = e->graph] {
    return [graph, replay = replay_of(graph)] { replay->run(); };
  };
  if (const Captured c = capture_made_task(stream, make)) return report(*c);
  const std::lock_guard lock(e->mutex);  // turns are those of the streams' queues
  const cudaError_t error =
      enqueue(stream, [e, turn = e->n_launched, replay = replay_of(e->graph)] { e->run(turn, *replay); });
  if (error == cudaSuccess) ++e->n_launched;
  return report(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return report(executables().take(exec) == nullptr ? cudaErrorInvalidValue : cudaSuccess);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return report(graphs().take(graph) == nullptr ? cudaErrorInvalidValue : cudaSuccess);
}

}  // extern "C"
