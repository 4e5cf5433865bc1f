// Every algorithm of every collective through the Communicator, checked element by element against closed
// forms.
//
// The matrix: ranks 1, 2, 3, 4, 5, 8; counts 0, 1, n-1, n+1, a prime, a large one; in and out of place;
// tensors ordinary, in the arena, and mixed over ranks; tiles so small that the pipeline runs on little data;
// dtypes. Element i of rank r's input is a small integer known to the test, so sums are exact in any order.
#include <gtest/gtest.h>

#include <set>

#include "engine/run_ranks.h"
#include "schedule/catalog.h"

namespace pycomm {
namespace {

enum class Memory { kOrdinary, kArena, kMixed };

struct Case {
  uint64_t count;
  bool in_place;
  Memory memory;
  size_t tile_bytes;  // 0: the communicator's choice
  ReduceOp op = ReduceOp::kSum;
};

bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter;
}
bool parted(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kAllGather || c == Collective::kGather ||
         c == Collective::kScatter;
}

// Shares of `count` elements, uneven on purpose; some may be empty.
std::vector<uint64_t> shares(uint64_t count, int n) {
  std::vector<uint64_t> list;
  uint64_t left = count;
  for (int q = 0; q < n; q++) {
    const uint64_t here = q == n - 1 ? left : std::min(left, count / static_cast<uint64_t>(n) + (q % 3) * 2);
    list.push_back(here);
    left -= here;
  }
  return list;
}

// What rank q gives as element i of the vector of a reduction: at most 7 * 8, and sums stay below 256.
uint64_t summand(int q, uint64_t i) { return static_cast<uint64_t>(q + 1) * (i % 7 + 1); }
// What its owner gives as element i where data only move.
uint64_t moved(int owner, uint64_t i) { return 1 + (static_cast<uint64_t>(owner) * 31 + i) % 251; }

template <class T>
void run_case(TestRank& self, const Algorithm& a, const Case& c) {
  const int n = self.size, r = self.rank;
  const int root = static_cast<int>((c.count + 1) % static_cast<uint64_t>(n));
  const bool rooted = a.collective == Collective::kBroadcast || a.collective == Collective::kReduce ||
                      a.collective == Collective::kGather || a.collective == Collective::kScatter;
  const std::vector<uint64_t> counts = shares(c.count, n);
  uint64_t before = 0;
  for (int q = 0; q < r; q++) before += counts[static_cast<size_t>(q)];
  const uint64_t mine = counts[static_cast<size_t>(r)];

  // The stretch of the vector that this rank has as input and as output.
  struct Stretch {
    bool has;
    uint64_t from, len;
  };
  const Stretch whole{true, 0, c.count}, part{true, before, mine}, none{false, 0, 0};
  Stretch in = whole, out = whole;
  switch (a.collective) {
    case Collective::kAllReduce: break;
    case Collective::kReduceScatter: out = part; break;
    case Collective::kAllGather: in = part; break;
    case Collective::kBroadcast: in = r == root ? whole : none; break;
    case Collective::kReduce: out = r == root ? whole : none; break;
    case Collective::kGather:
      in = part;
      out = r == root ? whole : none;
      break;
    case Collective::kScatter:
      in = r == root ? whole : none;
      out = part;
      break;
  }
  const bool both = in.has && out.has;
  const auto home = [&](int salt) {
    const bool arena = c.memory == Memory::kArena || (c.memory == Memory::kMixed && (r + salt) % 2 == 0);
    return arena ? &self : nullptr;
  };
  const bool shared = c.in_place && both;
  const Guarded<T> big(shared ? c.count : 0, home(0));
  const Guarded<T> own_in(shared ? 0 : in.len, home(0)), own_out(shared ? 0 : out.len, home(1));
  T* const in_data = shared ? big.data() + in.from : own_in.data();
  T* const out_data = shared ? big.data() + out.from : own_out.data();
  const auto given = [&](uint64_t i) {
    if (reduces(a.collective)) return summand(r, i);
    return moved(r, i);
  };
  for (uint64_t i = 0; i < in.len; i++) in_data[i] = T(given(in.from + i));

  Request request =
      request_of(static_cast<CallKind>(a.collective), dtype_of<T>(), c.op, c.count, rooted ? root : 0);
  if (parted(a.collective)) request.counts = counts;
  if (in.has) request.call.in = Buffer(in_data, in.len);
  if (out.has) request.call.out = Buffer(out_data, out.len);
  PYCOMM_ASSERT_OK(self.comm->prepare(&request, a.name));
  if (c.tile_bytes > 0) request.call.tile_bytes = c.tile_bytes;
  PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));

  const auto un = static_cast<uint64_t>(n);
  const auto owner = [&](uint64_t i) {
    if (a.collective == Collective::kBroadcast || a.collective == Collective::kScatter) return root;
    int q = 0;
    for (uint64_t at = 0; at + counts[static_cast<size_t>(q)] <= i; q++) at += counts[static_cast<size_t>(q)];
    return q;
  };
  const auto expected = [&](uint64_t i) -> T {
    if (!reduces(a.collective)) return T(moved(owner(i), i));
    if (c.op == ReduceOp::kMax) return T(summand(n - 1, i));
    const uint64_t sum = un * (un + 1) / 2 * (i % 7 + 1);
    if constexpr (std::is_same_v<T, float>) {
      if (c.op == ReduceOp::kAvg) return static_cast<float>(sum) / static_cast<float>(n);
    }
    return T(sum);
  };
  for (uint64_t i = 0; i < out.len; i++) {
    ASSERT_EQ(out_data[i], expected(out.from + i)) << "rank " << r << " element " << out.from + i;
  }
  if (shared) return;
  for (uint64_t i = 0; i < in.len; i++) {
    ASSERT_EQ(in_data[i], T(given(in.from + i))) << "the input of rank " << r << " was changed at " << i;
  }
}

