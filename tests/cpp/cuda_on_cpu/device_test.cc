// The shim's device side: indices, barriers, warp operations, atomics, spinning; and that a kernel which
// lacks what it needs is caught: by its result under some seed, by a deadlock report, or by ThreadSanitizer
// (planted_faults.cc).
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "cuda_on_cpu/device_buffer.h"
#include "cuda_runtime.h"

namespace {

using cuda_on_cpu::launch;
using cuda_on_cpu::settings;

class WithSeeds : public testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override { settings().seed = GetParam(); }
  void TearDown() override { settings().seed = 0; }
};
INSTANTIATE_TEST_SUITE_P(Device, WithSeeds, testing::Values(0, 1, 2, 3));

__global__ void count_visits(unsigned* visits) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  visits[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1;
}

TEST_P(WithSeeds, EveryThreadOfEveryBlockRunsOnce) {
  const dim3 grid(3, 2, 2), block(5, 3, 2);
  DeviceBuffer<unsigned> visits(12 * 30, 0);
  ASSERT_EQ(launch(false, count_visits, grid, block, 0, nullptr, visits.data()), cudaSuccess);
  EXPECT_EQ(visits.get(), std::vector<unsigned>(12 * 30, 1));
}

TEST(Device, RefusesImpossibleShapes) {
  DeviceBuffer<unsigned> visits(1, 0);
  EXPECT_EQ(launch(false, count_visits, dim3(1), dim3(1025), 0, nullptr, visits.data()),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(false, count_visits, dim3(0), dim3(32), 0, nullptr, visits.data()),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(
      launch(true, count_visits, dim3(cuda_on_cpu::kResidentBlocks + 1), dim3(1), 0, nullptr, visits.data()),
      cudaErrorCooperativeLaunchTooLarge);
  EXPECT_EQ(cudaGetLastError(), cudaErrorCooperativeLaunchTooLarge);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Each thread hands its value to the next through shared memory, n_rounds times.
__global__ void rotate(int* values, int n_rounds, bool first_barrier, bool second_barrier) {
  __shared__ int shared[256];
  int mine = values[threadIdx.x];
  for (int i = 0; i < n_rounds; ++i) {
    shared[threadIdx.x] = mine;
    if (first_barrier) __syncthreads();
    mine = shared[(threadIdx.x + 1) % blockDim.x];
    if (second_barrier) __syncthreads();
  }
  values[threadIdx.x] = mine;
}

std::vector<int> rotated(unsigned n_threads, int n_rounds, bool first_barrier, bool second_barrier) {
  std::vector<int> values(n_threads);
  std::iota(values.begin(), values.end(), 0);
  DeviceBuffer<int> buffer(values);
  EXPECT_EQ(launch(false, rotate, dim3(1), dim3(n_threads), 0, nullptr, buffer.data(), n_rounds,
                   first_barrier, second_barrier),
            cudaSuccess);
  return buffer.get();
}

TEST_P(WithSeeds, BarriersSeparateRounds) {
  for (unsigned n : {1u, 31u, 64u, 250u}) {
    const auto got = rotated(n, 7, true, true);
    for (unsigned i = 0; i < n; ++i) EXPECT_EQ(got[i], static_cast<int>((i + 7) % n));
  }
}

#if !defined(CUDA_ON_CPU_TSAN)  // it would report the planted races
TEST(Device, AMissingBarrierGivesAWrongResult) {
  EXPECT_NE(rotated(64, 3, false, true), rotated(64, 3, true, true));
  EXPECT_NE(rotated(64, 3, true, false), rotated(64, 3, true, true));
}
#endif

__global__ void half_of_the_block_synchronises() {
  if (threadIdx.x < 16) __syncthreads();
  __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void ended_threads_are_not_waited_for(int* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

TEST(DeviceDeathTest, DivergentBarriersAreReported) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        launch(false, half_of_the_block_synchronises, dim3(1), dim3(32), 0, nullptr);
        cudaDeviceSynchronize();
      },
      "deadlock in block \\(0, 0, 0\\): of 32 threads 0 have ended, 16 wait at __syncthreads, 16 in a warp");
}

TEST_P(WithSeeds, EndedThreadsAreNotWaitedFor) {
  DeviceBuffer<int> out(64, 0);
  ASSERT_EQ(launch(false, ended_threads_are_not_waited_for, dim3(1), dim3(64), 0, nullptr, out.data()),
            cudaSuccess);
  const auto got = out.get();
  EXPECT_EQ(std::accumulate(got.begin(), got.end(), 0), 40);
}

__global__ void shuffles(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32), v = static_cast<int>(threadIdx.x) * 10;
  int* mine = out + threadIdx.x * 8;
  mine[0] = __shfl_sync(0xffffffffu, v, 5);
  mine[1] = __shfl_xor_sync(0xffffffffu, v, 3);
  mine[2] = __shfl_down_sync(0xffffffffu, v, 4);
  mine[3] = __shfl_up_sync(0xffffffffu, v, 4);
  mine[4] = __shfl_sync(0xffffffffu, v, 9, 8);  // lane 1 of each group of 8
  mine[5] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0));
  // Two halves of a warp at different operations, in different numbers.
  if (lane < 16) {
    mine[6] = __shfl_xor_sync(0x0000ffffu, v, 1);
    mine[6] = __shfl_xor_sync(0x0000ffffu, mine[6], 2);
  } else {
    mine[6] = __shfl_xor_sync(0xffff0000u, v, 8);
  }
  mine[7] = __shfl_sync(0xffffffffu, v, 31);
}

