// The CUDA reduce against the CPU's (kernels/reduce.h), bit for bit: every dtype and operation, many counts
// of sources, lengths, misalignments and segments. The sum is compared with float64 as well.
#include "kernels/reduce.h"

#include "cuda/memory.h"
#include "kernels/cuda/kernels.h"

namespace pycomm {
namespace {

struct Case {
  DType dtype;
  ReduceOp op;
};
std::vector<Case> defined_cases() {
  std::vector<Case> cases;
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const Case c{static_cast<DType>(d), static_cast<ReduceOp>(o)};
      if (find_reduce(c.dtype, c.op) != nullptr) cases.push_back(c);
    }
  }
  return cases;
}
std::string name_of(const testing::TestParamInfo<Case>& info) {
  return std::string(dtype_name(info.param.dtype)) + "_" + reduce_op_name(info.param.op);
}

Bytes on_cpu(const Case& c, const std::vector<Bytes>& srcs, double scalar) {
  Bytes out(srcs[0].size());
  std::vector<const void*> in;
  for (const Bytes& s : srcs) in.push_back(s.data());
  void* dst = out.data();
  find_reduce(c.dtype, c.op)(&dst, 1, in.data(), static_cast<int>(in.size()),
                             out.size() / dtype_size(c.dtype), scalar);
  return out;
}

