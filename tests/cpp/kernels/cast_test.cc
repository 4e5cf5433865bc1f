// Casts on every instruction set, exhaustively: all codes upward against values computed with ldexp, all
// codes back, and downward against the definition of rounding to nearest even (the two neighbouring codes of
// a value are compared by their exact distance in double), on every code, its neighbours, midpoints and their
// fp32 neighbours. The same casts are compared with torch's in tests/python/test_kernels.py.
#include "kernels/cast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/reference.h"

namespace pycomm {
namespace {

struct Format {
  DType dtype;
  int exp_bits, man_bits;
  bool infinity;
  int n_bytes() const { return (1 + exp_bits + man_bits) / 8; }
  uint32_t max_code() const { return (1u << (exp_bits + man_bits)) - 1; }  // without the sign
};
const Format kFormats[] = {{DType::kFloat16, 5, 10, true},
                           {DType::kBFloat16, 8, 7, true},
                           {DType::kFloat8E4M3, 4, 3, false},
                           {DType::kFloat8E5M2, 5, 2, true}};

// The value of a code from the definition of the format.
double value_of(const Format& f, uint32_t code) {
  const int bias = (1 << (f.exp_bits - 1)) - 1;
  const uint32_t mag = code & f.max_code();
  const int exponent = static_cast<int>(mag >> f.man_bits);
  const uint32_t mantissa = mag & ((1u << f.man_bits) - 1);
  const double sign = code > f.max_code() ? -1 : 1;
  if (f.infinity && exponent == (1 << f.exp_bits) - 1) {
    return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (!f.infinity && mag == f.max_code()) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.man_bits);
  return sign * std::ldexp(mantissa + (1u << f.man_bits), exponent - bias - f.man_bits);
}

uint32_t code_at(const std::vector<uint8_t>& bytes, size_t i, int n_bytes) {
  return n_bytes == 1 ? bytes[i] : bytes[2 * i] | bytes[2 * i + 1] << 8;
}

std::vector<uint8_t> all_codes(const Format& f) {
  const uint32_t n = 2 * (f.max_code() + 1);
  std::vector<uint8_t> bytes;
  for (uint32_t c = 0; c < n; ++c) {
    bytes.push_back(static_cast<uint8_t>(c));
    if (f.n_bytes() == 2) bytes.push_back(static_cast<uint8_t>(c >> 8));
  }
  return bytes;
}

CastFn cast_fn(const KernelTable* t, DType dst, DType src) {
  return t->cast[static_cast<int>(dst)][static_cast<int>(src)];
}

TEST(Cast, EveryCodeUpwardIsExact) {
  for (const KernelTable* table : tables()) {
    for (const Format& f : kFormats) {
      const auto codes = all_codes(f);
      const size_t n = codes.size() / f.n_bytes();
      std::vector<float> up(n);
      cast_fn(table, DType::kFloat32, f.dtype)(up.data(), codes.data(), n, 1);
      std::vector<uint8_t> back(codes.size());
      cast_fn(table, f.dtype, DType::kFloat32)(back.data(), up.data(), n, 1);
      for (size_t c = 0; c < n; ++c) {
        const double want = value_of(f, static_cast<uint32_t>(c));
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(up[c])) << table->name << " " << dtype_name(f.dtype) << " code " << c;
          ASSERT_TRUE(std::isnan(value_of(f, code_at(back, c, f.n_bytes())))) << c;
          continue;
        }
        ASSERT_EQ(up[c], want) << table->name << " " << dtype_name(f.dtype) << " code " << c;
        ASSERT_EQ(std::signbit(up[c]), c > f.max_code()) << c;
        ASSERT_EQ(code_at(back, c, f.n_bytes()), c) << table->name << " " << dtype_name(f.dtype);
      }
    }
  }
}

// The code that x rounds to, by exact distances; x is not NaN.
uint32_t nearest_code(const Format& f, float x) {
  const uint32_t sign = std::signbit(x) ? f.max_code() + 1 : 0;
  const double a = std::fabs(static_cast<double>(x));
  const uint32_t largest = f.infinity ? (f.max_code() & ~((1u << f.man_bits) - 1)) - 1 : f.max_code() - 1;
  uint32_t lo = 0, hi = largest;  // the largest code whose value is <= a
  while (lo < hi) {
    const uint32_t mid = (lo + hi + 1) / 2;
    if (value_of(f, mid) <= a) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
  }
  const double below = value_of(f, lo);
  if (lo == largest) {  // overflow: as if the next binary value existed
    if (!f.infinity) return sign | largest;
    const double next = below + (below - value_of(f, lo - 1));
    return sign | (a - below < next - a ? largest : largest + 1);
  }
  const double above = value_of(f, lo + 1);
  if (a - below != above - a) return sign | (a - below < above - a ? lo : lo + 1);
  return sign | (lo % 2 == 0 ? lo : lo + 1);
}

