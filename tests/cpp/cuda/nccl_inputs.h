// Inputs and expected results for the collectives over NCCL, for any dtype and operation.
//
// An *exact* input is made of numbers whose sums and products over eight ranks every dtype holds exactly, so
// that any order of operations gives the same bits; any other input shows the order. What is expected of a
// reduction comes from the CPU's kernels (kernels/reduce.h: T over the ranks), which have tests of their own.
#pragma once

#include <random>
#include <vector>

#include "cuda/memory.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "schedule/catalog.h"

namespace pycomm {

inline DType real_of(DType t) {
  if (t == DType::kComplex64) return DType::kFloat32;
  return t == DType::kComplex128 ? DType::kFloat64 : t;
}
inline bool is_floating(DType t) {
  return real_of(t) == DType::kFloat64 || real_of(t) == DType::kFloat32 || is_low_precision(t);
}

inline Bytes make_input(DType t, ReduceOp op, bool exact, size_t n, std::mt19937_64& rng) {
  if (!is_floating(t)) return random_bytes(n * dtype_size(t), rng);
  const size_t n_reals = n * dtype_size(t) / dtype_size(real_of(t));
  std::vector<float> v(n_reals);
  for (size_t i = 0; i < n_reals; i++) {
    float& x = v[i];
    const auto r = static_cast<uint32_t>(rng() >> 8);
    if (exact && op == ReduceOp::kProduct && real_of(t) != t) {  // 2 + i or its double: no product has a zero
      x = i % 2 == 0 ? static_cast<float>(r & 1 ? 2 : 4) : v[i - 1] / 2;
    } else if (!exact) {
      x = static_cast<float>(r % 4001) / 1000.0f - 2.0f;
    } else if (op == ReduceOp::kProduct) {
      x = static_cast<float>((r & 1 ? 1 : 2) * (r & 2 ? 1 : -1));
    } else {
      x = static_cast<float>(static_cast<int>(r % 3) - 1);
    }
  }
  Bytes out(n * dtype_size(t));
  cast(real_of(t), out.data(), DType::kFloat32, v.data(), n_reals, 1.0f);
  return out;
}

// T of all ranks' vectors. premul_sum: rank r's factor is factor(r), low precision is rounded at the end
// only.
inline double factor(int rank) { return 0.5 + 0.25 * rank; }

inline Bytes reduced(DType t, ReduceOp op, const std::vector<Bytes>& all) {
  const size_t n = all[0].size() / dtype_size(t);
  std::vector<Bytes> srcs = all;
  DType work = t;
  if (op == ReduceOp::kPremulSum) {
    if (is_low_precision(t)) work = DType::kFloat32;
    for (size_t r = 0; r < all.size(); r++) {
      const double f = factor(static_cast<int>(r));
      srcs[r].resize(n * dtype_size(work));
      if (work != t) {
        cast(work, srcs[r].data(), t, all[r].data(), n, static_cast<float>(f));
        continue;
      }
      void* dst = srcs[r].data();
      const void* src = all[r].data();
      find_reduce(t, op)(&dst, 1, &src, 1, n, f);
    }
  }
  std::vector<const void*> pointers;
  for (const Bytes& b : srcs) pointers.push_back(b.data());
  Bytes out(n * dtype_size(work));
  void* dst = out.data();
  find_reduce(work, op == ReduceOp::kPremulSum ? ReduceOp::kSum : op)(
      &dst, 1, pointers.data(), static_cast<int>(pointers.size()), n, static_cast<double>(all.size()));
  if (work == t) return out;
  Bytes narrow(n * dtype_size(t));
  cast(t, narrow.data(), work, out.data(), n, 1.0f);
  return narrow;
}

// The operations that are defined for a dtype.
inline std::vector<ReduceOp> operations_of(DType t) {
  std::vector<ReduceOp> ops;
  for (int o = 0; o < kNumReduceOps; o++) {
    if (find_reduce(t, static_cast<ReduceOp>(o)) != nullptr) ops.push_back(static_cast<ReduceOp>(o));
  }
  return ops;
}

// A collective on numbers: what every rank gives, and what it must get.
struct Numbers {
  std::vector<Bytes> in, out;  // of each rank; empty where it has none
};

inline bool has_parts(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kAllGather || c == Collective::kGather ||
         c == Collective::kScatter;
}

// `counts`: elements of each rank's part, for collectives that have them; else their sum is the vector.
inline Numbers make_numbers(Collective c, int n, int root, DType t, ReduceOp op, bool exact,
                            const std::vector<uint64_t>& counts, std::mt19937_64& rng) {
  const auto ranks = static_cast<size_t>(n);
  size_t total = 0;
  std::vector<size_t> start;
  for (const uint64_t k : counts) start.push_back(total), total += k;
  const size_t size = dtype_size(t);
  std::vector<Bytes> whole;
  for (size_t r = 0; r < ranks; r++) whole.push_back(make_input(t, op, exact, total, rng));
  const auto part = [&](const Bytes& of, size_t r) {
    const auto first = of.begin() + static_cast<std::ptrdiff_t>(start[r] * size);
    return Bytes(first, first + static_cast<std::ptrdiff_t>(counts[r] * size));
  };
  Bytes joined;  // every rank's own part
  for (size_t r = 0; r < ranks && has_parts(c); r++) {
    const Bytes own = part(whole[r], r);
    joined.insert(joined.end(), own.begin(), own.end());
  }
  Numbers x;
  x.in.resize(ranks);
  x.out.resize(ranks);
  const auto top = static_cast<size_t>(root);
  for (size_t r = 0; r < ranks; r++) {
    switch (c) {
      case Collective::kAllReduce:
      case Collective::kReduceScatter:
      case Collective::kReduce: {
        x.in[r] = whole[r];
        const Bytes sum = reduced(t, op, whole);
        if (c == Collective::kReduceScatter) x.out[r] = part(sum, r);
        if (c == Collective::kAllReduce || (c == Collective::kReduce && r == top)) x.out[r] = sum;
        break;
      }
      case Collective::kAllGather:
      case Collective::kGather:
        x.in[r] = part(whole[r], r);
        if (c == Collective::kAllGather || r == top) x.out[r] = joined;
        break;
      case Collective::kBroadcast:
        if (r == top) x.in[r] = whole[r];
        x.out[r] = whole[top];
        break;
      case Collective::kScatter:
        if (r == top) x.in[r] = whole[r];
        x.out[r] = part(whole[top], r);
        break;
    }
  }
  return x;
}

}  // namespace pycomm
