// Whether ranks reach each other's memory as the driver says that they do: tried once, when peers' memory is
// made.
//
// cudaDeviceCanAccessPeer answers yes on machines where data then do not arrive (an IOMMU that translates,
// virtual machines). So every rank gives a pattern of its own, all gather them by the way that calls will
// take, pulled or pushed, and compare on the host. Flags that do not arrive are no endless wait: after
// kLimitS the kernels are told to stop, and say whom they waited for. All ranks end with the same answer.
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "engine/cuda/peer_collectives.h"
#include "transport/cuda/runtime.h"

namespace pycomm {

namespace {

constexpr size_t kBytes = 4096;
constexpr double kLimitS = 10;
constexpr double kEndS = 5;  // for kernels to end that were told to

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<unsigned char> pattern_of(int rank) {
  std::vector<unsigned char> bytes(kBytes);
  uint32_t state = 2654435761u * static_cast<uint32_t>(rank + 1);
  for (unsigned char& b : bytes) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<unsigned char>(state >> 24);
  }
  return bytes;
}

// What the trial uses on the device. Not freed where its kernel does not end.
struct Trial {
  cudaStream_t stream = nullptr;
  cudaEvent_t end = nullptr;
  void* memory = nullptr;  // this rank's pattern, then everybody's

  Status make(int rank, size_t n_ranks) {
    PYCOMM_RETURN_IF_ERROR(
        cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
    PYCOMM_RETURN_IF_ERROR(
        cuda_status(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "cudaEventCreate"));
    PYCOMM_RETURN_IF_ERROR(cuda_status(cudaMalloc(&memory, (n_ranks + 1) * kBytes), "cudaMalloc"));
    const auto mine = pattern_of(rank);
    PYCOMM_RETURN_IF_ERROR(cuda_status(
        cudaMemcpyAsync(memory, mine.data(), kBytes, cudaMemcpyHostToDevice, stream), "cudaMemcpy"));
    return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  char* all() const { return static_cast<char*>(memory) + kBytes; }
  Status read(std::vector<unsigned char>* out) const {
    PYCOMM_RETURN_IF_ERROR(cuda_status(
        cudaMemcpyAsync(out->data(), all(), out->size(), cudaMemcpyDeviceToHost, stream), "cudaMemcpy"));
    return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  void free() const {
    if (memory != nullptr) (void)cudaFree(memory);
    if (end != nullptr) (void)cudaEventDestroy(end);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
};

Status await(int device, cudaEvent_t event, double limit_s, bool* passed) {
  for (const double until_s = now_s() + limit_s; now_s() < until_s;) {
    PYCOMM_RETURN_IF_ERROR(event_passed(device, event, passed));
    if (*passed) return Status();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return Status();
}

}  // namespace

Status PeerCollectives::prove(const Exchange& exchange) {
  const auto n = static_cast<size_t>(memory_->n_ranks());
  const int device = memory_->device();
  if (n == 1) return Status();
  const DeviceGuard guard(device);
  Trial trial;
  bool ended = true;
  const auto run = [&]() -> Status {
    PYCOMM_RETURN_IF_ERROR(guard.status());
    PYCOMM_RETURN_IF_ERROR(trial.make(memory_->rank(), n));
    PYCOMM_RETURN_IF_ERROR(all_gather(trial.memory, trial.all(), kBytes, trial.stream));
    PYCOMM_RETURN_IF_ERROR(cuda_status(cudaEventRecord(trial.end, trial.stream), "cudaEventRecord"));
    ended = false;
    PYCOMM_RETURN_IF_ERROR(await(device, trial.end, kLimitS, &ended));
    if (!ended) {
      const Status late = Status::error(Code::kTimeout, format("waited %g s", kLimitS));
      abort(late.clone());
      PYCOMM_RETURN_IF_ERROR(await(device, trial.end, kEndS, &ended));
      return told_by_kernels(late);
    }
    PYCOMM_RETURN_IF_ERROR(failure());
    std::vector<unsigned char> got(n * kBytes);
    PYCOMM_RETURN_IF_ERROR(trial.read(&got));
    for (size_t r = 0; r < n; r++) {
      if (std::memcmp(got.data() + r * kBytes, pattern_of(static_cast<int>(r)).data(), kBytes) == 0) continue;
      return Status::error(Code::kSystem, format("CUDA device %d sees other data than %s gave", device,
                                                 name(static_cast<int>(r)).c_str()));
    }
    return Status();
  };
  limit_s_.store(kLimitS + kEndS);  // the watchdog's, which here only looks on
  const Status mine = run();
  limit_s_.store(options_.timeout_s);
  struct Finding {
    uint64_t good;
    char why[248];
  } finding{mine.ok() ? 1u : 0u, {}};
  const std::string why = mine.message();
  std::memcpy(finding.why, why.data(), utf8_prefix(why, sizeof finding.why - 1));
  std::vector<Finding> all(n);
  Status told = exchange(&finding, sizeof finding, all.data()).within("peers' memory, tried");
  if (told.ok() && ended) trial.free();  // no peer's kernel runs, which cudaFree would wait for
  if (!ended) PeerMemory::abandon(device);
  PYCOMM_RETURN_IF_ERROR(std::move(told));
  for (size_t r = 0; r < n; r++) {
    if (all[r].good != 0) continue;
    all[r].why[sizeof all[r].why - 1] = '\0';
    return Status::error(
        Code::kSystem,
        format("peers' memory does not work between these GPUs, though the driver offers it; %s found: %s "
               "(nvidia-smi topo -p2p rw; an IOMMU or a virtual machine may be in the way)",
               name(static_cast<int>(r)).c_str(), all[r].why));
  }
  return Status();
}

}  // namespace pycomm
