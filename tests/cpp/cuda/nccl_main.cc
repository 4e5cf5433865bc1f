// main() of the tests over NCCL: 64 devices, and the loopback NCCL as the library that is opened. A
// process that was started as a rank (nccl_process_test.cc) does that instead of tests.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace pycomm {
int run_as_rank(const char* what);  // the exit status
}

// Before main(): the shim reads it once.
static const int devices_are_set = setenv("CUDA_ON_CPU_DEVICES", "64", 1);

int main(int argc, char** argv) {
  (void)devices_are_set;
  setenv("PYCOMM_NCCL_LIB", LOOPBACK_NCCL, 0);
  if (const char* what = std::getenv("NCCL_TEST_RANK")) {
    const int status = pycomm::run_as_rank(what);
    std::fflush(nullptr);
    _exit(status);  // a worker of the emulated device that has just begun or ended is no leak
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
