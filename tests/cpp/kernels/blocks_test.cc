// Codes with a scale for each block, on every instruction set: the bounds of blocks.h against double, what is
// lost, blocks that are not finite or vanish, and the same bits from every set.
#include "kernels/blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/isa.h"

namespace pycomm {
namespace {

struct Bound {
  DType code;
  double u, floor_of_maximum, floor;  // |x - decoded| <= u |x| + floor_of_maximum M + floor
};
const Bound kBounds[] = {{DType::kInt8, 0, 1.0 / 254 + 0x1p-23, 0},
                         {DType::kFloat8E4M3, 0x1p-4, 0x1p-17, 0},
                         {DType::kFloat16, 0x1p-11, 0x1p-38, 0},
                         {DType::kBFloat16, 0x1p-8, 0x1p-132, 0}};
constexpr double kVanishes = 0x1p-100;
const size_t kSizes[] = {0, 1, 3, 15, 16, 17, 255, 256, 257, 1000, 4 * 256 + 63};

std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> found;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (const KernelTable* t = find_isa(name)) found.push_back(t);
  }
  return found;
}

// Magnitudes over ten decades around `scale`.
std::vector<float> random_floats(size_t n, double scale, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> decade(-9, 1), sign(-1, 1);
  std::vector<float> v(n);
  for (float& x : v) x = static_cast<float>(sign(generator) * std::pow(10, decade(generator)) * scale);
  return v;
}

std::vector<float> maxima_of(const std::vector<float>& v) {
  std::vector<float> maxima(n_blocks(v.size()));
  for (size_t i = 0; i < v.size(); ++i) {
    float& m = maxima[i / kBlockElems];
    m = std::isfinite(v[i]) ? std::max(m, std::fabs(v[i])) : std::numeric_limits<float>::infinity();
  }
  return maxima;
}

struct Blocks : testing::TestWithParam<Bound> {
  const BlockFns& fns(const KernelTable* t) const { return t->blocks[static_cast<int>(GetParam().code)]; }
  size_t code_bytes(size_t n) const { return n * dtype_size(GetParam().code); }
  double bound(double x, double maximum) const {
    const Bound& b = GetParam();
    return b.u * std::fabs(x) + b.floor_of_maximum * maximum + b.floor + kVanishes;
  }
};

TEST(BlockMaxima, AreTheLargestMagnitudesAndInfinityForWhatIsNotFinite) {
  for (const KernelTable* table : tables()) {
    for (const size_t n : kSizes) {
      std::vector<float> v = random_floats(n, 1, 7);
      if (n > 300) v[299] = -std::numeric_limits<float>::infinity();
      if (n > 600) v[600] = -std::numeric_limits<float>::quiet_NaN();
      std::vector<float> maxima(n_blocks(n));
      table->block_maxima(v.data(), n, maxima.data());
      EXPECT_EQ(maxima, maxima_of(v)) << table->name << " n=" << n;
    }
  }
}

TEST_P(Blocks, DecodeWithinTheBoundAndTellWhatIsLost) {
  for (const double scale : {1.0, 1e-20, 1e20, 1.7e37}) {
    for (const size_t n : kSizes) {
      const std::vector<float> x = random_floats(n, scale, 11), maxima = maxima_of(x);
      std::vector<uint8_t> first;
      for (const KernelTable* table : tables()) {
        std::vector<uint8_t> codes(code_bytes(n), 0xee), again = codes;
        std::vector<float> src = x, decoded(n);
        fns(table).quantize(codes.data(), src.data(), n, maxima.data(), false);
        EXPECT_EQ(src, x) << "without feedback, the source stays";
        fns(table).quantize(again.data(), src.data(), n, maxima.data(), true);
        EXPECT_EQ(codes, again);
        fns(table).dequantize(decoded.data(), codes.data(), n, maxima.data());
        for (size_t i = 0; i < n; ++i) {
          ASSERT_LE(std::fabs(double{x[i]} - decoded[i]), bound(x[i], maxima[i / kBlockElems]))
              << table->name << " " << x[i] << " became " << decoded[i];
          ASSERT_EQ(src[i], x[i] - decoded[i]);
        }
        if (first.empty()) first = codes;
        EXPECT_EQ(codes, first) << table->name;
      }
    }
  }
}

TEST_P(Blocks, CombineToTheMeanAndTellWhatIsLost) {
  for (const size_t n_ranks : {1u, 2u, 3u, 5u}) {
    for (const size_t n : kSizes) {
      std::vector<std::vector<float>> x;
      std::vector<float> maxima(n_blocks(n));
      for (size_t r = 0; r < n_ranks; ++r) {
        x.push_back(random_floats(n, 1.0 + static_cast<double>(r), static_cast<uint32_t>(20 + r)));
        const std::vector<float> mine = maxima_of(x.back());
        for (size_t b = 0; b < mine.size(); ++b) maxima[b] = std::max(maxima[b], mine[b]);
      }
      std::vector<uint8_t> first;
      for (const KernelTable* table : tables()) {
        std::vector<std::vector<uint8_t>> codes(n_ranks, std::vector<uint8_t>(code_bytes(n)));
        std::vector<double> mean(n);
        std::vector<const void*> srcs;
        for (size_t r = 0; r < n_ranks; ++r) {
          fns(table).quantize(codes[r].data(), x[r].data(), n, maxima.data(), false);
          std::vector<float> decoded(n);
          fns(table).dequantize(decoded.data(), codes[r].data(), n, maxima.data());
          for (size_t i = 0; i < n; ++i) mean[i] += double{decoded[i]} / static_cast<double>(n_ranks);
          srcs.push_back(codes[r].data());
        }
        std::vector<float> lost(n, 0.0f), result(n);
        std::vector<uint8_t> out(code_bytes(n));
        fns(table).combine(out.data(), srcs.data(), n_ranks, n, maxima.data(), lost.data());
        fns(table).combine(codes[0].data(), srcs.data(), n_ranks, n, maxima.data(), nullptr);
        EXPECT_EQ(codes[0], out) << "in place of a source";
        fns(table).dequantize(result.data(), out.data(), n, maxima.data());
        for (size_t i = 0; i < n; ++i) {
          const double m = maxima[i / kBlockElems];
          ASSERT_LE(std::fabs(mean[i] - result[i]), bound(mean[i], m) + m * 0x1p-21) << table->name;
          ASSERT_NEAR(lost[i], static_cast<double>(n_ranks) * (mean[i] - result[i]),
                      static_cast<double>(n_ranks) * m * 0x1p-21);
        }
        if (first.empty()) first = out;
        EXPECT_EQ(out, first) << table->name;
      }
    }
  }
}

