// Codes between hosts: one message against its bound, with and without a residual; and whole calls of several
// hosts as threads. Written for `make tsan`; tests/python/test_hosts_wire.py has the many cases.
#include "engine/compressed.h"

#include <cmath>

#include "engine/run_hosts.h"

namespace pycomm {
namespace {

constexpr Compression kAll[] = {Compression::kFp16, Compression::kBf16, Compression::kFp8,
                                Compression::kInt8};

// kernels/blocks.h: of an element x in a block whose largest magnitude is m.
double bound(Compression c, double x, double m) {
  switch (c) {
    case Compression::kNone: return 0;
    case Compression::kFp16: return std::ldexp(x, -11) + std::ldexp(m, -38);
    case Compression::kBf16: return std::ldexp(x, -8) + std::ldexp(m, -132);
    case Compression::kFp8: return std::ldexp(x, -4) + std::ldexp(m, -17);
    case Compression::kInt8: return m / 254 + std::ldexp(m, -22);
  }
  return 0;
}

// Small and large, of both signs; exact in float32.
float value(int rank, uint64_t i) {
  const int k = static_cast<int>((i * 37 + static_cast<uint64_t>(rank) * 11) % 129) - 64;
  return std::ldexp(static_cast<float>(k), static_cast<int>(i / 100 % 5) - 2);
}

TEST(Codec, MessagesAreWithinTheBoundInPiecesAsAsAWhole) {
  for (const Compression c : kAll) {
    for (const uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{255}, uint64_t{257}, 3 * Codec::kPiece + 5}) {
      std::vector<float> x(n), kept(n), decoded(n), pieces(n);
      for (uint64_t i = 0; i < n; i++) kept[i] = x[i] = value(0, i);
      const Codec codec(c, nullptr);
      ASSERT_EQ(codec.message_bytes(n), (n + 255) / 256 * 4 + n * dtype_size(code_dtype(c)));
      std::vector<std::byte> message(codec.message_bytes(n)), again(message.size());
      codec.encode(message.data(), x.data(), n, 0, false);
      codec.encode(again.data(), kept.data(), n, 0, true);
      ASSERT_EQ(message, again);
      codec.decode(decoded.data(), message.data(), n, 0, n);
      for (uint64_t at = 0; at < n; at += 512)
        codec.decode(pieces.data() + at, message.data(), n, at, std::min<uint64_t>(512, n - at));
      ASSERT_EQ(decoded, pieces);
      ASSERT_EQ(decoded, kept);  // what the sender keeps is what all get
      for (uint64_t i = 0; i < n; i++) {
        float m = 0;
        for (uint64_t j = i / 256 * 256; j < std::min(n, i / 256 * 256 + 256); j++)
          m = std::max(m, std::fabs(x[j]));
        ASSERT_EQ(x[i], value(0, i));  // an input is not written
        ASSERT_LE(std::fabs(decoded[i] - x[i]), bound(c, std::fabs(x[i]), m)) << compression_name(c) << i;
      }
    }
  }
}

TEST(Codec, AResidualIsWhatTheCodesDoNotSay) {
  constexpr uint64_t kN = 1000, kAt = 77;
  for (const Compression c : kAll) {
    std::vector<float> x(kN), decoded(kN), residual(kN + kAt, 0.5f);
    for (uint64_t i = 0; i < kN; i++) x[i] = value(1, i);
    const Codec codec(c, residual.data());
    std::vector<std::byte> message(codec.message_bytes(kN));
    codec.encode(message.data(), x.data(), kN, kAt, false);
    codec.decode(decoded.data(), message.data(), kN, 0, kN);
    for (uint64_t i = 0; i < kAt; i++) ASSERT_EQ(residual[i], 0.5f);  // others' elements
    for (uint64_t i = 0; i < kN; i++) {
      ASSERT_NEAR(decoded[i] + residual[kAt + i], x[i] + 0.5f, 1e-5) << compression_name(c) << ", " << i;
      ASSERT_EQ(x[i], value(1, i));
    }
  }
}

Status sum(TestRank& self, std::vector<float>& v, Compression c, float* residual) {
  Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, v.size());
  request.call.sig.compression = c;
  request.call.in = request.call.out = Buffer(v.data(), v.size());
  request.call.residual = residual;
  PYCOMM_RETURN_IF_ERROR(self.comm->prepare(&request, nullptr));
  return self.comm->run(request, nullptr);
}

