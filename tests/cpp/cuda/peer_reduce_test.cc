// all_reduce and reduce_scatter over peer memory, against the CPU's kernels bit for bit: every dtype and
// operation, 1 to 8 ranks, one-shot and two-shot, staged, in place and in symmetric memory, pulled and
// pushed.
#include <numeric>

#include "cuda/peer_values.h"

namespace pycomm {
namespace {

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

// How one call is made.
struct How {
  PeerWay way = PeerWay::kAuto;
  size_t off_in = 0, off_out = 0;
  bool symmetric_in = false, symmetric_out = false;
  bool in_place = false;
};

uint64_t next_seed() {
  static std::atomic<uint64_t> seed{1};
  return seed++;
}

void check_all_reduce(PeerRank& self, const Case& c, size_t n_elems, const How& how, uint64_t seed) {
  const size_t n_bytes = n_elems * dtype_size(c.dtype);
  const double scalar = c.op == ReduceOp::kAvg ? self.size : 1.5;
  std::vector<Bytes> inputs;
  for (int r = 0; r < self.size; ++r) inputs.push_back(input_of(r, n_bytes, seed));
  const Bytes& mine = inputs[static_cast<size_t>(self.rank)];
  const Tensor in(self, mine, how.off_in, how.symmetric_in);
  const Tensor other(self, n_bytes, how.off_out, how.symmetric_out);
  const Tensor& out = how.in_place ? in : other;
  ASSERT_OK(self.comm->all_reduce(in.data(), out.data(), n_elems, c.dtype, c.op, scalar, how.way, self.on()));
  ASSERT_OK(self.pass());
  ASSERT_TRUE(same(c.dtype, out.get(), reduced(c, inputs, scalar)))
      << "rank " << self.rank << " of " << self.size << ", " << n_elems << " elements, way "
      << static_cast<int>(how.way) << ", in place " << how.in_place << ", symmetric " << how.symmetric_in
      << how.symmetric_out << ", misaligned by " << how.off_in << " and " << how.off_out;
  if (!how.in_place) {
    ASSERT_EQ(in.get(), mine) << "the input was written";
  }
}

void check_reduce_scatter(PeerRank& self, const Case& c, size_t n_elems, const How& how, uint64_t seed) {
  const size_t n_bytes = n_elems * dtype_size(c.dtype), n_all = n_bytes * static_cast<size_t>(self.size);
  const double scalar = c.op == ReduceOp::kAvg ? self.size : 1.5;
  std::vector<Bytes> inputs;
  for (int r = 0; r < self.size; ++r) inputs.push_back(input_of(r, n_all, seed));
  const Tensor in(self, inputs[static_cast<size_t>(self.rank)], how.off_in, how.symmetric_in);
  const Tensor other(self, n_bytes, how.off_out, how.symmetric_out);
  const size_t my_part = static_cast<size_t>(self.rank) * n_bytes;
  char* const out = how.in_place ? in.data() + my_part : other.data();
  ASSERT_OK(self.comm->reduce_scatter(in.data(), out, n_elems, c.dtype, c.op, scalar, self.on()));
  ASSERT_OK(self.pass());
  const auto part = [&](const Bytes& all) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(my_part);
    return Bytes(begin, begin + static_cast<std::ptrdiff_t>(n_bytes));
  };
  const Bytes got = how.in_place ? part(in.get()) : other.get();
  ASSERT_TRUE(same(c.dtype, got, part(reduced(c, inputs, scalar))))
      << "rank " << self.rank << " of " << self.size << ", " << n_elems << " elements";
}

class PeerReduce : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cuda, PeerReduce, testing::ValuesIn(defined_cases()), name_of);

