// Dropout masks: the generator against its published vectors, boxes against the whole, instruction sets
// alike.
#include "kernels/random.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/isa.h"

namespace pycomm {
namespace {

// Philox4x32-10 as the paper writes it, one counter at a time.
std::vector<uint32_t> philox(uint64_t counter, uint64_t seed) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return {c[0], c[1], c[2], c[3]};
}

TEST(Random, KnownAnswer) {
  // Random123's kat_vectors: philox4x32 10, counter 0, key 0.
  EXPECT_EQ(philox(0, 0), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

TEST(Random, EveryInstructionSetKeepsWhatTheWordsSay) {
  const uint64_t seed = 0x0123456789abcdef;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    const KernelTable* table = find_isa(name);
    if (table == nullptr) continue;
    for (const uint64_t first : {uint64_t{0}, uint64_t{3}, uint64_t{0x3fffffffe}, uint64_t{1} << 62}) {
      for (const size_t n : {0, 1, 5, 64, 131}) {
        for (const uint64_t threshold :
             {uint64_t{0}, uint64_t{1} << 30, uint64_t{4000000000}, kAllThreshold}) {
          std::vector<uint8_t> keep(n + 1, 7);
          table->keep_run(keep.data(), first, n, seed, threshold);
          for (size_t i = 0; i < n; ++i) {
            const uint64_t number = first + i;
            ASSERT_EQ(keep[i], philox(number / 4, seed)[number % 4] >= threshold) << name << " " << number;
          }
          ASSERT_EQ(keep[n], 7);
        }
      }
    }
  }
}

TEST(Random, ABoxHasTheBitsOfTheWhole) {
  const uint64_t shape[3] = {5, 7, 11}, threshold = uint64_t{1} << 31, seed = 42;
  const std::vector<uint64_t> strides = {77, 11, 1};
  std::vector<uint8_t> whole(5 * 7 * 11);
  keep_mask(whole.data(), shape, strides, 0, seed, threshold);
  const std::vector<uint64_t> sizes = {2, 3, 4};
  std::vector<uint8_t> box(2 * 3 * 4);
  keep_mask(box.data(), sizes, strides, 1 * 77 + 2 * 11 + 5, seed, threshold);
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 4; ++k) {
        EXPECT_EQ(box[(i * 3 + j) * 4 + k], whole[(1 + i) * 77 + (2 + j) * 11 + 5 + k]);
      }
    }
  }
}

}  // namespace
}  // namespace pycomm
