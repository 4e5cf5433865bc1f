#include "numbers.h"

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/cast.h"

namespace loopback {

namespace {

using pycomm::DType;

// Calls fn with a value of the C++ type that the elements are computed in, and the small format or none.
template <class Fn>
void with_type(nccl::DataType type, Fn fn) {
  constexpr DType kNone = DType::kBool;
  switch (type) {
    case nccl::kInt8: return fn(int8_t{}, kNone);
    case nccl::kUInt8: return fn(uint8_t{}, kNone);
    case nccl::kInt32: return fn(int32_t{}, kNone);
    case nccl::kUInt32: return fn(uint32_t{}, kNone);
    case nccl::kInt64: return fn(int64_t{}, kNone);
    case nccl::kUInt64: return fn(uint64_t{}, kNone);
    case nccl::kFloat32: return fn(float{}, kNone);
    case nccl::kFloat64: return fn(double{}, kNone);
    case nccl::kFloat16: return fn(float{}, DType::kFloat16);
    case nccl::kBFloat16: return fn(float{}, DType::kBFloat16);
    case nccl::kFloat8E4M3: return fn(float{}, DType::kFloat8E4M3);
    case nccl::kFloat8E5M2: return fn(float{}, DType::kFloat8E5M2);
  }
}

template <class T>
std::vector<T> load(const void* src, size_t count, DType small) {
  std::vector<T> v(count);
  if constexpr (std::is_same_v<T, float>) {
    if (small != DType::kBool) {
      pycomm::cast(DType::kFloat32, v.data(), small, src, count, 1.0f);
      return v;
    }
  }
  if (count > 0) std::memcpy(v.data(), src, count * sizeof(T));
  return v;
}

template <class T>
void store(void* dst, const std::vector<T>& v, DType small) {
  if constexpr (std::is_same_v<T, float>) {
    if (small != DType::kBool) {
      pycomm::cast(small, dst, DType::kFloat32, v.data(), v.size(), 1.0f);
      return;
    }
  }
  if (!v.empty()) std::memcpy(dst, v.data(), v.size() * sizeof(T));
}

template <class T>
T rounded(T v, DType small) {
  std::vector<T> one{v};
  char bytes[8];
  store(bytes, one, small);
  return load<T>(bytes, 1, small)[0];
}

template <class T>
T combine(nccl::RedOp op, T a, T b) {
  using Wide = std::conditional_t<std::is_floating_point_v<T>, T, uint64_t>;
  switch (op) {
    case nccl::kProd: return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case nccl::kMin: return b < a ? b : a;
    case nccl::kMax: return a < b ? b : a;
    case nccl::kSum:
    case nccl::kAvg:
    case nccl::kNumOps: break;
  }
  return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
}

// The elements after the multiplication that comes first, each rounded.
template <class T>
std::vector<T> prepared(const void* src, size_t count, DType small, const Reduction& r, int n_ranks) {
  std::vector<T> v = load<T>(src, count, small);
  T factor = static_cast<T>(r.factor);
  bool multiply = r.has_factor;
  if constexpr (std::is_floating_point_v<T>) {
    if (r.op == nccl::kAvg) {
      factor = rounded(static_cast<T>(1.0 / n_ranks), small);
      multiply = true;
    }
  }
  if (!multiply) return v;
  for (T& x : v) x = combine(nccl::kProd, x, factor);
  std::vector<char> bytes(count * sizeof(T));
  store(bytes.data(), v, small);
  return load<T>(bytes.data(), count, small);
}

}  // namespace

double read_scalar(const void* p, nccl::DataType type) {
  double out = 0;
  with_type(type,
            [&](auto zero, DType small) { out = static_cast<double>(load<decltype(zero)>(p, 1, small)[0]); });
  return out;
}

Reduction begin(void* dst, const void* src, size_t count, nccl::DataType type, const Reduction& r,
                int n_ranks) {
  Reduction then{r.op};
  with_type(type, [&](auto zero, DType small) {
    using T = decltype(zero);
    store(dst, prepared<T>(src, count, small, r, n_ranks), small);
    if (r.op == nccl::kAvg && std::is_floating_point_v<T>) then.op = nccl::kSum;
  });
  return then;
}

void add(void* acc, const void* x, size_t count, nccl::DataType type, const Reduction& r) {
  with_type(type, [&](auto zero, DType small) {
    using T = decltype(zero);
    std::vector<T> a = load<T>(acc, count, small);
    const std::vector<T> b = load<T>(x, count, small);
    for (size_t i = 0; i < count; i++) a[i] = combine(r.op, a[i], b[i]);
    store(acc, a, small);
  });
}

void finish(void* acc, size_t count, nccl::DataType type, const Reduction& r, int n_ranks) {
  if (r.op != nccl::kAvg) return;
  with_type(type, [&](auto zero, DType small) {
    using T = decltype(zero);
    if constexpr (std::is_integral_v<T>) {
      std::vector<T> a = load<T>(acc, count, small);
      for (T& v : a) v = static_cast<T>(v / static_cast<T>(n_ranks));
      store(acc, a, small);
    }
  });
}

}  // namespace loopback
