// Ranks as processes, whose memory reaches each other through IPC handles: values, and what is left when one
// of them is killed in the middle.
//
// The parent starts this program once a rank (CUDA does not survive a fork), each running the one disabled
// test that stands behind the name in PEER_PROCESS; their Exchange is a board in memory that all inherit.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "cuda/peer_values.h"

namespace pycomm {
namespace {

#if !defined(CUDA_ON_CPU_TSAN)  // which sees nothing between processes

constexpr size_t kMostBytes = 1024;

struct SharedBoard {
  std::atomic<uint64_t> round[cuda::kMaxPeers];
  char bytes[2][cuda::kMaxPeers][kMostBytes];
};

SharedBoard* map_board(int fd) {
  void* at = mmap(nullptr, sizeof(SharedBoard), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<SharedBoard*>(at);
}

Exchange exchange_of(SharedBoard* board, int rank, int size, double limit_s) {
  return [=](const void* mine, size_t n_bytes, void* all) -> Status {
    if (n_bytes > kMostBytes) return Status::error(Code::kValue, "too much for the board");
    const uint64_t round = board->round[rank].load() + 1;
    std::memcpy(board->bytes[round % 2][rank], mine, n_bytes);
    board->round[rank].store(round);
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
    for (int r = 0; r < size; ++r) {
      while (board->round[r].load() < round) {
        if (std::chrono::steady_clock::now() > until) {
          return Status::error(Code::kPeerLost, format("rank %d is gone", r));
        }
        usleep(200);
      }
      std::memcpy(static_cast<char*>(all) + static_cast<size_t>(r) * n_bytes, board->bytes[round % 2][r],
                  n_bytes);
    }
    return {};
  };
}

// Starts a process for each rank, which runs PeerProcess.DISABLED_<test>; returns their exit statuses. With
// own_gpu each sees a GPU of its own, and no other.
std::vector<int> run_processes(int n, const std::string& test, bool own_gpu = false) {
  const int fd = memfd_create("board", 0);  // inherited
  if (fd < 0 || ftruncate(fd, sizeof(SharedBoard)) != 0) return {};
  const PrivateFolder folder;
  std::vector<pid_t> pids;
  for (int r = 0; r < n; ++r) {
    const std::string filter = "--gtest_filter=PeerProcess.DISABLED_" + test;
    const std::string place = format("%d/%d/%d", r, n, fd);
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("PEER_PROCESS", place.c_str(), 1);
      setenv("PEER_FOLDER", folder.run().c_str(), 1);
      if (own_gpu) {
        setenv("CUDA_ON_CPU_DEVICES", "1", 1);
        setenv("CUDA_ON_CPU_FIRST_DEVICE", format("%d", r).c_str(), 1);
      }
      execl("/proc/self/exe", "a_rank", filter.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
            nullptr);
      _exit(127);
    }
    pids.push_back(pid);
  }
  std::vector<int> statuses;
  for (const pid_t pid : pids) {
    int status = -1;
    if (waitpid(pid, &status, 0) != pid) status = -1;
    statuses.push_back(status);
  }
  close(fd);
  return statuses;
}

// In a rank's process: which one it is, with memory that all others map. Emulated, all are on one device;
// GPUs are used in turn, so that with one GPU all share it, and with as many as ranks each has its own.
void take_place(PeerRank& self, SharedBoard** board) {
  const char* place = std::getenv("PEER_PROCESS");
  int fd = -1;
  ASSERT_NE(place, nullptr) << "run_processes starts this test";
  ASSERT_EQ(std::sscanf(place, "%d/%d/%d", &self.rank, &self.size, &fd), 3);
#if !defined(PYCOMM_CUDA_EMULATED)
  int n_devices = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&n_devices));
  ASSERT_GT(n_devices, 0);
  self.device = self.rank % n_devices;
#endif
  *board = map_board(fd);
  ASSERT_NE(*board, nullptr);
  self.folder = std::getenv("PEER_FOLDER");
}

void be_a_rank(PeerRank& self, const PeerOptions& options, double limit_s) {
  SharedBoard* board = nullptr;
  ASSERT_NO_FATAL_FAILURE(take_place(self, &board));
  self.exchange = exchange_of(board, self.rank, self.size, limit_s);
  ASSERT_OK(make_peer(self, options));
}

