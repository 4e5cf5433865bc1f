// What the tests of kernels share: every instruction set of this processor, the tree T written from its
// definition in docs/numerics.md, and a sweep of a reduction over counts, sizes and alignments against it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "kernels/isa.h"

namespace pycomm {

inline std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> out;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (const KernelTable* t = find_isa(name)) out.push_back(t);
  }
  return out;
}

inline ReduceFn get(const KernelTable* t, DType dtype, ReduceOp op) {
  return t->reduce[static_cast<int>(dtype)][static_cast<int>(op)];
}

inline constexpr int kSrcCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 65};
inline constexpr size_t kSizes[] = {0, 1, 7, 31, 32, 33, 1000, 4099};

// T from its definition: no vectors, no iteration.
template <class T>
T tree(const std::vector<T>& x, int lo, int hi, const std::function<T(T, T)>& combine) {
  const int n = hi - lo;
  if (n == 1) return x[lo];
  int p = 1;
  while (2 * p <= n) p *= 2;
  const int m = std::min(p, n - p / 2);
  return combine(tree(x, lo, lo + m, combine), tree(x, lo + m, hi, combine));
}

// Calls the kernel on copies of the sources at odd addresses, with canaries around each destination.
template <class T>
std::vector<std::vector<T>> run(ReduceFn fn, const std::vector<std::vector<T>>& srcs, int n_dsts,
                                double scalar, size_t misalign) {
  const size_t n = srcs[0].size();
  std::vector<std::vector<char>> in, out;
  std::vector<const void*> src_ptrs;
  std::vector<void*> dst_ptrs;
  for (const auto& s : srcs) {
    in.emplace_back(n * sizeof(T) + 64);
    char* p = in.back().data() + misalign;
    if (n) std::memcpy(p, s.data(), n * sizeof(T));
    src_ptrs.push_back(p);
  }
  for (int d = 0; d < n_dsts; ++d) {
    out.emplace_back(n * sizeof(T) + 192, '\x5a');
    dst_ptrs.push_back(out.back().data() + 64 + misalign);
  }
  fn(dst_ptrs.data(), n_dsts, src_ptrs.data(), static_cast<int>(srcs.size()), n, scalar);
  std::vector<std::vector<T>> result;
  for (int d = 0; d < n_dsts; ++d) {
    const auto& buffer = out[d];
    for (size_t i = 0; i < buffer.size(); ++i) {
      if (i >= 64 + misalign && i < 64 + misalign + n * sizeof(T)) continue;
      EXPECT_EQ(buffer[i], '\x5a') << "a byte outside the destination was written, offset " << i;
    }
    result.emplace_back(n);
    if (n) std::memcpy(result.back().data(), dst_ptrs[d], n * sizeof(T));
  }
  return result;
}

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Every count, size and alignment, on every instruction set.
template <class T>
void sweep(DType dtype, ReduceOp op, const std::function<T(std::mt19937_64&)>& draw,
           const std::function<T(std::vector<T>, double)>& expected, double scalar = 1) {
  std::mt19937_64 rng(42);
  for (const KernelTable* table : tables()) {
    const ReduceFn fn = get(table, dtype, op);
    ASSERT_NE(fn, nullptr) << dtype_name(dtype) << " " << reduce_op_name(op);
    for (int n_srcs : kSrcCounts) {
      for (size_t n : kSizes) {
        if (n_srcs > 9 && n > 1000) continue;  // the sizes that matter, also under a sanitizer
        if (n_srcs > 17 && n > 33) continue;
        std::vector<std::vector<T>> srcs(n_srcs, std::vector<T>(n));
        for (auto& s : srcs) {
          for (auto& v : s) v = draw(rng);
        }
        for (int n_dsts : {1, 2, 3, n_srcs}) {
          const size_t misalign = (n + n_dsts + n_srcs) % 2 ? 0 : 3;
          const auto got = run(fn, srcs, n_dsts, scalar, misalign);
          for (size_t i = 0; i < n; ++i) {
            std::vector<T> column;
            for (const auto& s : srcs) column.push_back(s[i]);
            const T want = expected(column, scalar);
            for (int d = 0; d < n_dsts; ++d) {
              ASSERT_TRUE(same_bits(got[d][i], want))
                  << table->name << " " << dtype_name(dtype) << " " << reduce_op_name(op) << " n_srcs "
                  << n_srcs << " n_dsts " << n_dsts << " n " << n << " i " << i << " d " << d;
            }
          }
        }
      }
    }
  }
}

template <class T>
std::function<T(std::vector<T>, double)> by_tree(std::function<T(T, T)> combine) {
  return [combine](std::vector<T> x, double) { return tree<T>(x, 0, static_cast<int>(x.size()), combine); };
}

// Magnitudes from 0.01 to 100: almost any other association gives other bits.
template <class T>
T wide(std::mt19937_64& rng) {
  std::uniform_real_distribution<double> exponent(-2, 2);
  return static_cast<T>((rng() & 1 ? 1 : -1) * std::pow(10.0, exponent(rng)));
}
template <class T>
T near_one(std::mt19937_64& rng) {
  return static_cast<T>(std::uniform_real_distribution<double>(0.7, 1.4)(rng));
}
template <class T>
T any_int(std::mt19937_64& rng) {
  return static_cast<T>(rng());
}

}  // namespace pycomm