TEST_P(PeerReduce, EveryNumberOfRanksHasTheSameBitsAsTheCpu) {
  const Case c = GetParam();
  for (int n = 1; n <= cuda::kMaxPeers; ++n) {
    const uint64_t seed = next_seed();
    run_peers(n, small_options(), [&](PeerRank& self) {
      const size_t size = 411 - 16 * static_cast<size_t>(n);
      ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, c, size, {PeerWay::kOneShot}, seed));
      ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, c, size, {PeerWay::kTwoShot}, seed));
      ASSERT_NO_FATAL_FAILURE(check_reduce_scatter(self, c, 67, {}, seed));
    });
    if (testing::Test::HasFailure()) break;
  }
}

TEST_P(PeerReduce, Lengths) {
  const Case c = GetParam();
  const size_t pack = 16 / dtype_size(c.dtype);
  const uint64_t seed = next_seed();
  run_peers(3, small_options(), [&](PeerRank& self) {
    for (size_t n : {size_t{0}, size_t{1}, size_t{2}, pack, pack + 1, 3 * pack - (pack > 1), 31 * pack + 1,
                     32 * pack, 96 * pack, 97 * pack + 3}) {
      ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, c, n, {PeerWay::kOneShot}, seed + n));
      ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, c, n, {PeerWay::kTwoShot}, seed + n));
      ASSERT_NO_FATAL_FAILURE(check_reduce_scatter(self, c, n, {}, seed + n));
    }
  });
}

TEST_P(PeerReduce, WhereTensorsLie) {
  const Case c = GetParam();
  const size_t e = dtype_size(c.dtype);
  for (const bool push : {false, true}) {
    PeerOptions options = small_options();
    options.push = push;
    const uint64_t seed = next_seed();
    run_peers(3, options, [&](PeerRank& self) {
      const bool odd = self.rank == 1;  // ranks may differ
      for (const How& how :
           {How{PeerWay::kAuto, 0, 0, true, true, false}, How{PeerWay::kAuto, 0, 0, true, true, true},
            How{PeerWay::kAuto, 0, 0, !odd, odd, false}, How{PeerWay::kAuto, e, 16 - e, odd, true, false},
            How{PeerWay::kAuto, e % 16, 0, false, false, true},
            How{PeerWay::kAuto, 1, 3, false, false, false}}) {
        for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
          How mine = how;
          mine.way = way;
          ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, c, 155, mine, seed));
        }
        ASSERT_NO_FATAL_FAILURE(check_reduce_scatter(self, c, 48, how, seed));
        ASSERT_NO_FATAL_FAILURE(check_reduce_scatter(self, c, 37, how, seed));
      }
    });
  }
}

constexpr Case kSum{DType::kFloat32, ReduceOp::kSum};
constexpr Case kHalfSum{DType::kBFloat16, ReduceOp::kAvg};

TEST(PeerTiles, MessagesLargerThanTheStaging) {
  for (const bool push : {false, true}) {
    PeerOptions options = small_options();
    options.half_bytes = 4096;
    options.push = push;
    for (const int n : {2, 5}) {
      run_peers(n, options, [&](PeerRank& self) {
        for (const Case& c : {kSum, kHalfSum}) {
          for (const How& how : {How{}, How{PeerWay::kAuto, 0, 0, true, true, true},
                                 How{PeerWay::kAuto, 4, 8, false, false, true}}) {
            for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
              How mine = how;
              mine.way = way;
              ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, c, 5003, mine, 77));
            }
            ASSERT_NO_FATAL_FAILURE(check_reduce_scatter(self, c, 1501, how, 78));
          }
        }
      });
    }
  }
}