TEST(PeerProcess, DISABLED_Values) {
  PeerRank self;
  ASSERT_NO_FATAL_FAILURE(be_a_rank(self, small_options(), 60));
  const auto n = static_cast<size_t>(self.size);
  const Case sum{DType::kBFloat16, ReduceOp::kSum};
  for (const bool symmetric : {false, true}) {
    for (const size_t n_elems : {size_t{1}, size_t{333}, size_t{40000}}) {
      const size_t n_bytes = 2 * n_elems;
      std::vector<Bytes> inputs;
      for (int r = 0; r < self.size; ++r) inputs.push_back(input_of(r, n_bytes * n, n_elems));
      const Bytes all = reduced(sum, inputs, 1);
      const auto mine = static_cast<size_t>(self.rank) * n_bytes;
      const Bytes& input = inputs[static_cast<size_t>(self.rank)];
      for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
        const Tensor t(self, input, 0, symmetric);
        ASSERT_OK(
            self.comm->all_reduce(t.data(), t.data(), n_elems * n, sum.dtype, sum.op, 1, way, self.on()));
        ASSERT_OK(self.pass());
        ASSERT_TRUE(same(sum.dtype, t.get(), all)) << n_elems;
      }
      const Tensor in(self, input, 0, symmetric), part(self, n_bytes, 0, false);
      ASSERT_OK(self.comm->reduce_scatter(in.data(), part.data(), n_elems, sum.dtype, sum.op, 1, self.on()));
      ASSERT_OK(self.comm->all_gather(part.data(), in.data(), n_bytes, self.on()));
      ASSERT_OK(self.pass());
      ASSERT_TRUE(same(sum.dtype, in.get(), all)) << n_elems;
      ASSERT_TRUE(same(sum.dtype, part.get(),
                       Bytes(all.begin() + static_cast<std::ptrdiff_t>(mine),
                             all.begin() + static_cast<std::ptrdiff_t>(mine + n_bytes))));
      in.set(input);
      ASSERT_OK(self.comm->broadcast(in.data(), n_bytes * n, self.size - 1, PeerWay::kAuto, self.on()));
      ASSERT_OK(self.pass());
      ASSERT_EQ(in.get(), inputs.back());
    }
  }
  ASSERT_OK(end_peer(self));
}

TEST(PeerProcesses, ValuesAreThoseOfTheCpu) {
  for (int n = 1; n <= cuda::kMaxPeers; n++) {
    ASSERT_EQ(run_processes(n, "Values"), std::vector<int>(static_cast<size_t>(n), 0)) << n << " ranks";
  }
}

#if defined(PYCOMM_CUDA_EMULATED)
// As under Slurm's --gpus-per-task: a peer's GPU has no number here, its memory has a handle.
TEST(PeerProcesses, RanksThatSeeTheirOwnGpuOnly) {
  ASSERT_EQ(run_processes(3, "Values", true), (std::vector<int>{0, 0, 0}));
}

TEST(PeerProcess, DISABLED_WithoutAPath) {
  setenv("CUDA_ON_CPU_PEER_ACCESS", "0", 1);
  PeerRank self;
  SharedBoard* board = nullptr;
  ASSERT_NO_FATAL_FAILURE(take_place(self, &board));
  self.exchange = exchange_of(board, self.rank, self.size, 60);
  const Status s = make_peer(self, small_options());
  EXPECT_EQ(s.code(), Code::kSystem);
  for (const char* part :
       {"peer memory: rank 0: rank 1: cudaIpcOpenMemHandle", "its GPU 0000:02:00.0 is not visible",
        "CUDA_VISIBLE_DEVICES", "cudaErrorPeerAccessUnsupported"}) {
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
  }
}

TEST(PeerProcesses, HandlesThatDoNotOpenAreAgreedOn) {
  ASSERT_EQ(run_processes(2, "WithoutAPath", true), (std::vector<int>{0, 0}));
}
#endif

// Every dtype and operation, pulled and pushed, at an alignment that no tensor of torch has.
TEST(PeerProcess, DISABLED_EveryCase) {
  for (const bool push : {false, true}) {
    PeerOptions options = small_options();
    options.push = push;
    PeerRank self;
    ASSERT_NO_FATAL_FAILURE(be_a_rank(self, options, 60));
    for (int d = 0; d < kNumDTypes; ++d) {
      for (int o = 0; o < kNumReduceOps; ++o) {
        const Case c{static_cast<DType>(d), static_cast<ReduceOp>(o)};
        if (find_reduce(c.dtype, c.op) == nullptr) continue;
        const size_t n_elems = 333, n_bytes = n_elems * dtype_size(c.dtype);
        std::vector<Bytes> inputs;
        for (int r = 0; r < self.size; ++r) inputs.push_back(input_of(r, n_bytes, n_elems));
        const double scalar = c.op == ReduceOp::kAvg ? self.size : 1.5;
        for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
          const Tensor t(self, inputs[static_cast<size_t>(self.rank)], 3, way == PeerWay::kTwoShot);
          ASSERT_OK(
              self.comm->all_reduce(t.data(), t.data(), n_elems, c.dtype, c.op, scalar, way, self.on()));
          ASSERT_OK(self.pass());
          ASSERT_TRUE(same(c.dtype, t.get(), reduced(c, inputs, scalar)))
              << dtype_name(c.dtype) << " " << reduce_op_name(c.op) << ", way " << static_cast<int>(way)
              << ", push " << push;
        }
      }
    }
    ASSERT_OK(end_peer(self));
  }
}