void sums(TestRank& self) {
  for (const uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{257}, uint64_t{150'001}, uint64_t{600'011}}) {
    for (const Compression c : kAll) {
      std::vector<float> v(n), residual(n);
      for (int call = 0; call < 2; call++) {
        for (uint64_t i = 0; i < n; i++) v[i] = value(self.rank, i);
        PYCOMM_ASSERT_OK(sum(self, v, c, residual.data()));
        for (uint64_t i = 0; i < n; i++) {
          double exact = 0, magnitudes = 0;
          for (int q = 0; q < self.size; q++) {
            exact += static_cast<double>(value(q, i));
            magnitudes += std::fabs(static_cast<double>(value(q, i)));
          }
          // No element is above 256; codes of contributions and of the sum, and what was left before.
          const double allowed = 4.3 * bound(c, magnitudes, 256.0 * self.size);
          ASSERT_NEAR(v[i], exact, allowed) << compression_name(c) << ", " << n << ", element " << i;
        }
      }
      std::vector<float> first = v;  // the same bits on every rank
      Request request = request_of(CallKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, n, 0);
      request.call.in = self.rank == 0 ? Buffer(first.data(), n) : Buffer();
      request.call.out = Buffer(first.data(), n);
      PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
      PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
      ASSERT_EQ(first, v) << "rank " << self.rank;
    }
  }
}

TEST(Compressed, AllReduceOfSeveralHosts) {
  for (const std::vector<int>& placement :
       std::vector<std::vector<int>>{{0, 1}, {0, 1, 1}, {0, 0, 1, 1}, {0, 1, 0, 2, 2}})
    run_hosts(placement, sums);
}

TEST(Compressed, ManyConnectionsAndEncryption) {
  run_hosts({0, 1}, sums, {.n_lanes = 3});
  run_hosts({0, 1}, sums, {.n_lanes = 2, .encrypt = true});
}

TEST(Compressed, CodesThatDifferFailOnAllRanks) {
  std::latch usable(3);
  run_hosts({0, 1, 1}, [&](TestRank& self) {
    expect_usable(self);
    usable.arrive_and_wait();  // rank 2's news may be faster than rank 1's last data
    std::vector<float> v(300'000);
    const Status s = sum(self, v, self.rank == 2 ? Compression::kFp8 : Compression::kInt8, nullptr);
    ASSERT_EQ(s.code(), Code::kMismatch) << self.rank << ": " << s.message();
    for (const char* what : {"compression fp8", "compression int8"})
      ASSERT_NE(s.message().find(what), std::string::npos) << s.message();
  });
}

TEST(Compressed, WhatCannotBeIsRefused) {
  run_hosts({0, 1}, [](TestRank& self) {
    const auto refused = [&](ReduceOp op, DType dtype, bool deterministic, const char* algorithm) {
      std::vector<double> v(10);
      Request request = request_of(CallKind::kAllReduce, dtype, op, 10);
      request.call.sig.compression = Compression::kFp16;
      request.deterministic = deterministic;
      request.call.in = request.call.out = Buffer(v.data(), 10);
      return self.comm->prepare(&request, algorithm).code() == Code::kValue;
    };
    EXPECT_FALSE(refused(ReduceOp::kAvg, DType::kFloat32, false, "direct"));
    EXPECT_TRUE(refused(ReduceOp::kMax, DType::kFloat32, false, nullptr));
    EXPECT_TRUE(refused(ReduceOp::kSum, DType::kFloat64, false, nullptr));
    EXPECT_TRUE(refused(ReduceOp::kSum, DType::kBFloat16, false, nullptr));
    EXPECT_TRUE(refused(ReduceOp::kSum, DType::kFloat32, true, nullptr));
    EXPECT_TRUE(refused(ReduceOp::kSum, DType::kFloat32, false, "ring"));
    expect_usable(self);
  });
}

TEST(Signature, SaysTheCompressionAndKeepsTheRest) {
  Signature s;
  s.kind = CallKind::kReduceScatter;
  s.root = (1 << 20) - 1;
  s.compression = Compression::kInt8;
  s.deterministic = true;
  const Signature t = Signature::unpack(s.packed(), 5, 6);
  EXPECT_EQ(t.compression, Compression::kInt8);
  EXPECT_EQ(t.root, s.root);
  EXPECT_TRUE(t.deterministic);
  EXPECT_NE(t.text().find("compression int8"), std::string::npos) << t.text();
  Signature plain = s;
  plain.compression = Compression::kNone;
  EXPECT_NE(plain.hash(), s.hash());
  EXPECT_EQ(plain.text().find("compression"), std::string::npos);
}

}  // namespace
}  // namespace pycomm
