// Opening NCCL: the order in which it is looked for, and what is said when there is none that serves. Opening
// is for good, so each case has a process of its own (a death test that exits with 0 and prints what came).
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "transport/cuda/nccl.h"

namespace pycomm::nccl {
namespace {

[[noreturn]] void open_and_tell() {
  const Library* library = nullptr;
  const Status s = open(&library);
  std::fprintf(stderr, "%s\n",
               s.ok() ? format("opened %s, %s, %s", library->path.c_str(), library->how.c_str(),
                               version_text(library->version).c_str())
                            .c_str()
                      : s.message().c_str());
  std::_Exit(0);
}

// A regular expression that matches the text.
std::string literally(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (std::string("\\^$.|?*+()[]{}").find(c) != std::string::npos) out += '\\';
    out += c;
  }
  return out;
}

class NcclLibraryDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

#define EXPECT_TELLS(statement, text) \
  EXPECT_EXIT(                        \
      {                               \
        statement;                    \
        open_and_tell();              \
      },                              \
      testing::ExitedWithCode(0), literally(text))

TEST_F(NcclLibraryDeathTest, TheVariableNamesIt) { EXPECT_TELLS(, "libnccl.so.2, PYCOMM_NCCL_LIB, 2.32.3"); }

TEST_F(NcclLibraryDeathTest, OneThatIsLoadedComesFirst) {
  EXPECT_TELLS(
      {
        if (dlopen(LOOPBACK_NCCL, RTLD_NOW | RTLD_LOCAL) == nullptr) std::abort();
        setenv("PYCOMM_NCCL_LIB", "/nowhere/libnccl.so.2", 1);
      },
      "libnccl.so.2, already loaded, 2.32.3");
}

TEST_F(NcclLibraryDeathTest, FoldersAreLookedAt) {
  const std::string file = LOOPBACK_NCCL;
  EXPECT_TELLS(
      {
        unsetenv("PYCOMM_NCCL_LIB");
        set_search_folders({"/nowhere", file.substr(0, file.rfind('/'))});
      },
      "libnccl.so.2, site-packages, 2.32.3");
}

TEST_F(NcclLibraryDeathTest, AMissingOneSaysWhereItWasLookedForAndWhatToDo) {
  const auto missing = [] {
    unsetenv("PYCOMM_NCCL_LIB");
    set_search_folders({"/nowhere/nvidia/nccl/lib"});
  };
  EXPECT_TELLS(
      missing(),
      "NCCL was not found (looked at: loaded libraries, /nowhere/nvidia/nccl/lib/libnccl.so.2, the dynamic "
      "linker's libnccl.so.2): install NCCL 2.18.0 or newer with pip install 'pycomm-collectives[cu13]'");
}

TEST_F(NcclLibraryDeathTest, AVariableThatNamesNothingIsAnError) {
  EXPECT_TELLS(setenv("PYCOMM_NCCL_LIB", "/nowhere/libnccl.so.2", 1),
               "PYCOMM_NCCL_LIB is '/nowhere/libnccl.so.2', which cannot be opened (");
}

TEST_F(NcclLibraryDeathTest, AnOldOneIsRefused) {
  EXPECT_TELLS(setenv("LOOPBACK_NCCL_VERSION", "21602", 1),
               "is version 2.16.2, and pycomm needs 2.18.0 or newer: install NCCL");
}

TEST_F(NcclLibraryDeathTest, TheOldestAndTheNewestServe) {
  EXPECT_TELLS(setenv("LOOPBACK_NCCL_VERSION", "21800", 1), "PYCOMM_NCCL_LIB, 2.18.0");
  EXPECT_TELLS(setenv("LOOPBACK_NCCL_VERSION", "23205", 1), "PYCOMM_NCCL_LIB, 2.32.5");
}

TEST_F(NcclLibraryDeathTest, ALibraryOfSomethingElseIsRefused) {
  EXPECT_TELLS(setenv("PYCOMM_NCCL_LIB", "libm.so.6", 1), "has no ncclGetVersion, so it is not NCCL");
}

TEST_F(NcclLibraryDeathTest, MissingFunctionsAreNamed) {
  EXPECT_TELLS(setenv("PYCOMM_NCCL_LIB", NCCL_WITH_A_VERSION_ONLY, 1),
               "version 2.19.3, lacks ncclGetUniqueId ncclGetErrorString");
}

TEST_F(NcclLibraryDeathTest, AFailureIsNotRemembered) {
  EXPECT_TELLS(
      {
        const Library* library = nullptr;
        setenv("LOOPBACK_NCCL_VERSION", "21602", 1);
        if (open(&library).ok()) std::abort();
        unsetenv("LOOPBACK_NCCL_VERSION");
      },
      ", 2.32.3");
}

TEST(NcclLibrary, VersionsAreWrittenAsNvidiaWritesThem) {
  EXPECT_EQ(version_text(21805), "2.18.5");
  EXPECT_EQ(version_text(23203), "2.32.3");
}

}  // namespace
}  // namespace pycomm::nccl
