// Philox4x32-10 for neighbouring counters, compiled once per instruction set; see random.h.
//
// Loops over kLanes counters that the compiler turns into vector instructions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pycomm {
namespace PYCOMM_ISA_NS {
namespace {

constexpr int kLanes = 16;

// kept[4 i + w]: whether word w of counter `block` + i is at least the threshold.
inline void keep_blocks(uint64_t block, uint64_t seed, uint64_t threshold, uint8_t* kept) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes] = {}, c3[kLanes] = {};
  for (int i = 0; i < kLanes; ++i) {
    c0[i] = static_cast<uint32_t>(block + i);
    c1[i] = static_cast<uint32_t>((block + i) >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53} * c0[i];
      const uint64_t p1 = uint64_t{0xCD9E8D57} * c2[i];
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(p1);
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  for (int i = 0; i < kLanes; ++i) {
    kept[4 * i + 0] = c0[i] >= threshold;
    kept[4 * i + 1] = c1[i] >= threshold;
    kept[4 * i + 2] = c2[i] >= threshold;
    kept[4 * i + 3] = c3[i] >= threshold;
  }
}

// Of n elements whose numbers follow one another.
void keep_run(uint8_t* keep, uint64_t first, size_t n, uint64_t seed, uint64_t threshold) {
  uint8_t kept[4 * kLanes];
  for (size_t done = 0; done < n;) {
    const uint64_t number = first + done;
    const size_t skipped = number % 4;
    const size_t here = std::min(n - done, sizeof(kept) - skipped);
    keep_blocks(number / 4, seed, threshold, kept);
    std::memcpy(keep + done, kept + skipped, here);
    done += here;
  }
}

}  // namespace
}  // namespace PYCOMM_ISA_NS
}  // namespace pycomm
