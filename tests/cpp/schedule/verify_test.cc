// Every algorithm of the catalog, for every number of ranks, root and binding: proved.
#include "schedule/verify.h"

#include <gtest/gtest.h>

#include <set>

namespace pycomm {
namespace {

bool has_root(Collective c) {
  switch (c) {
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kAllGather: return false;
    case Collective::kBroadcast:
    case Collective::kReduce:
    case Collective::kGather:
    case Collective::kScatter: return true;
  }
  return false;
}

std::string test_name(const testing::TestParamInfo<const Algorithm*>& info) {
  return std::string(collective_name(info.param->collective)) + "_" + info.param->name;
}

std::vector<const Algorithm*> all() {
  std::vector<const Algorithm*> list;
  for (const Algorithm& a : catalog()) list.push_back(&a);
  return list;
}

class EveryAlgorithm : public testing::TestWithParam<const Algorithm*> {};

TEST_P(EveryAlgorithm, IsProvedForEveryNumberOfRanks) {
  const Algorithm& a = *GetParam();
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 100}) {
    std::set<int> roots = {0};
    if (has_root(a.collective)) roots.insert({n - 1, n / 2, n / 3});
    if (has_root(a.collective) && n <= 17) {
      for (int root = 0; root < n; root++) roots.insert(root);
    }
    for (int root : roots) {
      for (int n_chunks : {0, 1, 2, 5}) {
        for (bool in_place : {false, true}) {
          if (in_place && !a.in_place) continue;
          const Status s = verify(a, n, root, n_chunks, in_place, nullptr);
          ASSERT_TRUE(s.ok()) << s.message() << " (n_chunks " << n_chunks << ")";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, EveryAlgorithm, testing::ValuesIn(all()), test_name);

}  // namespace
}  // namespace pycomm
