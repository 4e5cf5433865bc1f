// PeerMemory: the heap, places, and what is refused, with ranks as threads.
#include "cuda/peer_values.h"

namespace pycomm {
namespace {

TEST(PeerMemoryTest, BlocksAreAlignedDisjointAndUsedAgain) {
  run_peers(1, small_options(), [&](PeerRank& self) {
    std::vector<void*> blocks;
    for (size_t n : {size_t{1}, size_t{256}, size_t{257}, size_t{5000}}) {
      void* p = nullptr;
      ASSERT_OK(self.memory->allocate(n, &p));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % PeerMemory::kAlignment, 0u);
      ASSERT_CUDA(cudaMemset(p, 1, n));
      blocks.push_back(p);
    }
    EXPECT_EQ(self.memory->n_bytes_in_use(), 256u + 256 + 512 + 5120);
    ASSERT_OK(self.memory->release(blocks[1]));
    ASSERT_OK(self.memory->release(blocks[2]));
    void* p = nullptr;
    ASSERT_OK(self.memory->allocate(768, &p));
    EXPECT_EQ(p, blocks[1]) << "neighbours were merged";
    ASSERT_OK(self.memory->release(p));
    ASSERT_OK(self.memory->release(blocks[0]));
    ASSERT_OK(self.memory->release(blocks[3]));
    EXPECT_EQ(self.memory->n_bytes_in_use(), 0u);
    EXPECT_EQ(self.memory->release(blocks[3]).code(), Code::kValue);
    EXPECT_EQ(self.memory->release(&p).code(), Code::kValue);
  });
}

TEST(PeerMemoryTest, PlacesMeanTheSameMemoryOnEveryRank) {
  run_peers(3, small_options(), [&](PeerRank& self) {
    void* first = nullptr;
    void* p = nullptr;  // elsewhere on each rank: they need not allocate alike
    ASSERT_OK(self.memory->allocate(1000 * static_cast<size_t>(self.rank + 1), &first));
    ASSERT_OK(self.memory->allocate(4096, &p));
    uint64_t place = 0;
    ASSERT_TRUE(self.memory->find(static_cast<char*>(p) + 7, 10, &place));
    ASSERT_CUDA(cudaMemset(static_cast<char*>(p) + 7, self.rank + 1, 10));
    uint64_t all[3];
    ASSERT_OK(self.exchange(&place, sizeof place, all));
    EXPECT_NE(all[0], all[1]);
    for (int r = 0; r < 3; ++r) {
      uint8_t got = 0;
      ASSERT_CUDA(cudaMemcpy(&got, self.memory->base(r) + all[r], 1, cudaMemcpyDeviceToHost));
      EXPECT_EQ(got, r + 1);
    }
    ASSERT_OK(self.exchange(&place, sizeof place, all));
    ASSERT_OK(self.memory->release(first));
    ASSERT_OK(self.memory->release(p));
  });
}

TEST(PeerMemoryTest, WhatIsReservedOrBehindTheEndIsNoTensor) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    uint64_t place = 0;
    EXPECT_FALSE(self.memory->find(self.memory->base(self.rank), 1, &place));
    EXPECT_FALSE(self.memory->find(self.memory->base(1 - self.rank) + (1 << 19), 1, &place)) << "a peer's";
    void* p = nullptr;
    ASSERT_OK(self.memory->allocate(1000, &p));
    EXPECT_TRUE(self.memory->find(p, 1000, &place));
    EXPECT_FALSE(self.memory->find(p, size_t{1} << 40, &place));
    ASSERT_OK(self.memory->release(p));
    const Status s = self.memory->allocate(size_t{1} << 40, &p);
    EXPECT_EQ(s.code(), Code::kSystem);
    EXPECT_NE(s.message().find("no room for 1099511627776 bytes"), std::string::npos) << s.message();
  });
}

TEST(PeerMemoryTest, SizesThatDifferAreRefusedOnEveryRank) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    std::shared_ptr<PeerMemory> other;
    const auto make = [&](size_t n_heap_bytes) {
      PeerMemory::Options options = memory_options(self, small_options(), n_heap_bytes);
      options.n_reserved_bytes = 0;
      return PeerMemory::create(options, self.exchange, &other);
    };
    const Status s = make(self.rank == 0 ? 1 : 5 << 20);
    EXPECT_EQ(s.code(), Code::kValue);
    EXPECT_NE(s.message().find("this rank asks for 2097152 bytes, rank 1 for 6291456"), std::string::npos)
        << s.message();
    EXPECT_EQ(other, nullptr);
    ASSERT_OK(make(1));
    PeerMemory::retire(std::move(other));
  });
}

#if defined(PYCOMM_CUDA_EMULATED)  // devices can be told there to have no path
TEST(PeerMemoryTest, APairOfDevicesWithoutAPathIsNamed) {
  setenv("CUDA_ON_CPU_PEER_ACCESS", "0", 1);
  Board board(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      PeerRank self;
      self.rank = self.device = r;
      self.size = 2;
      self.exchange = board.of(r);
      self.folder = board.folder();
      const Status s = make_peer(self, small_options());
      EXPECT_EQ(s.code(), Code::kSystem);
      EXPECT_EQ(
          s.message(),
          "peer memory: rank 0: rank 1: GPU 0 has no peer access to its GPU 1 (0000:02:00.0): no NVLink or "
          "PCIe path between them allows it (nvidia-smi topo -p2p r)");
    });
  }
  for (std::thread& t : threads) t.join();
  unsetenv("CUDA_ON_CPU_PEER_ACCESS");
}
#endif

// What one rank says decides for all: they would not find each other's data otherwise.
TEST(PeerMemoryTest, OneRankThatPushesMakesAllPush) {
  Board board(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      PeerRank self;
      self.rank = self.device = r;
      self.size = 3;
      self.exchange = board.of(r);
      self.folder = board.folder();
      PeerOptions options = small_options();
      options.push = r == 1;
      ASSERT_OK(make_peer(self, options));
      EXPECT_TRUE(self.comm->pushes()) << r;
      ASSERT_OK(end_peer(self));
    });
  }
  for (std::thread& t : threads) t.join();
}

#if defined(PYCOMM_CUDA_EMULATED)
TEST(PeerMemoryTest, WhatIsReachedOverPcieIsPushed) {
  for (const char* atomics : {"1", "0"}) {
    setenv("CUDA_ON_CPU_NATIVE_ATOMICS", atomics, 1);
    run_peers(2, small_options(), [&](PeerRank& self) { EXPECT_EQ(self.comm->pushes(), *atomics == '0'); });
  }
  unsetenv("CUDA_ON_CPU_NATIVE_ATOMICS");
}
#endif

}  // namespace
}  // namespace pycomm