// Calls follow each other without the host between them, in sizes that use different numbers of blocks.
TEST(PeerOrder, AThousandCallsOneAfterAnother) {
  for (const bool push : {false, true}) {
    PeerOptions options = small_options();
    options.push = push;
    run_peers(3, options, [&](PeerRank& self) {
      constexpr size_t kMost = 700;
      std::vector<float> values(kMost);
      std::iota(values.begin(), values.end(), 1.0f + static_cast<float>(self.rank));
      Bytes bytes(kMost * 4);
      std::memcpy(bytes.data(), values.data(), bytes.size());
      const Tensor in(self, bytes, 0, false), out(self, kMost * 4, 0, self.rank == 2);
      for (int call = 0; call < 1000; ++call) {
        const size_t n = static_cast<size_t>(call) * 37 % kMost + 1;
        const PeerWay way = call % 3 == 0 ? PeerWay::kTwoShot : PeerWay::kOneShot;
        ASSERT_OK(self.comm->all_reduce(call % 2 ? in.data() : out.data(), out.data(), call == 0 ? kMost : n,
                                        DType::kFloat32, ReduceOp::kMax, 1,
                                        call % 2 ? way : PeerWay::kTwoShot, self.on()));
        if (call % 100 == 99) ASSERT_OK(self.pass());
      }
      ASSERT_OK(self.comm->all_reduce(in.data(), out.data(), kMost, DType::kFloat32, ReduceOp::kSum, 1,
                                      PeerWay::kTwoShot, self.on()));
      ASSERT_OK(self.pass());
      const Bytes got = out.get();
      for (size_t i = 0; i < kMost; ++i) {
        float v;
        std::memcpy(&v, &got[i * 4], 4);
        ASSERT_EQ(v, 3.0f * static_cast<float>(i) + 6.0f);
      }
    });
  }
}

// Against float64: within the bound of pairwise summation (docs/numerics.md).
TEST(PeerOrder, TheSumIsWithinTheBoundOfPairwiseSummation) {
  constexpr size_t kCount = 3001;
  run_peers(7, small_options(), [&](PeerRank& self) {
    std::vector<std::vector<float>> inputs(7, std::vector<float>(kCount));
    for (size_t r = 0; r < 7; ++r) {
      std::mt19937 rng(static_cast<unsigned>(r));
      std::uniform_real_distribution<float> uniform(-1, 1);
      for (float& v : inputs[r]) v = uniform(rng);
    }
    Bytes bytes(kCount * 4);
    std::memcpy(bytes.data(), inputs[static_cast<size_t>(self.rank)].data(), bytes.size());
    const Tensor data(self, bytes, 0, true);
    ASSERT_OK(self.comm->all_reduce(data.data(), data.data(), kCount, DType::kFloat32, ReduceOp::kSum, 1,
                                    PeerWay::kAuto, self.on()));
    ASSERT_OK(self.pass());
    const Bytes got = data.get();
    for (size_t i = 0; i < kCount; ++i) {
      double sum = 0, magnitudes = 0;
      for (const auto& in : inputs) sum += in[i], magnitudes += std::abs(static_cast<double>(in[i]));
      float v;
      std::memcpy(&v, &got[i * 4], 4);
      ASSERT_NEAR(v, sum, 3 * std::ldexp(magnitudes, -24));
    }
  });
}

TEST(PeerRefused, WhatTheHostCanSee) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    const Tensor t(self, 256, 0, false);
    Status s = self.comm->all_reduce(t.data(), t.data(), 8, DType::kInt32, ReduceOp::kAvg, 2, PeerWay::kAuto,
                                     self.on());
    EXPECT_EQ(s.code(), Code::kValue);
    EXPECT_EQ(s.message(), "all_reduce: avg is not defined for int32");
    s = self.comm->all_reduce(t.data(), t.data() + 8, 8, DType::kFloat32, ReduceOp::kSum, 1, PeerWay::kAuto,
                              self.on());
    EXPECT_EQ(s.message(),
              "all_reduce: the output overlaps the input, and is not its place in it: give separate tensors, "
              "or the same one");
    s = self.comm->broadcast(t.data(), 8, 2, PeerWay::kAuto, self.on());
    EXPECT_EQ(s.message(), "broadcast: root is 2; expected 0 to 1");
    ASSERT_OK(self.pass());
    ASSERT_NO_FATAL_FAILURE(check_all_reduce(self, kSum, 10, {}, 3)) << "still usable";
  });
}

}  // namespace
}  // namespace pycomm
