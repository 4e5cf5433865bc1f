// CUDA's cast, pack and unpack against the CPU's (kernels/cast.h), bit for bit: every pair of dtypes, all
// codes of the small formats, their midpoints, lengths, misalignments, many tensors at once.
#include "kernels/cast.h"

#include "cuda/memory.h"
#include "kernels/cuda/kernels.h"

namespace pycomm {
namespace {

struct Pair {
  DType dst, src;
};
std::vector<Pair> supported_pairs(bool (*wanted)(Pair) = [](Pair) { return true; }) {
  std::vector<Pair> pairs;
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int s = 0; s < kNumDTypes; ++s) {
      const Pair p{static_cast<DType>(d), static_cast<DType>(s)};
      if (cast_supported(p.dst, p.src) && wanted(p)) pairs.push_back(p);
    }
  }
  return pairs;
}
std::string name_of(const testing::TestParamInfo<Pair>& info) {
  return std::string(dtype_name(info.param.src)) + "_to_" + dtype_name(info.param.dst);
}

class Cast : public testing::TestWithParam<Pair> {
 protected:
  size_t dst_bytes(size_t n) const { return n * dtype_size(GetParam().dst); }
  size_t src_bytes(size_t n) const { return n * dtype_size(GetParam().src); }
  std::vector<float> scales() const {
    return scale_supported(GetParam().dst, GetParam().src) ? std::vector<float>{1.0f, 0.3f}
                                                           : std::vector<float>{1.0f};
  }
  Bytes on_cpu(const Bytes& src, float scale) const {
    const size_t n = src.size() / dtype_size(GetParam().src);
    Bytes out(dst_bytes(n));
    cast(GetParam().dst, out.data(), GetParam().src, src.data(), n, scale);
    return out;
  }
  void check(const Bytes& src, size_t src_off, size_t dst_off, float scale) {
    const size_t n = src.size() / dtype_size(GetParam().src);
    const void* in = arena_.place(src, src_off);
    void* out = arena_.place(dst_bytes(n), dst_off);
    const cuda::CastSegment segment{out, in, n};
    ASSERT_OK(cuda::cast(GetParam().dst, GetParam().src, {&segment, 1}, scale, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_TRUE(same(GetParam().dst, arena_.read(out, dst_bytes(n)), on_cpu(src, scale)))
        << n << " elements, misaligned by " << src_off << " (src) and " << dst_off << " (dst), scale "
        << scale;
    ASSERT_TRUE(arena_.finish());
  }
  static DeviceArena& arena() {
    static DeviceArena* const all = new DeviceArena;
    return *all;
  }
  DeviceArena& arena_ = arena();
  std::mt19937_64 rng_{23};
};
INSTANTIATE_TEST_SUITE_P(Cuda, Cast, testing::ValuesIn(supported_pairs()), name_of);

TEST_P(Cast, LengthsAndMisalignments) {
  const size_t d = dtype_size(GetParam().dst) % 16, s = dtype_size(GetParam().src) % 16;
  for (size_t n : {size_t{1}, size_t{5}, size_t{16}, size_t{33}, size_t{4097}, size_t{9000}}) {
    for (const auto& [src_off, dst_off] : std::vector<std::pair<size_t, size_t>>{
             {0, 0}, {s, d}, {3 * s, 3 * d}, {0, d}, {s, 0}, {1, 1}, {7, 0}, {8, 8}}) {
      for (const float scale : scales()) {
        ASSERT_NO_FATAL_FAILURE(check(random_bytes(src_bytes(n), rng_), src_off, dst_off, scale));
      }
    }
  }
}

// For each code of a small format: it, and on the way down its float32 neighbours and the midpoints.
class SmallCast : public Cast {};
INSTANTIATE_TEST_SUITE_P(Cuda, SmallCast, testing::ValuesIn(supported_pairs([](Pair p) {
                           return is_low_precision(p.dst) || is_low_precision(p.src);
                         })),
                         name_of);

TEST_P(SmallCast, AllCodes) {
  const auto [dst, src] = GetParam();
  const DType small = is_low_precision(src) ? src : dst;
  const size_t n_codes = dtype_size(small) == 1 ? 256 : 65536;
  Bytes codes(n_codes * dtype_size(small));
  for (size_t i = 0; i < n_codes; ++i) std::memcpy(&codes[i * dtype_size(small)], &i, dtype_size(small));
  if (is_low_precision(src)) {
    ASSERT_NO_FATAL_FAILURE(check(codes, 0, 0, 1.0f));
    return;
  }
  std::vector<float> values(n_codes), inputs;
  cast(DType::kFloat32, values.data(), small, codes.data(), n_codes, 1.0f);
  for (size_t i = 0; i + 1 < n_codes; ++i) {
    const float v = values[i], middle = v + (values[i + 1] - v) / 2;
    for (const float x : {v, middle}) {
      for (const float y : {x, std::nextafter(x, 1e38f), std::nextafter(x, -1e38f)}) inputs.push_back(y);
    }
  }
  Bytes bytes(inputs.size() * 4);
  std::memcpy(bytes.data(), inputs.data(), bytes.size());
  ASSERT_NO_FATAL_FAILURE(check(bytes, 0, 0, 1.0f));
}

TEST_P(Cast, PackAndUnpackManyTensors) {
  const auto [dst, src] = GetParam();
  std::vector<Bytes> tensors;
  std::vector<ConstBlock> blocks;
  size_t n_all = 0;
  for (size_t i = 0; i < 300; ++i) {  // more than fit one launch; some are empty
    const size_t n = i == 7 ? 5000 : i * 11 % 37;
    tensors.push_back(random_bytes(src_bytes(n), rng_));
    blocks.push_back({arena_.place(tensors.back(), 0), n});
    n_all += n;
  }
  for (const float scale : scales()) {
    void* flat = arena_.place(dst_bytes(n_all), 0);
    ASSERT_OK(cuda::pack(dst, flat, src, blocks, scale, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    Bytes want;
    for (const Bytes& t : tensors) {
      const Bytes part = on_cpu(t, scale);
      want.insert(want.end(), part.begin(), part.end());
    }
    ASSERT_TRUE(same(dst, arena_.read(flat, dst_bytes(n_all)), want));
  }
  // And back: a flat buffer of src cast into tensors of dst.
  Bytes flat_bytes;
  for (const Bytes& t : tensors) flat_bytes.insert(flat_bytes.end(), t.begin(), t.end());
  const void* flat = arena_.place(flat_bytes, 0);
  std::vector<Block> dsts;
  for (const ConstBlock& b : blocks) dsts.push_back({arena_.place(dst_bytes(b.n_elems), 0), b.n_elems});
  ASSERT_OK(cuda::unpack(dst, dsts, src, flat, 1.0f, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  for (size_t i = 0; i < dsts.size(); ++i) {
    ASSERT_TRUE(same(dst, arena_.read(dsts[i].data, dst_bytes(dsts[i].n_elems)), on_cpu(tensors[i], 1.0f)))
        << i;
  }
  ASSERT_TRUE(arena_.finish());
}

class CastInPlace : public Cast {};
INSTANTIATE_TEST_SUITE_P(Cuda, CastInPlace, testing::ValuesIn(supported_pairs([](Pair p) {
                           return dtype_size(p.dst) == dtype_size(p.src);
                         })),
                         name_of);

TEST_P(CastInPlace, GivesTheSame) {
  const auto [dst, src] = GetParam();
  for (const float scale : scales()) {
    const Bytes bytes = random_bytes(src_bytes(3000), rng_);
    void* p = arena_.place(bytes, 0);
    const cuda::CastSegment segment{p, p, 3000};
    ASSERT_OK(cuda::cast(dst, src, {&segment, 1}, scale, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_TRUE(same(dst, arena_.read(p, bytes.size()), on_cpu(bytes, scale)));
    ASSERT_TRUE(arena_.finish());
  }
}

TEST(CudaCast, KnowsWhatTheCpuKnows) {
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int s = 0; s < kNumDTypes; ++s) {
      const auto dst = static_cast<DType>(d), src = static_cast<DType>(s);
      EXPECT_EQ(cuda::cast_supported(dst, src), cast_supported(dst, src))
          << dtype_name(dst) << dtype_name(src);
      EXPECT_EQ(cuda::scale_supported(dst, src), scale_supported(dst, src))
          << dtype_name(dst) << dtype_name(src);
    }
  }
}

TEST(CudaCast, RefusesWhatItCannot) {
  Status s = cuda::cast(DType::kInt32, DType::kFloat32, {}, 1.0f, nullptr);
  EXPECT_EQ(s.code(), Code::kValue);
  EXPECT_NE(s.message().find("float32 to int32"), std::string::npos) << s.message();
  s = cuda::cast(DType::kInt32, DType::kInt32, {}, 2.0f, nullptr);
  EXPECT_NE(s.message().find("times 2"), std::string::npos) << s.message();
}

}  // namespace
}  // namespace pycomm