TEST_P(WithSeeds, WarpOperationsAreThoseOfTheClosedForm) {
  DeviceBuffer<int> out(64 * 8, -1);
  ASSERT_EQ(launch(false, shuffles, dim3(1), dim3(64), 0, nullptr, out.data()), cudaSuccess);
  const auto got = out.get();
  unsigned thirds = 0;
  for (int lane = 0; lane < 32; lane += 3) thirds |= 1u << lane;
  for (int t = 0; t < 64; ++t) {
    const int warp = t / 32 * 32, lane = t % 32;
    const int* mine = &got[t * 8];
    EXPECT_EQ(mine[0], (warp + 5) * 10);
    EXPECT_EQ(mine[1], (t ^ 3) * 10);
    EXPECT_EQ(mine[2], (lane + 4 < 32 ? t + 4 : t) * 10);
    EXPECT_EQ(mine[3], (lane >= 4 ? t - 4 : t) * 10);
    EXPECT_EQ(mine[4], (t / 8 * 8 + 1) * 10);
    EXPECT_EQ(static_cast<unsigned>(mine[5]), thirds);
    EXPECT_EQ(mine[6], (lane < 16 ? t ^ 3 : t ^ 8) * 10);
    EXPECT_EQ(mine[7], (warp + 31) * 10);
  }
}

__global__ void lanes_may_end(int* out) {
  if (threadIdx.x % 2) return;
  out[threadIdx.x] = static_cast<int>(__ballot_sync(0xffffffffu, 1));
}
TEST_P(WithSeeds, EndedLanesTakeNoPart) {
  DeviceBuffer<int> out(32, 0);
  ASSERT_EQ(launch(false, lanes_may_end, dim3(1), dim3(32), 0, nullptr, out.data()), cudaSuccess);
  EXPECT_EQ(out.get()[30], 0x55555555);
}

__global__ void add_up(unsigned* sum, unsigned* largest) {
  atomicAdd(sum, threadIdx.x);
  atomicMax(largest, blockIdx.x * blockDim.x + threadIdx.x);
}
TEST_P(WithSeeds, Atomics) {
  DeviceBuffer<unsigned> sum(1, 0), largest(1, 0);
  ASSERT_EQ(launch(false, add_up, dim3(9), dim3(100), 0, nullptr, sum.data(), largest.data()), cudaSuccess);
  EXPECT_EQ(sum.get()[0], 9u * 4950u);
  EXPECT_EQ(largest.get()[0], 899u);
}

// Block b waits for block b + 1: none could end if they ran one after another.
__global__ void wait_for_the_next_block(unsigned* flags) {
  if (threadIdx.x == 0) {
    if (blockIdx.x + 1 < gridDim.x) {
      while (__atomic_load_n(&flags[blockIdx.x + 1], __ATOMIC_ACQUIRE) == 0) __nanosleep(20);
    }
    __atomic_store_n(&flags[blockIdx.x], 1u, __ATOMIC_RELEASE);
  }
  __syncthreads();
}
TEST_P(WithSeeds, ResidentBlocksRunAtOnce) {
  DeviceBuffer<unsigned> flags(16, 0);
  ASSERT_EQ(launch(true, wait_for_the_next_block, dim3(16), dim3(33), 0, nullptr, flags.data()), cudaSuccess);
  EXPECT_EQ(flags.get(), std::vector<unsigned>(16, 1));
}

__global__ void dynamic_memory(int* out, int* fresh) {
  int* shared = static_cast<int*>(cuda_on_cpu::dynamic_shared());
  if (threadIdx.x == 0) *fresh = shared[0];
  __syncthreads();
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}
TEST_P(WithSeeds, DynamicSharedMemoryIsNotZeroed) {
  DeviceBuffer<int> out(50, 0), fresh(1, 0);
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(
        launch(false, dynamic_memory, dim3(1), dim3(50), 50 * sizeof(int), nullptr, out.data(), fresh.data()),
        cudaSuccess);
    EXPECT_EQ(out.get()[3], 46);
    EXPECT_EQ(static_cast<unsigned>(fresh.get()[0]), 0xa5a5a5a5u);
  }
}

}  // namespace
