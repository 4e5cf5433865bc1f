// all_gather with compression on device tensors: the bits of the CPU's kernels (kernels/blocks.h), by any
// way.
#include "cuda/device_ranks.h"
#include "kernels/blocks.h"
#include "kernels/cast.h"

namespace pycomm {
namespace {

using Floats = std::vector<float>;

Bytes bytes_of(const Floats& v) {
  const auto* p = reinterpret_cast<const uint8_t*>(v.data());
  return Bytes(p, p + 4 * v.size());
}

// What a message says of values plus what was left of them, as a rank between hosts would send it.
Floats said(DType code, const Floats& values, Floats* residual) {
  Floats left(values.size()), maxima(n_blocks(values.size())), out(values.size());
  for (size_t i = 0; i < values.size(); i++) left[i] = (*residual)[i] + values[i];
  Bytes codes(values.size() * dtype_size(code));
  block_maxima(left.data(), left.size(), maxima.data());
  quantize(code, codes.data(), left.data(), left.size(), maxima.data(), true);
  dequantize(code, out.data(), codes.data(), out.size(), maxima.data());
  *residual = left;
  return out;
}

Floats part_of(int rank, uint64_t n, int call) {
  std::mt19937_64 rng(static_cast<uint64_t>(rank * 100 + call));
  std::normal_distribution<float> normal(0, 3);
  Floats v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

void gather(DeviceRank& self, Compression compression, const char* way, const std::vector<uint64_t>& counts,
            bool in_place) {
  const DType code = code_dtype(compression);
  const auto mine = static_cast<size_t>(self.rank);
  uint64_t total = 0, before = 0;
  for (size_t q = 0; q < counts.size(); q++) {
    if (q == mine) before = total;
    total += counts[q];
  }
  std::vector<Floats> residuals;
  for (const uint64_t n : counts) residuals.emplace_back(n);
  OnStream residual(self.stream, bytes_of(Floats(total)));
  for (int call = 0; call < 2; call++) {
    Floats want;
    for (size_t q = 0; q < counts.size(); q++) {
      const Floats one = said(code, part_of(static_cast<int>(q), counts[q], call), &residuals[q]);
      want.insert(want.end(), one.begin(), one.end());
    }
    const Bytes own = bytes_of(part_of(self.rank, counts[mine], call));
    OnStream in(self.stream, own, 4);
    OnStream out(self.stream, 4 * total, 8);
    if (in_place) {
      Bytes whole(4 * total, 0x7f);
      std::copy(own.begin(), own.end(), whole.begin() + static_cast<std::ptrdiff_t>(4 * before));
      out.put(whole);
    }
    Request r = self.request(CallKind::kAllGather, DType::kFloat32, ReduceOp::kSum, total);
    r.call.in = Buffer(in_place ? out.data() + 4 * before : in.data(), counts[mine]);
    r.call.out = Buffer(out.data(), total);
    r.call.sig.compression = compression;
    r.call.residual = reinterpret_cast<float*>(residual.data());
    r.counts = counts;
    const std::string what = format("rank %d, %s, %s, call %d", self.rank, compression_name(compression),
                                    way == nullptr ? "its choice" : way, call);
    const Status s = self.call(&r, way);
    ASSERT_TRUE(s.ok()) << what << ": " << s.message();
    ASSERT_EQ(out.get(), bytes_of(want)) << what;
    Floats left(total);
    std::copy(residuals[mine].begin(), residuals[mine].end(),
              left.begin() + static_cast<std::ptrdiff_t>(before));
    ASSERT_EQ(residual.get(), bytes_of(left)) << what << ": of the other parts nothing is left";
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr int kEndOfCompressions = 3;  // one in place, and one not
#else
constexpr int kEndOfCompressions = kNumCompressions;
#endif

TEST(DeviceCoded, AllGatherHasTheCpusBitsByAnyWay) {
  run_device_ranks(3, [](DeviceRank& self) {
    for (int c = 1; c < kEndOfCompressions; c++) {
      for (const char* way : {static_cast<const char*>(nullptr), "peer", "nccl", "ring", "direct"}) {
        for (const std::vector<uint64_t>& counts : {std::vector<uint64_t>{700, 0, 5}, {300, 300, 300}}) {
          gather(self, static_cast<Compression>(c), way, counts, c % 2 == 0);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

// A replay encodes what is there by then.
TEST(DeviceCoded, IsReplayedWithNewNumbers) {
  run_device_ranks(2, [](DeviceRank& self) {
    constexpr uint64_t kEach = 300;
    for (const char* way : {"peer", "nccl", "ring"}) {
      OnStream in(self.stream, 4 * kEach), out(self.stream, 8 * kEach);
      const auto call = [&] {
        Request r = self.request(CallKind::kAllGather, DType::kFloat32, ReduceOp::kSum, 2 * kEach);
        r.call.in = Buffer(in.data(), kEach);
        r.call.out = Buffer(out.data(), 2 * kEach);
        r.call.sig.compression = Compression::kInt8;
        r.counts = {kEach, kEach};
        return self.call(&r, way);
      };
      in.put(bytes_of(part_of(self.rank, kEach, 0)));
      PYCOMM_ASSERT_OK(call());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replayed = nullptr;
      ASSERT_CUDA(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal));
      PYCOMM_ASSERT_OK(call());
      ASSERT_CUDA(cudaStreamEndCapture(self.stream, &graph));
      ASSERT_CUDA(cudaGraphInstantiate(&replayed, graph, 0));
      for (int i = 1; i < 4; i++) {
        in.put(bytes_of(part_of(self.rank, kEach, i)));
        ASSERT_CUDA(cudaGraphLaunch(replayed, self.stream));
        Floats want;
        for (int q = 0; q < 2; q++) {
          Floats none(kEach);
          const Floats one = said(DType::kInt8, part_of(q, kEach, i), &none);
          want.insert(want.end(), one.begin(), one.end());
        }
        EXPECT_EQ(out.get(), bytes_of(want)) << way << ", replay " << i << ", rank " << self.rank;
      }
      ASSERT_CUDA(cudaGraphExecDestroy(replayed));
      ASSERT_CUDA(cudaGraphDestroy(graph));
    }
  });
}

// Half-sized tensors are widened, sent as codes of 8 bits, and rounded once.
TEST(DeviceCoded, SmallFloats) {
  run_device_ranks(2, [](DeviceRank& self) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const uint64_t n = 400;
      Bytes given, want;
      for (int q = 0; q < 2; q++) {
        Bytes narrow(2 * n), back(2 * n);
        Floats wide = part_of(q, n, 0), none(n);
        cast(dtype, narrow.data(), DType::kFloat32, wide.data(), n, 1.0f);
        cast(DType::kFloat32, wide.data(), dtype, narrow.data(), n, 1.0f);
        const Floats out = said(DType::kInt8, wide, &none);
        cast(dtype, back.data(), DType::kFloat32, out.data(), n, 1.0f);
        want.insert(want.end(), back.begin(), back.end());
        if (q == self.rank) given = narrow;
      }
      OnStream in(self.stream, given), out(self.stream, want.size());
      Request r = self.request(CallKind::kAllGather, dtype, ReduceOp::kSum, 2 * n);
      r.call.in = Buffer(in.data(), n);
      r.call.out = Buffer(out.data(), 2 * n);
      r.call.sig.compression = Compression::kInt8;
      r.counts = {n, n};
      PYCOMM_ASSERT_OK(self.call(&r));
      EXPECT_EQ(out.get(), want) << dtype_name(dtype);
      r.call.sig.compression = Compression::kFp16;
      EXPECT_EQ(self.comm->prepare(&r, nullptr).code(), Code::kValue) << "it would not be smaller";
    }
  });
}

// The only rank sends nothing, so nothing is lost.
TEST(DeviceCoded, OneRankKeepsItsNumbers) {
  run_device_ranks(1, [](DeviceRank& self) {
    const Bytes own = bytes_of(part_of(0, 500, 0));
    OnStream in(self.stream, own), out(self.stream, own.size());
    Request r = self.request(CallKind::kAllGather, DType::kFloat32, ReduceOp::kSum, 500);
    r.call.in = Buffer(in.data(), 500);
    r.call.out = Buffer(out.data(), 500);
    r.call.sig.compression = Compression::kInt8;
    r.counts = {500};
    PYCOMM_ASSERT_OK(self.call(&r));
    EXPECT_EQ(out.get(), own);
  });
}

}  // namespace
}  // namespace pycomm
