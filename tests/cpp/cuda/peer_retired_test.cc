// Memory whose communicator has closed: freed when every peer has let go of it, and not before. Ranks as
// threads; peer_processes_test.cc has those whose mappings are handles, and one that dies.
#include "cuda/peer_values.h"

namespace pycomm {
namespace {

void meet(PeerRank& self) {
  const char mine = 0;
  std::vector<char> all(static_cast<size_t>(self.size));
  ASSERT_OK(self.exchange(&mine, 1, all.data()));
}

// As the next create does.
void let_go_and_free(PeerRank& self) {
  PeerMemory::free_retired(self.device);
  ASSERT_NO_FATAL_FAILURE(meet(self));
  PeerMemory::free_retired(self.device);
  ASSERT_NO_FATAL_FAILURE(meet(self));
}

size_t size_of(const PeerRank& self) {  // emulated, and on GPUs: in whole pages
  const PeerMemory::Options o = memory_options(self, small_options(), 1 << 20);
  return (o.n_reserved_bytes + o.n_heap_bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20);
}

TEST(PeerRetired, TheNextCreateFreesIt) {
  run_peers(3, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));  // of tests before
    const size_t before = n_bytes_used();
    for (int i = 0; i < 10; ++i) {
      ASSERT_OK(end_peer(self));
      ASSERT_OK(make_peer(self, small_options()));
      ASSERT_EQ(n_bytes_used(), before) << i;
    }
  });
}

TEST(PeerRetired, NotBeforeEveryPeerHasLetGo) {
  run_peers(3, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    const size_t before = n_bytes_used();
    ASSERT_NO_FATAL_FAILURE(meet(self));
    if (self.rank != 2) ASSERT_OK(end_peer(self));  // which waits for nobody
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    EXPECT_EQ(n_bytes_used(), before);
    if (self.rank == 2) {  // as a kernel of it may
      for (const int peer : {0, 1}) {
        char* const at = self.memory->base(peer) + PeerCollectives::zero_bytes();
        ASSERT_CUDA(cudaMemsetAsync(at, 7, 1000, self.stream));
        char got = 0;
        ASSERT_CUDA(cudaMemcpyAsync(&got, at, 1, cudaMemcpyDeviceToHost, self.stream));
        ASSERT_CUDA(cudaStreamSynchronize(self.stream));
        EXPECT_EQ(got, 7);
      }
      ASSERT_OK(end_peer(self));
    }
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    EXPECT_EQ(n_bytes_used(), before - size_of(self));
    ASSERT_OK(make_peer(self, small_options()));
  });
}

TEST(PeerRetired, BlocksInUseOutliveIt) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    const size_t before = n_bytes_used();
    const std::shared_ptr<PeerMemory> memory = self.memory;
    void* p = nullptr;
    if (self.rank == 0) ASSERT_OK(memory->allocate(1000, &p));
    ASSERT_OK(end_peer(self));
    ASSERT_OK(make_peer(self, small_options()));
    EXPECT_EQ(n_bytes_used(), before + (self.rank == 0 ? size_of(self) : 0));
    if (self.rank == 0) {
      ASSERT_CUDA(cudaMemset(p, 1, 1000));
      ASSERT_OK(memory->release(p));
    }
    ASSERT_OK(end_peer(self));
    ASSERT_OK(make_peer(self, small_options()));
    EXPECT_EQ(n_bytes_used(), before);
  });
}

// Also what was in use when the communicator failed, once it was released.
TEST(PeerRetired, AfterAFailure) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    const size_t before = n_bytes_used();
    void* p = nullptr;
    ASSERT_OK(self.memory->allocate(1000, &p));
    self.comm->abort(Status::error(Code::kClosed, "aborted by the user"));
    ASSERT_OK(self.memory->release(p));
    ASSERT_OK(end_peer(self));
    ASSERT_OK(make_peer(self, small_options()));
    EXPECT_EQ(n_bytes_used(), before);
  });
}

// A graph of rank 1 may be replayed: both memories stay.
TEST(PeerRetired, WhatIsKeptStays) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    const size_t before = n_bytes_used();
    if (self.rank == 1) self.memory->keep();
    ASSERT_OK(end_peer(self));
    ASSERT_OK(make_peer(self, small_options()));
    EXPECT_EQ(n_bytes_used(), before + size_of(self));
  });
}

TEST(PeerRetired, AFailedCreateLeavesNothing) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    const size_t before = n_bytes_used();
    std::shared_ptr<PeerMemory> other;
    const auto options = memory_options(self, small_options(), self.rank == 0 ? 1 : 20 << 20);
    EXPECT_FALSE(PeerMemory::create(options, self.exchange, &other).ok());
    EXPECT_EQ(n_bytes_used(), before);
  });
}

#if defined(PYCOMM_CUDA_EMULATED)
// A rank that has no memory at all, told on every rank.
TEST(PeerRetired, WithoutMemoryNobodyHasAny) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    ASSERT_NO_FATAL_FAILURE(let_go_and_free(self));
    const size_t before = n_bytes_used();
    std::shared_ptr<PeerMemory> other;
    setenv("CUDA_ON_CPU_LARGEST", "1:1000000", 1);
    const Status s =
        PeerMemory::create(memory_options(self, small_options(), 1 << 20), self.exchange, &other);
    EXPECT_NE(s.message().find("peer memory: rank 1: cudaMalloc of"), std::string::npos) << s.message();
    EXPECT_EQ(n_bytes_used(), before);
    ASSERT_NO_FATAL_FAILURE(meet(self));
    unsetenv("CUDA_ON_CPU_LARGEST");
  });
}

// cudaFree waits for its device, where a kernel may wait for another rank of this process, which retires
// something before it comes. (Where rank 1 is there first the test shows nothing.)
TEST(PeerRetired, RetiringWaitsForNobody) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    PeerRank alone;
    alone.device = self.device;
    const Exchange nobody = [](const void* mine, size_t n_bytes, void* all) {
      std::memcpy(all, mine, n_bytes);
      return Status();
    };
    const Tensor t(self, 4000, 0, false);
    const auto sum = [&] {
      return self.comm->all_reduce(t.data(), t.data(), 1000, DType::kFloat32, ReduceOp::kSum, 1,
                                   PeerWay::kTwoShot, self.on());
    };
    std::shared_ptr<PeerMemory> memory;
    ASSERT_OK(PeerMemory::create(memory_options(alone, small_options(), 1 << 20), nobody, &memory));
    if (self.rank == 0) {
      PeerMemory::retire(std::move(memory));
      ASSERT_OK(sum());
      ASSERT_NO_FATAL_FAILURE(meet(self));
      PeerMemory::free_retired(0);
    } else {
      ASSERT_NO_FATAL_FAILURE(meet(self));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      PeerMemory::retire(std::move(memory));
      ASSERT_OK(sum());
    }
    ASSERT_OK(self.pass());
  });
}
#endif

}  // namespace
}  // namespace pycomm
