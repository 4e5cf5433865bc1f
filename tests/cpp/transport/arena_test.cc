// The arena: blocks never overlap, freed memory is merged and used again, growth stops at the limit with an
// error that says so, and threads may allocate at once. Expectations are of offsets and bytes, counted here.
#include "transport/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace pycomm {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class ArenaTest : public testing::Test {
 protected:
  void SetUp() override { setenv("PYCOMM_ARENA_MAX", std::to_string(16 * kMiB).c_str(), 1); }
  void TearDown() override { unsetenv("PYCOMM_ARENA_MAX"); }

  static std::shared_ptr<Arena> make() {
    std::shared_ptr<Arena> a;
    const Status s = Arena::create(&a);
    EXPECT_TRUE(s.ok()) << s.message();
    return a;
  }
  static uint64_t allocate(Arena& a, size_t n_bytes) {
    uint64_t offset = 0;
    const Status s = a.allocate(n_bytes, &offset);
    EXPECT_TRUE(s.ok()) << s.message();
    return offset;
  }
  static size_t file_bytes(const Arena& a) {
    struct stat st;
    return fstat(a.fd(), &st) == 0 ? static_cast<size_t>(st.st_size) : 0;
  }
};

TEST_F(ArenaTest, BlocksAreAlignedZeroAndApart) {
  const auto a = make();
  std::vector<std::pair<uint64_t, size_t>> blocks;
  for (size_t n : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{129}, size_t{5000}, 3 * kMiB}) {
    const uint64_t at = allocate(*a, n);
    EXPECT_EQ(at % 128, 0u);
    for (const auto& [other, n_other] : blocks) EXPECT_TRUE(at + n <= other || other + n_other <= at);
    for (size_t i = 0; i < n; i += 97) ASSERT_EQ(a->base()[at + i], std::byte{0});
    std::memset(a->base() + at, 0x5A, n);
    blocks.emplace_back(at, std::max<size_t>(n, 1));
    EXPECT_TRUE(a->owns(a->base() + at));
    EXPECT_EQ(a->offset_of(a->base() + at), at);
  }
  EXPECT_FALSE(a->owns(&blocks));
  EXPECT_FALSE(a->owns(a->base() + a->reserved()));
  EXPECT_EQ(a->bytes_in_use(), 128u * (1 + 1 + 1 + 1 + 2 + 40) + 3 * kMiB);
}