std::string describe(const Case& c) {
  return format("count %llu, in place %d, memory %d, tile %zu, op %s",
                static_cast<unsigned long long>(c.count), c.in_place, static_cast<int>(c.memory),
                c.tile_bytes, reduce_op_name(c.op));
}

template <class T>
void run_cases(int n, const Algorithm& a, const std::vector<Case>& cases) {
  run_ranks(n, [&](TestRank& self) {
    for (const Case& c : cases) {
      SCOPED_TRACE(describe(c));
      run_case<T>(self, a, c);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

class EveryAlgorithm : public testing::TestWithParam<std::tuple<const Algorithm*, int>> {
 protected:
  const Algorithm& algorithm() const { return *std::get<0>(GetParam()); }
  int n() const { return std::get<1>(GetParam()); }
};

TEST_P(EveryAlgorithm, OfEveryCount) {
  std::vector<Case> cases;
  const auto un = static_cast<uint64_t>(n());
  for (uint64_t count : std::set<uint64_t>{0, 1, un - 1, un + 1, 1009}) {
    for (bool in_place : {false, true}) {
      for (Memory memory : {Memory::kOrdinary, Memory::kArena, Memory::kMixed}) {
        cases.push_back({count, in_place, memory, 0});
        if (count == 1009) cases.push_back({count, in_place, memory, 1024});
      }
    }
  }
  run_cases<float>(n(), algorithm(), cases);
}

// Tens of tiles: staging, reducing and copying out overlap, slots are used again and again.
TEST_P(EveryAlgorithm, OfManyTiles) {
  std::vector<Case> cases;
  for (bool in_place : {false, true}) {
    for (Memory memory : {Memory::kOrdinary, Memory::kArena, Memory::kMixed})
      cases.push_back({70001, in_place, memory, 4096});
  }
  cases.push_back({5003, false, Memory::kOrdinary, 512});
  cases.push_back({5003, true, Memory::kOrdinary, 4096});
  run_cases<float>(n(), algorithm(), cases);
}

TEST_P(EveryAlgorithm, OfOtherTypesAndOperations) {
  std::vector<Case> cases;
  for (Memory memory : {Memory::kOrdinary, Memory::kArena}) {
    for (uint64_t count : {uint64_t{3}, uint64_t{2003}}) {
      for (bool in_place : {false, true}) cases.push_back({count, in_place, memory, 1024});
    }
  }
  run_cases<int64_t>(n(), algorithm(), cases);
  run_cases<BFloat16>(n(), algorithm(), cases);
  if (!reduces(algorithm().collective)) return;
  for (Case& c : cases) c.op = ReduceOp::kAvg;
  run_cases<float>(n(), algorithm(), cases);
  for (Case& c : cases) c.op = ReduceOp::kMax;
  run_cases<int64_t>(n(), algorithm(), cases);
}

std::vector<const Algorithm*> all() {
  std::vector<const Algorithm*> list;
  for (const Algorithm& a : catalog()) list.push_back(&a);
  return list;
}
INSTANTIATE_TEST_SUITE_P(Catalog, EveryAlgorithm,
                         testing::Combine(testing::ValuesIn(all()), testing::Values(1, 2, 3, 4, 5, 8)),
                         [](const auto& info) {
                           const Algorithm& a = *std::get<0>(info.param);
                           return std::string(collective_name(a.collective)) + "_" + a.name + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace pycomm
