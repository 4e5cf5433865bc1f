// Coded vectors against the CPU's kernels (kernels/blocks.h, kernels/reduce.h) one after the other, bit for
// bit: every format, lengths, misalignments, numbers of sources, blocks that vanish or are not finite, error
// feedback, many segments; and the bound of the header.
#include "kernels/blocks.h"

#include <limits>

#include "cuda/memory.h"
#include "kernels/cuda/kernels.h"
#include "kernels/reduce.h"

namespace pycomm {
namespace {

using Floats = std::vector<float>;

Bytes bytes_of(const Floats& v) {
  Bytes out(v.size() * 4);
  if (!v.empty()) std::memcpy(out.data(), v.data(), out.size());
  return out;
}

class Blocks : public testing::TestWithParam<DType> {
 protected:
  // Sizes vary from block to block; the third and fourth block are not finite, the fifth vanishes, the sixth
  // is 0.
  Floats values(size_t n) {
    std::normal_distribution<float> normal(0, 1);
    Floats v(n);
    for (size_t i = 0; i < n; ++i) {
      const size_t block = i / kBlockElems;
      v[i] = normal(rng_) * std::ldexp(1.0f, block == 4 ? -120 : static_cast<int>(block * 7 % 40) - 20);
      if (block == 5) v[i] = 0.0f;
    }
    if (n > 2 * kBlockElems + 9) v[2 * kBlockElems + 9] = -std::numeric_limits<float>::infinity();
    if (n > 3 * kBlockElems + 3) v[3 * kBlockElems + 3] = std::numeric_limits<float>::quiet_NaN();
    return v;
  }
  // The message of x, and in x what it does not say. What lies between maxima and codes is nobody's.
  Bytes encoded(Floats* x) const {
    const size_t n = x->size();
    Bytes message(cuda::coded_bytes(code_, n), DeviceArena::kUnused);
    std::fill(message.begin() + static_cast<ptrdiff_t>(cuda::coded_begin(n)), message.end(), uint8_t{0});
    Floats maxima(n_blocks(n));
    block_maxima(x->data(), n, maxima.data());
    std::copy_n(reinterpret_cast<const uint8_t*>(maxima.data()), maxima.size() * 4, message.begin());
    quantize(code_, message.data() + cuda::coded_begin(n), x->data(), n, maxima.data(), true);
    return message;
  }
  Floats decoded(const Bytes& message, size_t n) const {
    Floats out(n), maxima(n_blocks(n));
    std::copy_n(message.begin(), maxima.size() * 4, reinterpret_cast<uint8_t*>(maxima.data()));
    dequantize(code_, out.data(), message.data() + cuda::coded_begin(n), n, maxima.data());
    return out;
  }
  static DeviceArena& arena() {
    static DeviceArena* const all = new DeviceArena;
    return *all;
  }
  float* place(const Floats& v, size_t off) { return static_cast<float*>(arena_.place(bytes_of(v), off)); }
  testing::AssertionResult holds(const float* p, const Floats& want) const {
    return same(DType::kFloat32, arena_.read(p, want.size() * 4), bytes_of(want));
  }