TEST(Cast, DownwardRoundsToNearestEven) {
  for (const Format& f : kFormats) {
    std::vector<float> xs;
    const auto add = [&](double v) {
      const float x = static_cast<float>(v);
      for (float y : {x, std::nextafter(x, 1e38f), std::nextafter(x, -1e38f)}) {
        xs.push_back(y);
        xs.push_back(-y);
      }
    };
    for (uint32_t c = 0; c < f.max_code(); ++c) {
      const double v = value_of(f, c), next = value_of(f, c + 1);
      if (!std::isfinite(v)) continue;
      add(v);
      if (std::isfinite(next)) {
        add((v + next) / 2);
        add(v + (next - v) * 0.25);
        add(v + (next - v) * 0.75);
      } else {
        add(v + (v - value_of(f, c - 1)) / 2);
      }
    }
    for (double v : {1e-45, 1e-40, 1e-38, 3e38, 1e30, 1e10, 464.0, 480.0, 65520.0, 65536.0, 61440.0}) add(v);
    xs.push_back(std::numeric_limits<float>::infinity());
    xs.push_back(-std::numeric_limits<float>::infinity());
    for (const KernelTable* table : tables()) {
      std::vector<uint8_t> down(xs.size() * f.n_bytes());
      cast_fn(table, f.dtype, DType::kFloat32)(down.data(), xs.data(), xs.size(), 1);
      for (size_t i = 0; i < xs.size(); ++i) {
        ASSERT_EQ(code_at(down, i, f.n_bytes()), nearest_code(f, xs[i]))
            << table->name << " " << dtype_name(f.dtype) << " of " << std::hexfloat << xs[i];
      }
    }
  }
}

// Every upper half of a float, with lower halves at, below and above each place where rounding may turn.
TEST(Cast, DownwardIsTheSameOnEveryIsaForEveryUpperHalf) {
  std::vector<float> xs;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = upper << 16 | lower;
      float x;
      std::memcpy(&x, &bits, 4);
      xs.push_back(x);
    }
  }
  for (const Format& f : kFormats) {
    const size_t n_bytes = xs.size() * f.n_bytes();
    std::vector<uint8_t> want(n_bytes), got(n_bytes);
    cast_fn(find_isa("baseline"), f.dtype, DType::kFloat32)(want.data(), xs.data(), xs.size(), 1);
    for (const KernelTable* table : tables()) {
      cast_fn(table, f.dtype, DType::kFloat32)(got.data(), xs.data(), xs.size(), 1);
      for (size_t i = 0; i < xs.size(); ++i) {
        const uint32_t a = code_at(want, i, f.n_bytes()), b = code_at(got, i, f.n_bytes());
        if (std::isnan(xs[i])) {
          ASSERT_TRUE(std::isnan(value_of(f, a)) && std::isnan(value_of(f, b))) << table->name << " " << i;
        } else {
          ASSERT_EQ(a, b) << table->name << " " << dtype_name(f.dtype) << " of " << std::hexfloat << xs[i];
        }
      }
    }
  }
}

TEST(Cast, ScaleMultipliesInFloat32AndTailsStayInside) {
  for (const KernelTable* table : tables()) {
    for (const Format& f : kFormats) {
      for (size_t n : {size_t{0}, size_t{1}, size_t{7}, size_t{31}, size_t{33}, size_t{1000}}) {
        std::vector<float> xs(n), scaled(n);
        for (size_t i = 0; i < n; ++i) {
          xs[i] = std::sin(static_cast<float>(i) + 1) * 30;
          scaled[i] = xs[i] * 0.3f;
        }
        const size_t n_bytes = n * f.n_bytes();
        std::vector<uint8_t> fused(n_bytes + 2, 0x5a), apart(n_bytes);
        cast_fn(table, f.dtype, DType::kFloat32)(fused.data() + 1, xs.data(), n, 0.3f);  // misaligned
        cast_fn(table, f.dtype, DType::kFloat32)(apart.data(), scaled.data(), n, 1);
        if (n > 0) {
          EXPECT_EQ(std::memcmp(fused.data() + 1, apart.data(), n_bytes), 0) << dtype_name(f.dtype);
        }
        EXPECT_EQ(fused.front(), 0x5a);
        EXPECT_EQ(fused.back(), 0x5a);
        std::vector<float> up(n), up_scaled(n);
        cast_fn(table, DType::kFloat32, f.dtype)(up.data(), apart.data(), n, 1);
        cast_fn(table, DType::kFloat32, f.dtype)(up_scaled.data(), apart.data(), n, 0.3f);
        for (size_t i = 0; i < n; ++i) EXPECT_EQ(up_scaled[i], up[i] * 0.3f);
        // in place: decode, scale, round
        std::vector<uint8_t> same = apart, want(n_bytes);
        cast_fn(table, f.dtype, DType::kFloat32)(want.data(), up_scaled.data(), n, 1);
        cast_fn(table, f.dtype, f.dtype)(same.data(), same.data(), n, 0.3f);
        EXPECT_EQ(same, want) << dtype_name(f.dtype);
      }
    }
  }
}

