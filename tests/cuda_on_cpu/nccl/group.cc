#include "group.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "cuda_runtime_api.h"
#include "graph.h"
#include "grid.h"

namespace loopback {

namespace {

// Puts an operation on the stream of its first call; the other streams wait for it, and it for them.
nccl::Result launch(std::unique_ptr<Operation> operation) {
  std::vector<nccl::Stream> streams;
  for (const Call& c : operation->calls()) {
    if (std::find(streams.begin(), streams.end(), c.stream) == streams.end()) streams.push_back(c.stream);
  }
  bool ok = true;
  const auto order = [&](nccl::Stream first, nccl::Stream second) {
    cudaEvent_t event;
    ok = ok && cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess &&
         cudaEventRecord(event, first) == cudaSuccess &&
         cudaStreamWaitEvent(second, event, 0) == cudaSuccess && cudaEventDestroy(event) == cudaSuccess;
  };
  for (size_t i = 1; i < streams.size(); i++) order(streams[i], streams[0]);
  const std::shared_ptr<Core> core = operation->core().shared_from_this();
  const bool captured = cuda_on_cpu::is_captured(streams[0]);
  if (captured) operation->capture();
  const std::shared_ptr<Operation> shared = std::move(operation);
  const bool enqueued = ok && cuda_on_cpu::enqueue(streams[0], [shared] { shared->run(); }) == cudaSuccess;
  if (captured || !enqueued) core->end_busy();  // nothing will run now
  ok = enqueued;
  for (size_t i = 1; i < streams.size(); i++) order(streams[0], streams[i]);
  return ok ? nccl::kSuccess : nccl::kUnhandledCudaError;
}

// NCCL makes connections on a thread of its own, with calls like cudaMalloc.
bool may_connect() {
  cudaError_t error = cudaSuccess;
  std::thread([&] { error = cuda_on_cpu::check_unsafe_call(); }).join();
  return error == cudaSuccess;
}

struct Group {
  int depth = 0;
  nccl::Result error = nccl::kSuccess;
  std::vector<Call> calls;
};
thread_local Group group;

// A non-blocking communicator connects behind the caller's back: the streams get their work later. From NCCL
// 2.24 on that is how it does all its groups.
bool always_later() { return version() >= 22400; }

nccl::Result launch_later(std::vector<std::unique_ptr<Operation>> operations, bool connects) {
  for (auto& o : operations) o->core().state = nccl::kInProgress;
  std::thread([operations = std::move(operations), connects]() mutable {
    if (connects) std::this_thread::sleep_for(std::chrono::microseconds(500));
    for (auto& o : operations) {
      const std::shared_ptr<Core> core = o->calls()[0].core;
      (void)cudaSetDevice(core->device);
      const nccl::Result result = launch(std::move(o));
      int expected = nccl::kInProgress;  // unless the operation has failed by now
      core->state.compare_exchange_strong(expected, result);
    }
  }).detach();
  return nccl::kInProgress;
}

nccl::Result launch_all() {
  std::vector<std::unique_ptr<Operation>> operations;
  for (Call& c : group.calls) {
    const auto found = std::find_if(operations.begin(), operations.end(),
                                    [&](const auto& o) { return &o->core() == c.core.get(); });
    if (found != operations.end()) {
      (*found)->add(c);
      continue;
    }
    const nccl::Result ready = c.core->check_ready();
    if (ready != nccl::kSuccess) return ready;
    operations.push_back(std::make_unique<Operation>(c.core));
    operations.back()->add(c);
  }
  bool connects = false, later = false;
  for (const auto& o : operations) later |= !o->core().blocking && always_later();
  for (auto& o : operations) {
    if (!o->must_connect()) continue;
    if (!may_connect()) {
      return o->core().fail(nccl::kUnhandledCudaError,
                            "a connection was to be made while a stream is captured in global mode");
    }
    o->connect();
    connects |= !o->core().blocking;
  }
  for (auto& o : operations) o->core().begin_busy();
  if (later || connects) return launch_later(std::move(operations), connects);
  nccl::Result result = nccl::kSuccess;
  for (auto& o : operations) {
    const nccl::Result r = launch(std::move(o));
    if (result == nccl::kSuccess) result = r;
  }
  return result;
}

}  // namespace

int version() {
  const char* text = std::getenv("LOOPBACK_NCCL_VERSION");
  return text != nullptr ? std::atoi(text) : 23203;
}

bool in_group() { return group.depth > 0; }

nccl::Result start_group() {
  group.depth++;
  return nccl::kSuccess;
}

nccl::Result add_call(Call call) {
  start_group();
  nccl::Result result = call.core->check_ready();
  if (result != nccl::kSuccess && group.error == nccl::kSuccess) group.error = result;
  group.calls.push_back(std::move(call));
  if (group.depth > 1) {
    group.depth--;
    return result;
  }
  return end_group();
}

nccl::Result end_group() {
  if (group.depth == 0) return nccl::kInvalidUsage;
  if (--group.depth > 0) return nccl::kSuccess;
  const nccl::Result result = group.error != nccl::kSuccess ? group.error : launch_all();
  group = Group();
  return result;
}

}  // namespace loopback