class Reduce : public testing::TestWithParam<Case> {
 protected:
  // One segment; offs[k % size] is the remainder modulo 16 of source k, offs[0] that of dst as well.
  // dst_is: the source that is overwritten, or -1.
  void check(int n_srcs, size_t n_elems, const std::vector<size_t>& offs, int dst_is, double scalar) {
    const Case c = GetParam();
    const size_t n_bytes = n_elems * dtype_size(c.dtype);
    std::vector<Bytes> srcs;
    std::vector<const void*> in;
    for (int k = 0; k < n_srcs; ++k) {
      srcs.push_back(random_bytes(n_bytes, rng_));
      in.push_back(arena_.place(srcs.back(), offs[static_cast<size_t>(k) % offs.size()]));
    }
    void* dst =
        dst_is < 0 ? arena_.place(n_bytes, offs[0]) : const_cast<void*>(in[static_cast<size_t>(dst_is)]);
    const cuda::ReduceSegment segment{dst, in.data(), n_elems};
    ASSERT_OK(cuda::reduce(c.dtype, c.op, {&segment, 1}, n_srcs, scalar, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    ASSERT_TRUE(same(c.dtype, arena_.read(dst, n_bytes), on_cpu(c, srcs, scalar)))
        << n_srcs << " sources, " << n_elems << " elements, misaligned by " << offs[0] << " and "
        << offs[1 % offs.size()] << ", dst is source " << dst_is << ", scalar " << scalar;
    for (int k = 0; k < n_srcs; ++k) {
      if (k == dst_is) continue;
      ASSERT_EQ(arena_.read(in[static_cast<size_t>(k)], n_bytes), srcs[static_cast<size_t>(k)])
          << "source " << k << " was written";
    }
    ASSERT_TRUE(arena_.finish());
  }

  static DeviceArena& arena() {
    static DeviceArena* const all = new DeviceArena;
    return *all;
  }
  DeviceArena& arena_ = arena();
  std::mt19937_64 rng_{17};
};
INSTANTIATE_TEST_SUITE_P(Cuda, Reduce, testing::ValuesIn(defined_cases()), name_of);

TEST_P(Reduce, CountsOfSources) {
  for (int n_srcs : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 32}) {
    ASSERT_NO_FATAL_FAILURE(check(n_srcs, 101, {0}, -1, 3.0)) << n_srcs;
  }
}

TEST_P(Reduce, Lengths) {
  const size_t pack = 16 / std::min<size_t>(16, dtype_size(GetParam().dtype));
  const size_t chunk = 16384 / dtype_size(GetParam().dtype);
  for (size_t n : {size_t{1}, pack - (pack > 1), pack, pack + 1, size_t{7}, 255 * pack, 256 * pack + 3,
                   chunk - 1, chunk, chunk + 1, 2 * chunk + pack + 1}) {
    ASSERT_NO_FATAL_FAILURE(check(3, n, {0}, -1, 4.0)) << n;
  }
}

TEST_P(Reduce, Misalignments) {
  const size_t e = dtype_size(GetParam().dtype);
  const std::vector<std::vector<size_t>> offsets = {{e}, {16 - e}, {0, e}, {e, 2 * e, 0},
                                                    {1}, {3, 5},   {0, 8}};
  for (const auto& offs : offsets) {
    for (int n_srcs : {2, 9}) {
      for (size_t n : {size_t{1}, size_t{3}, size_t{613}})
        ASSERT_NO_FATAL_FAILURE(check(n_srcs, n, offs, -1, 7.0));
    }
  }
}

TEST_P(Reduce, IntoASource) {
  for (int n_srcs : {1, 2, 5, 12}) {
    for (int dst_is : {0, n_srcs - 1}) {
      ASSERT_NO_FATAL_FAILURE(check(n_srcs, 5000, {0}, dst_is, 2.0));
      ASSERT_NO_FATAL_FAILURE(check(n_srcs, 77, {dtype_size(GetParam().dtype) % 16}, dst_is, 0.1));
    }
  }
}

TEST_P(Reduce, ManySegments) {
  const Case c = GetParam();
  for (int n_srcs : {2, 5}) {
    std::vector<std::vector<Bytes>> srcs;
    std::vector<std::vector<const void*>> in;
    std::vector<cuda::ReduceSegment> segments;
    for (size_t s = 0; s < 150; ++s) {  // more than fit one launch; some are empty
      const size_t n_elems = s % 7 == 3 ? 0 : s == 20 ? 20000 / dtype_size(c.dtype) : s * 5 % 41;
      auto& mine = srcs.emplace_back();
      auto& pointers = in.emplace_back();
      for (int k = 0; k < n_srcs; ++k) {
        mine.push_back(random_bytes(n_elems * dtype_size(c.dtype), rng_));
        pointers.push_back(arena_.place(mine.back(), s % 3 * dtype_size(c.dtype)));
      }
      segments.push_back({arena_.place(mine[0].size(), s % 3 * dtype_size(c.dtype)), nullptr, n_elems});
    }
    for (size_t s = 0; s < segments.size(); ++s) segments[s].srcs = in[s].data();
    ASSERT_OK(cuda::reduce(c.dtype, c.op, segments, n_srcs, 6.0, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    for (size_t s = 0; s < segments.size(); ++s) {
      if (segments[s].n_elems == 0) continue;
      ASSERT_TRUE(same(c.dtype, arena_.read(segments[s].dst, srcs[s][0].size()), on_cpu(c, srcs[s], 6.0)))
          << "segment " << s;
    }
    ASSERT_TRUE(arena_.finish());
  }
}

TEST(CudaReduce, TheSumIsWithinTheBoundOfPairwiseSummation) {
  DeviceArena arena;
  std::mt19937_64 rng(5);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int n_srcs : {2, 7, 8, 21}) {
    const size_t n = 3001;
    std::vector<std::vector<float>> srcs(static_cast<size_t>(n_srcs), std::vector<float>(n));
    std::vector<const void*> in;
    for (auto& s : srcs) {
      for (float& v : s) v = uniform(rng);
      Bytes bytes(n * 4);
      std::memcpy(bytes.data(), s.data(), bytes.size());
      in.push_back(arena.place(bytes, 4));
    }
    void* dst = arena.place(n * 4, 4);
    const cuda::ReduceSegment segment{dst, in.data(), n};
    ASSERT_OK(cuda::reduce(DType::kFloat32, ReduceOp::kSum, {&segment, 1}, n_srcs, 1, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    std::vector<float> got(n);
    ASSERT_CUDA(cudaMemcpy(got.data(), dst, n * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; ++i) {
      double sum = 0, magnitudes = 0;
      for (const auto& s : srcs) sum += s[i], magnitudes += std::abs(static_cast<double>(s[i]));
      const double height = std::ceil(std::log2(n_srcs));
      ASSERT_NEAR(got[i], sum, height * std::ldexp(magnitudes, -24));
    }
    ASSERT_TRUE(arena.finish());
  }
}

TEST(CudaReduce, KnowsWhatTheCpuKnows) {
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      EXPECT_EQ(cuda::reduce_supported(dtype, op), find_reduce(dtype, op) != nullptr)
          << dtype_name(dtype) << " " << reduce_op_name(op);
    }
  }
}

TEST(CudaReduce, RefusesWhatItCannot) {
  const void* src = nullptr;
  const cuda::ReduceSegment segment{nullptr, &src, 0};
  Status s = cuda::reduce(DType::kInt32, ReduceOp::kAvg, {&segment, 1}, 1, 1, nullptr);
  EXPECT_EQ(s.code(), Code::kValue);
  EXPECT_EQ(s.message(), "cuda reduce: avg is not defined for int32");
  s = cuda::reduce(DType::kInt32, ReduceOp::kSum, {&segment, 1}, 33, 1, nullptr);
  EXPECT_EQ(s.message(), "cuda reduce: 33 sources; expected 1 to 32");
  EXPECT_TRUE(cuda::reduce(DType::kInt32, ReduceOp::kSum, {&segment, 1}, 1, 1, nullptr).ok())
      << "nothing to do";
}

}  // namespace
}  // namespace pycomm