TEST(Cast, DoubleAndFloat) {
  std::vector<double> xs = {1.0, 1e300, -1e-300, std::nan(""), 0.1, 1 + std::ldexp(1.0, -24), 3};
  for (const KernelTable* table : tables()) {
    std::vector<float> down(xs.size());
    cast_fn(table, DType::kFloat32, DType::kFloat64)(down.data(), xs.data(), xs.size(), 0.5f);
    std::vector<double> up(xs.size());
    cast_fn(table, DType::kFloat64, DType::kFloat32)(up.data(), down.data(), xs.size(), 0.5f);
    for (size_t i = 0; i < xs.size(); ++i) {
      if (std::isnan(xs[i])) {
        EXPECT_TRUE(std::isnan(down[i]) && std::isnan(up[i]));
      } else {
        EXPECT_EQ(down[i], static_cast<float>(xs[i] * 0.5)) << i;
        EXPECT_EQ(up[i], static_cast<double>(down[i]) * 0.5) << i;
      }
    }
  }
}

TEST(Cast, Supported) {
  for (int a = 0; a < kNumDTypes; ++a) {
    for (int b = 0; b < kNumDTypes; ++b) {
      const DType dst = static_cast<DType>(a), src = static_cast<DType>(b);
      const bool low_and_float = (dst == DType::kFloat32 && is_low_precision(src)) ||
                                 (src == DType::kFloat32 && is_low_precision(dst));
      const bool double_and_float = (dst == DType::kFloat32 && src == DType::kFloat64) ||
                                    (src == DType::kFloat32 && dst == DType::kFloat64);
      EXPECT_EQ(cast_supported(dst, src), dst == src || low_and_float || double_and_float)
          << dtype_name(dst) << " from " << dtype_name(src);
    }
  }
  EXPECT_FALSE(scale_supported(DType::kInt32, DType::kInt32));
  EXPECT_TRUE(scale_supported(DType::kComplex64, DType::kComplex64));
}

TEST(Pack, ManyBlocksThereAndBack) {
  std::vector<std::vector<float>> tensors;
  for (size_t n : {0, 1, 5, 64, 1000, 3}) {
    tensors.emplace_back(n);
    std::iota(tensors.back().begin(), tensors.back().end(), static_cast<float>(10 * n));
  }
  std::vector<ConstBlock> in;
  size_t total = 0;
  for (const auto& t : tensors) {
    in.push_back({t.data(), t.size()});
    total += t.size();
  }
  std::vector<uint16_t> packed(total + 1, 0x5a5a);
  pack(DType::kBFloat16, packed.data(), DType::kFloat32, in, 0.25f);
  EXPECT_EQ(packed[total], 0x5a5a);
  std::vector<std::vector<float>> out;
  std::vector<Block> blocks;
  for (const auto& t : tensors) out.emplace_back(t.size());
  for (auto& t : out) blocks.push_back({t.data(), t.size()});
  unpack(DType::kFloat32, blocks, DType::kBFloat16, packed.data(), 4.0f);
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (size_t i = 0; i < tensors[t].size(); ++i) {
      EXPECT_NEAR(out[t][i], tensors[t][i], tensors[t][i] / 256) << t << " " << i;
    }
  }
  // Equal dtypes and a scale of 1: bits, whatever they are.
  const std::vector<uint8_t> odd = {0xff, 0x7f, 0x81, 0x00};
  std::vector<uint8_t> copy(4);
  const ConstBlock one[] = {{odd.data(), 4}};
  pack(DType::kFloat8E4M3, copy.data(), DType::kFloat8E4M3, one, 1.0f);
  EXPECT_EQ(copy, odd);
}

}  // namespace
}  // namespace pycomm
