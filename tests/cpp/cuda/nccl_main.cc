// main() of the tests over NCCL: eight devices, and the loopback NCCL as the library that is opened.
#include <gtest/gtest.h>

#include <cstdlib>

// Before main(): the shim reads it once.
static const int devices_are_set = setenv("CUDA_ON_CPU_DEVICES", "8", 1);

int main(int argc, char** argv) {
  (void)devices_are_set;
  setenv("PYCOMM_NCCL_LIB", LOOPBACK_NCCL, 0);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
