// Ranks as threads, each with an emulated device, PeerMemory, PeerCollectives and a stream: what every test
// of peer memory starts with. (Ranks that share a device may not call cudaFree between calls: it waits for
// the whole device, so for peers' kernels that wait for this rank.)
//
// run_peers(n, options, fn) gives each rank those and calls fn on its thread. The ranks' Exchange is a board
// in shared memory; a rank that leaves fn early (a failed ASSERT) makes the others' exchanges fail instead of
// hang. At the end each rank retires its memory, which the next test on its device frees.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/memory.h"
#include "engine/cuda/peer_collectives.h"
#include "private_folder.h"

namespace pycomm {

// Before anybody asks how many devices there are.
inline const bool has_devices = setenv("CUDA_ON_CPU_DEVICES", "8", 0) == 0;
// Address space is dear under sanitizers.
inline const bool has_small_arenas = setenv("PYCOMM_ARENA_MAX", "268435456", 0) == 0;

// All-gather between threads, and where their nodes meet.
class Board {
 public:
  explicit Board(int n_ranks) : n_(static_cast<size_t>(n_ranks)), alive_(n_) {}

  Exchange of(int rank) {
    return [this, rank](const void* mine, size_t n_bytes, void* all) {
      return exchange(static_cast<size_t>(rank), mine, n_bytes, all);
    };
  }
  std::string folder() const { return folder_.run(); }
  void leave() {
    const std::lock_guard lock(mutex_);
    --alive_;
    changed_.notify_all();
  }

 private:
  Status exchange(size_t rank, const void* mine, size_t n_bytes, void* all) {
    std::unique_lock lock(mutex_);
    const size_t round = round_;
    bytes_.resize(n_ * n_bytes);
    std::memcpy(bytes_.data() + rank * n_bytes, mine, n_bytes);
    if (++n_here_ == n_) {
      result_ = bytes_;
      n_here_ = 0;
      ++round_;
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, std::chrono::seconds(60),
                                  [&] { return round_ != round || alive_ < n_; }) ||
               round_ == round) {
      return Status::error(Code::kPeerLost, "a rank has left the test");
    }
    std::memcpy(all, result_.data(), n_ * n_bytes);
    return {};
  }

  const PrivateFolder folder_;
  const size_t n_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> bytes_, result_;
  size_t n_here_ = 0, round_ = 0, alive_;
};

struct PeerRank {
  int rank = 0;
  int size = 1;
  int device = 0;
  Exchange exchange;
  std::string folder;
  std::shared_ptr<Node> node;
  std::shared_ptr<PeerMemory> memory;
  std::unique_ptr<PeerCollectives> comm;
  cudaStream_t stream = nullptr;
  std::vector<void*> freed_last;  // by Tensor (peer_values.h), on a GPU

  ~PeerRank() {
    for (void* p : freed_last) EXPECT_EQ(cudaFree(p), cudaSuccess);
  }

  cuda::Stream on() const { return stream; }
  Status pass() const {  // the stream has passed everything, and it went well
    if (cudaStreamSynchronize(stream) != cudaSuccess) return Status::error(Code::kSystem, "stream");
    return comm->failure();
  }
};

// Small blocks: a CUDA thread costs a fiber here.
inline PeerOptions small_options() {
  PeerOptions options;
  const char* timeout_s = std::getenv("PEER_TEST_TIMEOUT_S");
  options.timeout_s = timeout_s != nullptr ? std::atof(timeout_s) : 60;
  options.half_bytes = 64 << 10;
  options.max_blocks = 3;
  options.n_threads = 32;
  options.one_shot_bytes = 2048;
  return options;
}

inline PeerMemory::Options memory_options(const PeerRank& self, const PeerOptions& options,
                                          size_t n_heap_bytes) {
  std::vector<int> node_ranks;
  for (int r = 0; r < self.size; ++r) node_ranks.push_back(r);
  return {self.device,
          self.rank,
          self.size,
          PeerCollectives::reserved_bytes(options.half_bytes),
          PeerCollectives::zero_bytes(),
          n_heap_bytes,
          self.node,
          std::move(node_ranks)};
}

// The first time the rank's node, too.
inline Status make_peer(PeerRank& self, const PeerOptions& options, size_t n_heap_bytes = 1 << 20) {
  if (self.node == nullptr) {
    PYCOMM_RETURN_IF_ERROR(Node::join(self.folder, self.rank, self.size, 4096, 60, nullptr, &self.node));
  }
  if (cudaSetDevice(self.device) != cudaSuccess) return Status::error(Code::kSystem, "cudaSetDevice");
  PYCOMM_RETURN_IF_ERROR(
      PeerMemory::create(memory_options(self, options, n_heap_bytes), self.exchange, &self.memory));
  if (cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking) != cudaSuccess) {
    return Status::error(Code::kSystem, "cudaStreamCreate");
  }
  return PeerCollectives::create(self.memory.get(), options, self.exchange, &self.comm);
}

inline Status end_peer(PeerRank& self) {
  self.comm.reset();
  const cudaStream_t stream = std::exchange(self.stream, nullptr);
  if (stream != nullptr && cudaStreamDestroy(stream) != cudaSuccess) {
    return Status::error(Code::kSystem, "cudaStreamDestroy");
  }
  PeerMemory::retire(std::move(self.memory));
  return {};
}

// Of the thread's device, by this process where CUDA is emulated.
inline size_t n_bytes_used() {
  size_t n_free = 0, n_total = 0;
  if (cudaMemGetInfo(&n_free, &n_total) != cudaSuccess) ADD_FAILURE();
  return n_total - n_free;
}

inline void run_peers(int n, const PeerOptions& options, const std::function<void(PeerRank&)>& fn) {
  Board board(n);
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      PeerRank self;
      self.rank = r;
      self.size = n;
      self.device = r;
      self.exchange = board.of(r);
      self.folder = board.folder();
      const Status made = make_peer(self, options);
      EXPECT_TRUE(made.ok()) << "rank " << r << ": " << made.message();
      if (made.ok()) fn(self);
      if (made.ok() && !testing::Test::HasFatalFailure()) {
        const Status ended = end_peer(self);
        EXPECT_TRUE(ended.ok()) << "rank " << r << ": " << ended.message();
      }
      board.leave();
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace pycomm