TEST_F(ArenaTest, FreedNeighboursMergeInEveryOrder) {
  std::vector<int> order = {0, 1, 2};
  do {
    const auto a = make();
    uint64_t at[3];
    for (uint64_t& x : at) x = allocate(*a, 1024);
    const uint64_t fence = allocate(*a, 128);
    for (int i : order) a->release(at[i]);
    EXPECT_EQ(allocate(*a, 3 * 1024), at[0]) << "three merged blocks serve one of their size";
    EXPECT_GT(fence, at[2]);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(ArenaTest, TakesTheBestFitAndReusesIt) {
  const auto a = make();
  const uint64_t big = allocate(*a, 4096);
  allocate(*a, 128);
  const uint64_t small = allocate(*a, 256);
  allocate(*a, 128);
  a->release(big);
  a->release(small);
  EXPECT_EQ(allocate(*a, 256), small);
  EXPECT_EQ(allocate(*a, 4096), big);
  const size_t in_use = a->bytes_in_use();
  a->release(12345 * 128);  // not a block: nothing happens
  a->release(big + 128);
  EXPECT_EQ(a->bytes_in_use(), in_use);
}

TEST_F(ArenaTest, GrowsWithoutMovingAndRecyclesInsteadOfGrowing) {
  const auto a = make();
  std::byte* const base = a->base();
  const uint64_t first = allocate(*a, kMiB);
  base[first] = std::byte{42};
  const uint64_t second = allocate(*a, 5 * kMiB);
  EXPECT_EQ(a->base(), base);
  EXPECT_EQ(base[first], std::byte{42});
  const size_t grown = file_bytes(*a);
  EXPECT_GE(grown, 6 * kMiB);
  for (int i = 0; i < 100; i++) {
    a->release(second);
    ASSERT_EQ(allocate(*a, 5 * kMiB), second);
  }
  EXPECT_EQ(file_bytes(*a), grown);
}

TEST_F(ArenaTest, TheLimitIsAnErrorThatNamesTheVariableAndIsSurvived) {
  const auto a = make();
  EXPECT_EQ(a->reserved(), 16 * kMiB);
  uint64_t offset = 0;
  Status s = a->allocate(17 * kMiB, &offset);
  EXPECT_EQ(s.code(), Code::kSystem);
  EXPECT_NE(s.message().find("PYCOMM_ARENA_MAX"), std::string::npos) << s.message();
  const uint64_t all = allocate(*a, 16 * kMiB);
  EXPECT_EQ(a->allocate(1, &offset).code(), Code::kSystem);
  a->release(all);
  EXPECT_EQ(allocate(*a, 16 * kMiB), all);
}

TEST_F(ArenaTest, ABadLimitIsRefused) {
  for (const char* bad : {"", "12", "lots", "4194304x", "-1x"}) {
    setenv("PYCOMM_ARENA_MAX", bad, 1);
    std::shared_ptr<Arena> a;
    const Status s = Arena::create(&a);
    EXPECT_EQ(s.code(), Code::kValue) << "'" << bad << "'";
    EXPECT_NE(s.message().find("PYCOMM_ARENA_MAX"), std::string::npos) << s.message();
  }
}

TEST_F(ArenaTest, IsSealedAgainstShrinking) {
  const auto a = make();
  allocate(*a, kMiB);
  EXPECT_NE(ftruncate(a->fd(), 0), 0);
  EXPECT_NE(fcntl(a->fd(), F_GETFD) & FD_CLOEXEC, 0) << "a program that we start must not inherit it";
}

TEST_F(ArenaTest, ThreadsShareOneMappingAndItOutlivesTheOwner) {
  auto a = make();
  const uint64_t at = allocate(*a, 4096);
  a->base()[at] = std::byte{7};
  std::shared_ptr<PeerArena> peer;
  const Status s = PeerArena::attach(dup(a->fd()), a->reserved(), &peer);
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(peer->base(), a->base());
  a.reset();
  EXPECT_EQ(peer->base()[at], std::byte{7});
}

// A block into which a stopped peer may still write is never given out again; its neighbours are.
TEST_F(ArenaTest, AQuarantinedBlockIsNeverUsedAgain) {
  const auto a = make();
  uint64_t at[5];
  for (uint64_t& x : at) x = allocate(*a, 1024);
  a->quarantine(a->base() + at[1]);         // its first byte
  a->quarantine(a->base() + at[3] + 1023);  // its last byte
  for (uint64_t x : at) a->release(x);
  EXPECT_EQ(a->bytes_in_use(), 2 * 1024u) << "quarantined blocks stay in use";
  // 0 and 2 lie alone between them; 4 has merged with what is behind it.
  EXPECT_EQ(allocate(*a, 1024), at[0]);
  EXPECT_EQ(allocate(*a, 1024), at[2]);
  EXPECT_EQ(allocate(*a, 4096), at[4]);
  a->release(at[1]);  // again: nothing
  for (int i = 0; i < 100; i++) {
    const uint64_t other = allocate(*a, 1024);
    EXPECT_NE(other, at[1]);
    EXPECT_NE(other, at[3]);
  }
}

TEST_F(ArenaTest, QuarantineOutsideOfABlockDoesNothing) {
  const auto a = make();
  const uint64_t first = allocate(*a, 1024), second = allocate(*a, 1024), third = allocate(*a, 1024);
  a->release(second);
  a->quarantine(nullptr);
  a->quarantine(&first);                     // not in the arena
  a->quarantine(a->base() + a->reserved());  // behind it
  a->quarantine(a->base() + second);         // free
  a->quarantine(a->base() + first + 1024);   // one behind `first`, so in `second`
  a->quarantine(a->base() + third + 1024);   // behind the last block
  EXPECT_EQ(allocate(*a, 1024), second);
  a->release(first);
  a->release(second);
  a->release(third);
  EXPECT_EQ(a->bytes_in_use(), 0u);
  EXPECT_EQ(allocate(*a, 3 * 1024), first) << "all three are free, and merged";
}

TEST_F(ArenaTest, ThreadsAllocateAtOnce) {
  const auto a = make();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++) {
    threads.emplace_back([&a, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::pair<uint64_t, size_t>> mine;
      const auto mark = static_cast<unsigned char>(t + 1);
      const auto free_one = [&] {
        const auto [at, n] = mine.back();
        mine.pop_back();
        for (size_t i = 0; i < n; i++) ASSERT_EQ(a->base()[at + i], std::byte{mark}) << "blocks overlap";
        a->release(at);
      };
      for (int i = 0; i < 1000; i++) {
        if (mine.size() < 20 && random() % 2 == 0) {
          const size_t n = 1 + random() % 3000;
          uint64_t at = 0;
          ASSERT_TRUE(a->allocate(n, &at).ok());
          std::memset(a->base() + at, mark, n);
          mine.emplace_back(at, n);
          std::swap(mine.back(), mine[random() % mine.size()]);
        } else if (!mine.empty()) {
          free_one();
        }
      }
      while (!mine.empty()) free_one();
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(a->bytes_in_use(), 0u);
}

}  // namespace
}  // namespace pycomm