  const DType code_ = GetParam();
  DeviceArena& arena_ = arena();
  std::mt19937_64 rng_{37};
};
INSTANTIATE_TEST_SUITE_P(Cuda, Blocks,
                         testing::Values(DType::kInt8, DType::kFloat8E4M3, DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

constexpr size_t kLengths[] = {1, 3, 4, 127, 129, 255, 256, 257, 1023, 1025, 4096, 9001};

TEST_P(Blocks, EncodeIsTheCpus) {
  for (const size_t n : kLengths) {
    for (const size_t off : {size_t{0}, size_t{4}, size_t{3}}) {
      for (const bool feedback : {false, true}) {
        const Floats x = values(n), before = feedback ? values(n) : Floats(n);
        Floats left = x;
        for (size_t i = 0; feedback && i < n; ++i) left[i] = before[i] + x[i];
        const Floats source = left;
        const Bytes want = encoded(&left);

        const void* src = place(x, off);
        float* const residual = place(before, (off + 8) % 16);
        void* const message = arena_.place(want.size(), 0);
        float* const dst = off == 4 ? nullptr : static_cast<float*>(arena_.place(n * 4, off));
        const cuda::CodedSegment s{dst, message, feedback ? residual : nullptr, &src, n};
        ASSERT_OK(cuda::reduce_coded(code_, ReduceOp::kSum, {&s, 1}, 1, 0, 1.0, nullptr));
        ASSERT_CUDA(cudaDeviceSynchronize());
        ASSERT_EQ(arena_.read(message, want.size()), want) << n << " " << off << " " << feedback;
        ASSERT_TRUE(holds(static_cast<const float*>(src), x)) << n;
        ASSERT_TRUE(holds(residual, feedback ? left : before)) << n << " " << off;
        const Floats said = decoded(want, n);
        if (dst != nullptr) {
          ASSERT_TRUE(holds(dst, said)) << n << " " << off;
        }
        ASSERT_TRUE(arena_.finish());

        const double u = code_ == DType::kInt8         ? 0
                         : code_ == DType::kFloat8E4M3 ? 0x1p-4
                         : code_ == DType::kFloat16    ? 0x1p-11
                                                       : 0x1p-8;
        for (size_t i = 0; i < n; ++i) {
          float m;
          std::memcpy(&m, &want[i / kBlockElems * 4], 4);
          if (!std::isfinite(m) || m < 0x1p-100f) continue;
          const double f = code_ == DType::kInt8         ? m / 254 + m * 0x1p-23
                           : code_ == DType::kFloat8E4M3 ? m * 0x1p-17
                                                         : m * 0x1p-38 + 0x1p-133;
          ASSERT_NEAR(said[i], source[i], u * std::fabs(source[i]) + f) << i;
        }
      }
    }
  }
}

TEST_P(Blocks, DecodeIsTheCpus) {
  for (const size_t n : kLengths) {
    for (const size_t off : {size_t{0}, size_t{8}, size_t{1}}) {
      Floats x = values(n);
      const Bytes message = encoded(&x);
      const void* src = arena_.place(message, 0);
      float* const dst = static_cast<float*>(arena_.place(n * 4, off));
      const cuda::CodedSegment s{dst, nullptr, nullptr, &src, n};
      ASSERT_OK(cuda::reduce_coded(code_, ReduceOp::kSum, {&s, 1}, 1, -1, 1.0, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      ASSERT_TRUE(holds(dst, decoded(message, n))) << n << " " << off;
      ASSERT_TRUE(arena_.finish());
    }
  }
}

// Where a reduction's operands lie, and what becomes of its result.
struct Reduction {
  ReduceOp op;
  int n_srcs, plain;
  size_t n, off;
  bool encodes, feedback, in_place;
};

TEST_P(Blocks, ReduceIsTheCpus) {
  std::vector<Reduction> all;
  for (int n_srcs = 1; n_srcs <= 9; ++n_srcs) {
    for (int plain = -1; plain < n_srcs; ++plain) {
      const auto k = static_cast<size_t>(n_srcs + plain);
      const size_t n = k % 3 == 0 ? 2000 : k % 3 == 1 ? 601 : 258;
      const ReduceOp op = plain % 2 ? ReduceOp::kAvg : ReduceOp::kSum;
      all.push_back({op, n_srcs, plain, n, k * 4 % 12, k % 2 == 0, k % 4 == 0, plain >= 0});
    }
  }
  for (const int n_srcs : {12, 15, 16, 17, 31, 32})
    all.push_back({ReduceOp::kAvg, n_srcs, n_srcs / 2, 700, 0, n_srcs % 2 == 0, true, false});
  for (const Reduction& r : all) {
    const auto size = static_cast<size_t>(r.n_srcs);
    std::vector<Floats> operands;
    std::vector<const void*> srcs, on_cpu;
    for (size_t k = 0; k < size; ++k) {
      Floats x = values(r.n);
      if (static_cast<int>(k) == r.plain) {
        srcs.push_back(place(x, r.off));
        operands.push_back(x);
      } else {
        const Bytes message = encoded(&x);
        srcs.push_back(arena_.place(message, 0));
        operands.push_back(decoded(message, r.n));
      }
    }
    for (const Floats& o : operands) on_cpu.push_back(o.data());
    Floats want(r.n);
    void* to = want.data();
    find_reduce(DType::kFloat32, r.op)(&to, 1, on_cpu.data(), r.n_srcs, r.n, r.n_srcs);
    const Floats before = values(r.n);
    Floats left = before;
    Bytes message(cuda::coded_bytes(code_, r.n));
    if (r.encodes) {
      Floats sum = want;
      for (size_t i = 0; r.feedback && i < r.n; ++i) sum[i] = before[i] + want[i];
      message = encoded(&sum);
      want = decoded(message, r.n);
      if (r.feedback) left = sum;
    }

    cuda::CodedSegment s{nullptr, nullptr, nullptr, srcs.data(), r.n};
    s.dst = r.in_place ? static_cast<float*>(const_cast<void*>(srcs[static_cast<size_t>(r.plain)]))
                       : static_cast<float*>(arena_.place(r.n * 4, r.off));
    float* const residual = place(before, r.off);
    if (r.encodes) s.message = arena_.place(message.size(), 0);
    if (r.encodes && r.feedback) s.residual = residual;
    ASSERT_OK(cuda::reduce_coded(code_, r.op, {&s, 1}, r.n_srcs, r.plain, r.n_srcs, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::string what = format("%s of %d, %d not coded", reduce_op_name(r.op), r.n_srcs, r.plain);
    ASSERT_TRUE(holds(s.dst, want)) << what;
    ASSERT_TRUE(holds(residual, left)) << what;
    if (r.encodes) {
      ASSERT_EQ(arena_.read(s.message, message.size()), message) << what;
    }
    ASSERT_TRUE(arena_.finish());
  }
}

// More than one launch takes, of many lengths, none among them; every second is encoded again.
TEST_P(Blocks, ManySegments) {
  constexpr size_t kSegments = 150;
  std::vector<const void*> srcs;
  std::vector<Floats> want;
  std::vector<Bytes> messages;
  std::vector<cuda::CodedSegment> segments;
  srcs.reserve(2 * kSegments);
  for (size_t k = 0; k < kSegments; ++k) {
    const size_t n = k * 37 % 600;
    Floats coded = values(n), own = values(n), sum(n);
    const Bytes in = encoded(&coded);
    coded = decoded(in, n);
    for (size_t i = 0; i < n; ++i) sum[i] = coded[i] + own[i];
    messages.push_back(encoded(&sum));
    for (size_t i = 0; i < n; ++i) sum[i] = coded[i] + own[i];
    want.push_back(k % 2 == 0 ? sum : decoded(messages[k], n));
    const void* const* first = srcs.data() + srcs.size();
    srcs.push_back(arena_.place(in, 0));
    srcs.push_back(place(own, k % 16));
    segments.push_back({static_cast<float*>(arena_.place(n * 4, k % 16)), nullptr, nullptr, first, n});
    if (k % 2) segments.back().message = arena_.place(messages[k].size(), 0);
  }
  ASSERT_OK(cuda::reduce_coded(code_, ReduceOp::kSum, segments, 2, 1, 1.0, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  for (size_t k = 0; k < kSegments; ++k) {
    ASSERT_TRUE(holds(segments[k].dst, want[k])) << k;
    if (k % 2) {
      ASSERT_EQ(arena_.read(segments[k].message, messages[k].size()), messages[k]) << k;
    }
  }
  ASSERT_TRUE(arena_.finish());
}

TEST(CudaBlocks, KnowsWhatTheCpuKnowsAndRefusesTheRest) {
  for (int d = 0; d < kNumDTypes; ++d) {
    EXPECT_EQ(cuda::blocks_supported(static_cast<DType>(d)), blocks_supported(static_cast<DType>(d)));
  }
  // Five blocks have 20 bytes of maxima; three codes take the place of four.
  EXPECT_EQ(cuda::coded_begin(1027), 32u);
  EXPECT_EQ(cuda::coded_bytes(DType::kInt8, 1027), 32u + 1028);
  EXPECT_EQ(cuda::coded_bytes(DType::kFloat16, 3), 16u + 8);
  EXPECT_EQ(cuda::coded_bytes(DType::kInt8, 0), 0u);

  const auto refusal = [](DType code, ReduceOp op, uintptr_t message, uintptr_t residual, int n_srcs,
                          int plain) {
    std::vector<const void*> srcs(40, nullptr);
    const cuda::CodedSegment s{nullptr, reinterpret_cast<void*>(message), reinterpret_cast<float*>(residual),
                               srcs.data(), 1};
    const Status status = cuda::reduce_coded(code, op, {&s, 1}, n_srcs, plain, 1.0, nullptr);
    EXPECT_EQ(status.code(), Code::kValue);
    return status.message();
  };
  const DType int8 = DType::kInt8;
  const ReduceOp sum = ReduceOp::kSum;
  EXPECT_EQ(refusal(DType::kInt16, sum, 16, 0, 1, 0),
            "cuda reduce_coded: codes of int16; expected int8, float8_e4m3fn, float16 or bfloat16");
  EXPECT_EQ(refusal(int8, ReduceOp::kMax, 16, 0, 1, 0), "cuda reduce_coded: max; expected sum or avg");
  EXPECT_EQ(refusal(int8, sum, 16, 0, 0, -1), "cuda reduce_coded: 0 sources; expected 1 to 32");
  EXPECT_EQ(refusal(int8, sum, 16, 0, 33, -1), "cuda reduce_coded: 33 sources; expected 1 to 32");
  EXPECT_EQ(refusal(int8, sum, 16, 0, 2, 2),
            "cuda reduce_coded: source 2 of 2 is not coded; expected one of them, or -1");
  EXPECT_EQ(refusal(int8, sum, 4, 0, 1, 0), "cuda reduce_coded: messages must be aligned to 16 bytes");
  EXPECT_EQ(refusal(int8, sum, 0, 16, 1, 0), "cuda reduce_coded: a residual goes with a message only");
}

}  // namespace
}  // namespace pycomm