TEST_P(Blocks, ThatAreNotFiniteAreNanAndLoseNothing) {
  for (const KernelTable* table : tables()) {
    std::vector<float> x = random_floats(3 * kBlockElems, 1, 3);
    x[300] = std::numeric_limits<float>::infinity();
    const std::vector<float> maxima = maxima_of(x);
    std::vector<uint8_t> codes(code_bytes(x.size()), 0xee);
    std::vector<float> src = x, decoded(x.size());
    fns(table).quantize(codes.data(), src.data(), x.size(), maxima.data(), true);
    const void* one = codes.data();
    fns(table).combine(codes.data(), &one, 1, x.size(), maxima.data(), src.data());
    fns(table).dequantize(decoded.data(), codes.data(), x.size(), maxima.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const bool is_odd = i / kBlockElems == 1;
      EXPECT_EQ(std::isnan(decoded[i]), is_odd) << table->name << " " << i;
      if (is_odd) {
        EXPECT_EQ(src[i], 0.0f);
      }
    }
  }
}

TEST_P(Blocks, NearTheLargestFloatsNeitherOverflowNorSpoilWhatIsLost) {
  const float largest = std::nextafter(0x1p127f, 0.0f);
  for (const KernelTable* table : tables()) {
    const std::vector<float> x{largest, -largest, 1e30f}, maxima = maxima_of(x);
    std::vector<uint8_t> codes(code_bytes(3)), sum(code_bytes(3));
    std::vector<float> src = x, decoded(3), lost(3);
    fns(table).quantize(codes.data(), src.data(), 3, maxima.data(), true);
    const std::vector<const void*> srcs(5, codes.data());  // five times nearly the largest float
    fns(table).combine(sum.data(), srcs.data(), 5, 3, maxima.data(), lost.data());
    fns(table).dequantize(decoded.data(), sum.data(), 3, maxima.data());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(std::isfinite(src[i]) && std::isfinite(lost[i])) << table->name;
      EXPECT_LE(std::fabs(double{x[i]} - decoded[i]), 3 * bound(x[i], maxima[0])) << table->name;
    }
    const std::vector<float> over{0x1p127f, 1.0f, -2.0f}, over_maxima = maxima_of(over);
    src = over;
    fns(table).quantize(codes.data(), src.data(), 3, over_maxima.data(), true);
    fns(table).dequantize(decoded.data(), codes.data(), 3, over_maxima.data());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(std::isnan(decoded[i])) << table->name;
      EXPECT_EQ(src[i], 0.0f) << table->name;
    }
  }
}

TEST_P(Blocks, ThatVanishAreZerosWhichFeedbackKeeps) {
  for (const KernelTable* table : tables()) {
    const std::vector<float> x(40, 0x1p-120f), maxima = maxima_of(x);
    std::vector<uint8_t> codes(code_bytes(x.size()), 0xee);
    std::vector<float> src = x, decoded(x.size(), 1.0f);
    fns(table).quantize(codes.data(), src.data(), x.size(), maxima.data(), true);
    fns(table).dequantize(decoded.data(), codes.data(), x.size(), maxima.data());
    EXPECT_EQ(decoded, std::vector<float>(x.size(), 0.0f));
    EXPECT_EQ(src, x);
  }
}

TEST(BlocksOfInt8, AreIntegersWhoseSumIsExact) {
  for (const KernelTable* table : tables()) {
    const BlockFns& fns = table->blocks[static_cast<int>(DType::kInt8)];
    std::vector<float> x(255);
    for (int k = -127; k <= 127; ++k) x[static_cast<size_t>(k + 127)] = static_cast<float>(k) * 0.25f;
    const float maximum = 127 * 0.25f;
    std::vector<int8_t> codes(x.size());
    fns.quantize(codes.data(), x.data(), x.size(), &maximum, false);
    for (int k = -127; k <= 127; ++k) EXPECT_EQ(codes[static_cast<size_t>(k + 127)], k) << table->name;
    std::vector<float> decoded(x.size());
    fns.dequantize(decoded.data(), codes.data(), x.size(), &maximum);
    EXPECT_EQ(decoded, x) << table->name;
  }
}

INSTANTIATE_TEST_SUITE_P(Codes, Blocks, testing::ValuesIn(kBounds),
                         [](const auto& test) { return std::string(dtype_name(test.param.code)); });

}  // namespace
}  // namespace pycomm
