// What the schedule tests share: the catalog as gtest parameters, and the schedules of all ranks at once.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "schedule/catalog.h"

namespace pycomm {

inline bool has_root(Collective c) {
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

inline bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduceScatter || c == Collective::kReduce;
}

inline std::string name_of(const Algorithm& a) {
  return std::string(collective_name(a.collective)) + "_" + a.name;
}

inline std::vector<const Algorithm*> every_algorithm() {
  std::vector<const Algorithm*> list;
  for (const Algorithm& a : catalog()) list.push_back(&a);
  return list;
}

// Tests are named by algorithm, not by a number that moves when the catalog grows.
inline std::string test_name(const testing::TestParamInfo<const Algorithm*>& info) {
  return name_of(*info.param);
}

inline std::vector<Schedule> build_all(const Algorithm& a, int n, int root, int n_chunks) {
  std::vector<Schedule> all(static_cast<size_t>(n));
  for (int r = 0; r < n; r++) {
    const Status s = build_schedule(a, r, n, root, n_chunks, &all[static_cast<size_t>(r)]);
    EXPECT_TRUE(s.ok()) << s.message();
  }
  return all;
}

inline const Algorithm& algorithm(Collective c, const char* name) {
  const Algorithm* a = find_algorithm(c, name);
  if (a == nullptr) throw std::runtime_error(std::string("no algorithm ") + name);
  return *a;
}

}  // namespace pycomm
