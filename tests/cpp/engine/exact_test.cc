// Deterministic reductions over hosts: for every placement of 2 to 5 ranks on 2 or 3 hosts the bits of T,
// which a rank computes here from all inputs in one go (kernels/reduce.h; its order is proved in
// tests/cpp/kernels).
#include <algorithm>
#include <cmath>

#include "engine/run_hosts.h"

namespace pycomm {
namespace {

// Over many magnitudes, so that every order of summation rounds differently.
std::vector<float> inputs_of(int rank, uint64_t n) {
  auto state = static_cast<uint32_t>(rank) * 2654435761u + 17;
  std::vector<float> v(n);
  for (float& x : v) {
    state = state * 1664525u + 1013904223u;
    const float mantissa = static_cast<float>(static_cast<int32_t>(state) >> 8) / 65536.0f;
    x = std::ldexp(mantissa, static_cast<int>(state % 9) - 4);
  }
  return v;
}

std::vector<float> tree_of(const std::vector<std::vector<float>>& inputs, ReduceOp op) {
  std::vector<float> out(inputs[0].size());
  std::vector<const void*> srcs;
  for (const std::vector<float>& v : inputs) srcs.push_back(v.data());
  void* dst = out.data();
  const int n = static_cast<int>(inputs.size());
  find_reduce(DType::kFloat32, op)(&dst, 1, srcs.data(), n, out.size(), n);
  return out;
}

Status call(TestRank& self, CallKind kind, ReduceOp op, const std::vector<float>& in, std::vector<float>& out,
            int root, const std::vector<uint64_t>& counts, const char* algorithm = nullptr) {
  Request request = request_of(kind, DType::kFloat32, op, in.size(), root);
  request.counts = counts;
  request.deterministic = true;
  request.call.in = Buffer(const_cast<float*>(in.data()), in.size());
  request.call.out = Buffer(out.data(), out.size());
  PYCOMM_RETURN_IF_ERROR(self.comm->prepare(&request, algorithm));
  return self.comm->run(request, nullptr);
}

// The same bits: a NaN would not equal itself.
bool same(const std::vector<float>& a, const float* b) {
  return a.empty() || std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;  // memcmp takes no nullptr
}

void check_reductions(TestRank& self, uint64_t count, ReduceOp op) {
  std::vector<std::vector<float>> inputs;
  for (int q = 0; q < self.size; q++) inputs.push_back(inputs_of(q, count));
  const std::vector<float> want = tree_of(inputs, op);
  std::vector<float> mine = inputs[static_cast<size_t>(self.rank)];
  std::vector<float> out(count);
  PYCOMM_ASSERT_OK(call(self, CallKind::kAllReduce, op, mine, out, 0, {}));
  ASSERT_TRUE(same(out, want.data())) << "all_reduce, rank " << self.rank << ", count " << count;
  // Uneven, some empty.
  std::vector<uint64_t> counts, starts(1, 0);
  uint64_t left = count;
  for (int q = 0; q < self.size; q++) {
    counts.push_back(q + 1 == self.size ? left : left / static_cast<uint64_t>(2 + q % 2));
    left -= counts.back();
    starts.push_back(starts.back() + counts.back());
  }
  std::vector<float> part(counts[static_cast<size_t>(self.rank)]);
  PYCOMM_ASSERT_OK(call(self, CallKind::kReduceScatter, op, mine, part, 0, counts));
  ASSERT_TRUE(same(part, want.data() + starts[static_cast<size_t>(self.rank)]))
      << "reduce_scatter, rank " << self.rank << ", count " << count;
  for (int root = 0; root < self.size; root++) {
    std::vector<float> whole(root == self.rank ? count : 0);
    PYCOMM_ASSERT_OK(call(self, CallKind::kReduce, op, mine, whole, root, {}));
    ASSERT_TRUE(same(whole, want.data())) << "reduce to " << root << ", count " << count;
  }
  ASSERT_EQ(mine, inputs[static_cast<size_t>(self.rank)]) << "an input was written";
  // In place.
  Request request = request_of(CallKind::kAllReduce, DType::kFloat32, op, count);
  request.deterministic = true;
  request.call.in = request.call.out = Buffer(mine.data(), count);
  PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
  PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
  ASSERT_TRUE(same(mine, want.data())) << "in place, rank " << self.rank << ", count " << count;
}

void extend(std::vector<int>& so_far, int n, std::vector<std::vector<int>>* out) {
  const int used = so_far.empty() ? 0 : *std::max_element(so_far.begin(), so_far.end()) + 1;
  if (static_cast<int>(so_far.size()) == n) {
    if (used > 1) out->push_back(so_far);
    return;
  }
  for (int h = 0; h < std::min(used + 1, 3); h++) {
    so_far.push_back(h);
    extend(so_far, n, out);
    so_far.pop_back();
  }
}

class EveryPlacement : public testing::TestWithParam<int> {};

TEST_P(EveryPlacement, HasTheBitsOfOneHost) {
  std::vector<std::vector<int>> placements;
  std::vector<int> so_far;
  extend(so_far, GetParam(), &placements);
  for (const std::vector<int>& placement : placements) {
    std::string text;
    for (const int h : placement) text += format("%d", h);
    SCOPED_TRACE("hosts " + text);
    run_hosts(placement, [](TestRank& self) {
      for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{97}, uint64_t{20'011}})
        check_reductions(self, count, count == 97 ? ReduceOp::kAvg : ReduceOp::kSum);
    });
    if (testing::Test::HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryPlacement, testing::Values(2, 3, 4, 5));

// Several tiles (Hierarchy::kTileBytes) and slices; several exchanges where a host has more ranks than
// owners.
TEST(Exact, LargeVectors) {
  for (const std::vector<int>& placement :
       std::vector<std::vector<int>>{{0, 1, 0, 1}, {0, 1, 1, 1, 0, 1}, {0, 1, 2, 1}}) {
    run_hosts(placement, [](TestRank& self) { check_reductions(self, 2'300'003, ReduceOp::kSum); });
  }
}

TEST(Exact, AnAlgorithmThatCannotIsRefused) {
  run_hosts({0, 1, 0}, [](TestRank& self) {
    const std::vector<float> in(10, 1.0f);
    std::vector<float> out(10);
    PYCOMM_ASSERT_OK(call(self, CallKind::kAllReduce, ReduceOp::kSum, in, out, 0, {}, "direct"));
    for (const float x : out) ASSERT_EQ(x, 3.0f);
    const Status s = call(self, CallKind::kAllReduce, ReduceOp::kSum, in, out, 0, {}, "halving_doubling");
    ASSERT_EQ(s.code(), Code::kValue);
    ASSERT_NE(s.message().find("host 0: ranks 0 2, host 1: ranks 1"), std::string::npos) << s.message();
  });
}

}  // namespace
}  // namespace pycomm