TEST(PeerProcesses, EveryCaseIsTheCpus) {
  for (const int n : {2, 5}) {
    ASSERT_EQ(run_processes(n, "EveryCase"), std::vector<int>(static_cast<size_t>(n), 0)) << n << " ranks";
  }
}

// As soon as all peers that live have let go, too, which they do when they come here.
void expect_all_freed() {
#if defined(PYCOMM_CUDA_EMULATED)  // else the processes share a device
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (n_bytes_used() > 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << n_bytes_used() << " bytes are not freed";
    PeerMemory::free_retired(0);
    usleep(200);
  }
#endif
}

// The driver says that they reach each other, and what they write does not arrive.
TEST(PeerProcess, DISABLED_Broken) {
  PeerRank self;
  SharedBoard* board = nullptr;
  ASSERT_NO_FATAL_FAILURE(take_place(self, &board));
  self.exchange = exchange_of(board, self.rank, self.size, 60);
  const Status s = make_peer(self, small_options());
  ASSERT_EQ(s.code(), Code::kSystem) << s.message();
  for (const char* part :
       {"peers' memory does not work between these GPUs", "rank 0 found: all_gather of 4096",
        "rank 1 did not come; waited 10 s", "nvidia-smi topo -p2p"}) {
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
  }
  ASSERT_OK(end_peer(self));
  ASSERT_NO_FATAL_FAILURE(expect_all_freed());
}

TEST(PeerProcesses, MemoryThatDoesNotWorkIsFoundOut) {
  ASSERT_EQ(setenv("CUDA_ON_CPU_PEER_BROKEN", "1", 1), 0);
  const std::vector<int> statuses = run_processes(2, "Broken");
  ASSERT_EQ(unsetenv("CUDA_ON_CPU_PEER_BROKEN"), 0);
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

// The k-th communicator of these ranks has the memory of the one before.
TEST(PeerProcess, DISABLED_OneAfterAnother) {
  PeerRank self;
  ASSERT_NO_FATAL_FAILURE(be_a_rank(self, small_options(), 60));
#if defined(PYCOMM_CUDA_EMULATED)  // else the processes share a device
  const size_t n_first = n_bytes_used();
  ASSERT_GT(n_first, 0u);
#endif
  for (int i = 0; i < 5; ++i) {
    {
      const Tensor t(self, 4096, 0, true);
      ASSERT_OK(self.comm->all_reduce(t.data(), t.data(), 1024, DType::kFloat32, ReduceOp::kMax, 1,
                                      PeerWay::kTwoShot, self.on()));
      ASSERT_OK(self.pass());
    }
    ASSERT_OK(end_peer(self));
    ASSERT_OK(make_peer(self, small_options()));
#if defined(PYCOMM_CUDA_EMULATED)
    ASSERT_EQ(n_bytes_used(), n_first) << i;
#endif
  }
  ASSERT_OK(end_peer(self));
  ASSERT_NO_FATAL_FAILURE(expect_all_freed());
}

TEST(PeerProcesses, OneAfterAnotherInTheSameMemory) {
  ASSERT_EQ(run_processes(3, "OneAfterAnother"), std::vector<int>(3, 0));
}

// Rank 1 is killed while the others wait for it in a call: it keeps nobody's memory.
TEST(PeerProcess, DISABLED_OneIsKilled) {
  PeerOptions options = small_options();
  options.timeout_s = 1;
  PeerRank self;
  ASSERT_NO_FATAL_FAILURE(be_a_rank(self, options, 60));
  {
    const Tensor t(self, 4096, 0, true);
    ASSERT_OK(self.comm->all_reduce(t.data(), t.data(), 1024, DType::kFloat32, ReduceOp::kMax, 1,
                                    PeerWay::kTwoShot, self.on()));
    ASSERT_OK(self.pass());
    if (self.rank == 1) raise(SIGKILL);
    ASSERT_OK(self.comm->all_reduce(t.data(), t.data(), 1024, DType::kFloat32, ReduceOp::kMax, 1,
                                    PeerWay::kTwoShot, self.on()));
    const Status s = self.pass();
    ASSERT_TRUE(s.code() == Code::kTimeout || s.code() == Code::kPeerLost) << s.message();
    ASSERT_NE(s.message().find("rank 1"), std::string::npos) << s.message();
  }
  ASSERT_OK(end_peer(self));
  ASSERT_NO_FATAL_FAILURE(expect_all_freed());
}

TEST(PeerProcesses, WhoWasKilledIsNamed) {
  const std::vector<int> statuses = run_processes(3, "OneIsKilled");
  ASSERT_EQ(statuses.size(), 3u);
  EXPECT_EQ(statuses[0], 0);
  EXPECT_TRUE(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == SIGKILL);
  EXPECT_EQ(statuses[2], 0);
}

#endif

}  // namespace
}  // namespace pycomm
