// Every algorithm's table for 4 and 5 ranks, against tests/golden/schedules: a change there wants a reader.
//
// After a change that is meant: PYCOMM_UPDATE_GOLDEN=1 ctest -R Golden, then read the diff. Collectives with
// a root have root 1, pipelined algorithms a depth of 2.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "schedule/catalog_params.h"
#include "schedule/print.h"

namespace pycomm {
namespace {

class Golden : public testing::TestWithParam<const Algorithm*> {};

std::string tables(const Algorithm& a) {
  std::string text;
  const int root = has_root(a.collective) ? 1 : 0;
  for (int n : {4, 5}) {
    for (const Schedule& s : build_all(a, n, root, 2)) text += schedule_text(a, s);
  }
  return text;
}

TEST_P(Golden, Table) {
  const std::string path =
      std::string(PYCOMM_SOURCE_DIR) + "/tests/golden/schedules/" + name_of(*GetParam()) + ".txt";
  const std::string got = tables(*GetParam());
  const char* update = std::getenv("PYCOMM_UPDATE_GOLDEN");
  if (update != nullptr && std::string(update) == "1") {
    std::ofstream(path) << got;
    return;
  }
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << path << " cannot be read; PYCOMM_UPDATE_GOLDEN=1 writes it";
  std::stringstream expected;
  expected << file.rdbuf();
  EXPECT_EQ(got, expected.str()) << "PYCOMM_UPDATE_GOLDEN=1 rewrites " << path << " when the change is meant";
}

INSTANTIATE_TEST_SUITE_P(Catalog, Golden, testing::ValuesIn(every_algorithm()), test_name);

}  // namespace
}  // namespace pycomm
