// DeviceArena: device memory in which a test places operands at chosen misalignments, and that is checked for
// writes outside of them; and the comparison of results, NaN payloads aside.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "cuda_runtime_api.h"

namespace pycomm {

#define ASSERT_OK(expr)                             \
  do {                                              \
    const ::pycomm::Status status_ = (expr);        \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (0)
#define ASSERT_CUDA(expr) ASSERT_EQ((expr), cudaSuccess)

using Bytes = std::vector<uint8_t>;

class DeviceArena {
 public:
  static constexpr size_t kBytes = size_t{8} << 20;
  static constexpr uint8_t kUnused = 0xee;

  explicit DeviceArena(size_t n_bytes = kBytes) : n_bytes_(n_bytes) {
    if (cudaMalloc(reinterpret_cast<void**>(&device_), n_bytes) != cudaSuccess) std::abort();
    if (cudaMemset(device_, kUnused, n_bytes) != cudaSuccess) std::abort();
  }
  ~DeviceArena() {
    if (cudaFree(device_) != cudaSuccess) std::abort();
  }
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // Room for n bytes at an address whose remainder modulo 16 is `off`, with at least 16 unused bytes around.
  void* place(size_t n_bytes, size_t off) {
    size_t at = (used_ + 31) / 16 * 16 + off % 16;
    used_ = at + n_bytes;
    if (used_ + 64 > n_bytes_) std::abort();
    taken_.push_back({at, n_bytes});
    return device_ + at;
  }
  void* place(const Bytes& contents, size_t off) {
    void* p = place(contents.size(), off);
    if (!contents.empty() &&
        cudaMemcpy(p, contents.data(), contents.size(), cudaMemcpyHostToDevice) != cudaSuccess) {
      std::abort();
    }
    return p;
  }
  Bytes read(const void* p, size_t n_bytes) const {
    Bytes out(n_bytes);
    if (n_bytes > 0 && cudaMemcpy(out.data(), p, n_bytes, cudaMemcpyDeviceToHost) != cudaSuccess)
      std::abort();
    return out;
  }
  // Waits for the device; no byte outside of what was placed has changed. Then everything is free again.
  testing::AssertionResult finish() {
    auto result = testing::AssertionSuccess();
    if (cudaDeviceSynchronize() != cudaSuccess) return testing::AssertionFailure() << "device error";
    const size_t n = used_ + 64;
    const Bytes all = read(device_, n);
    size_t at = 0;
    taken_.push_back({n, 0});
    for (const auto& [begin, n_bytes] : taken_) {
      for (; at < begin; ++at) {
        if (all[at] != kUnused) {
          result = testing::AssertionFailure()
                   << "byte " << at << " was written; the next operand is at " << begin;
        }
      }
      at = begin + n_bytes;
    }
    if (cudaMemset(device_, kUnused, n) != cudaSuccess) std::abort();
    taken_.clear();
    used_ = 0;
    return result;
  }

 private:
  struct Taken {
    size_t begin, n_bytes;
  };
  uint8_t* device_ = nullptr;
  size_t n_bytes_;
  size_t used_ = 0;
  std::vector<Taken> taken_;
};

// Bits of the sign, and of a NaN's magnitude, for each float format: |x| > infinity means NaN.
inline bool is_nan(DType t, const uint8_t* element) {
  const auto above = [&]<class U>(U, U infinity) {
    U bits;
    std::memcpy(&bits, element, sizeof bits);
    return (bits & static_cast<U>(~(U{1} << (sizeof(U) * 8 - 1)))) > infinity;
  };
  switch (t) {
    case DType::kFloat64:
    case DType::kComplex128: return above(uint64_t{}, uint64_t{0x7ff0000000000000});
    case DType::kFloat32:
    case DType::kComplex64: return above(uint32_t{}, uint32_t{0x7f800000});
    case DType::kFloat16: return above(uint16_t{}, uint16_t{0x7c00});
    case DType::kBFloat16: return above(uint16_t{}, uint16_t{0x7f80});
    case DType::kFloat8E4M3: return above(uint8_t{}, uint8_t{0x7e});
    case DType::kFloat8E5M2: return above(uint8_t{}, uint8_t{0x7c});
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8:
    case DType::kBool: return false;
  }
  return false;
}

// The same bits, or NaN in both.
inline testing::AssertionResult same(DType t, const Bytes& got, const Bytes& want) {
  if (got.size() != want.size())
    return testing::AssertionFailure() << got.size() << " bytes, not " << want.size();
  const bool is_complex = t == DType::kComplex64 || t == DType::kComplex128;
  const size_t part = dtype_size(t) / (is_complex ? 2 : 1);
  for (size_t i = 0; i < got.size(); i += part) {
    if (std::memcmp(&got[i], &want[i], part) == 0 || (is_nan(t, &got[i]) && is_nan(t, &want[i]))) continue;
    std::string bytes;
    for (size_t b = part; b-- > 0;) bytes += format("%02x", got[i + b]);
    bytes += " instead of ";
    for (size_t b = part; b-- > 0;) bytes += format("%02x", want[i + b]);
    return testing::AssertionFailure()
           << "element part " << i / part << " of " << got.size() / part << ": 0x" << bytes;
  }
  return testing::AssertionSuccess();
}

// Any bit patterns, with more of those that matter: zeros, ones, infinities, NaN, small numbers.
inline Bytes random_bytes(size_t n, std::mt19937_64& rng) {
  Bytes out(n);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t r = rng();
    static constexpr uint8_t kSpecial[] = {0x00, 0x80, 0x7f, 0xff, 0x3c, 0x7c, 0x7e, 0x01};
    out[i] = r & 3 ? static_cast<uint8_t>(r >> 8) : kSpecial[(r >> 16) & 7];
  }
  return out;
}

}  // namespace pycomm
