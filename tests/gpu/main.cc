// Runs the tests of tests/cpp/cuda on GPUs.
//
// Ranks that are threads need a GPU each, up to eight of them: kernels of ranks that share a device wait for
// each other, and whatever makes one of them wait for the device (cudaMalloc may) hangs all. Where there are
// fewer those tests are left out, which is said; ranks that are processes (PeerProcesses) share a GPU, whose
// time is cut in slices between them. Modules are loaded at once (CUDA_MODULE_LOADING), since loading at a
// kernel's first launch waits for the device too. Without a GPU nothing is run, which is said as well:
// "SKIPPED: no GPU", and 77, which ctest calls skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace {
constexpr int kMostRanks = 8;
constexpr int kSkipped = 77;
}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  int n_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&n_devices);
  if (error != cudaSuccess || n_devices == 0) {
    std::printf("SKIPPED: no GPU: %s\n",
                error == cudaSuccess ? "the driver has no device" : cudaGetErrorString(error));
    return kSkipped;
  }
  if (testing::GTEST_FLAG(filter) == "*") {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) == cudaSuccess) {
      std::printf("%d of %s\n", n_devices, properties.name);
    }
    if (n_devices < kMostRanks) {
      testing::GTEST_FLAG(filter) =
          "-*PeerReduce*:*PeerGraph*:*PeerCopy*:PeerTiles*:PeerOrder*:PeerRefused*:PeerFaults*:"
          "PeerMemoryTest*:PeerRetired*";
      std::printf("LEFT OUT: ranks as threads, which need %d GPUs; ranks as processes share what there is\n",
                  kMostRanks);
    }
    std::fflush(stdout);
  }
  return RUN_ALL_TESTS();
}
