// Device memory: fresh contents, the guard behind its end, how much there is, copies whose kind lies, and
// sharing with another process through a handle.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "cuda_on_cpu/device_buffer.h"
#include "cuda_runtime.h"

namespace {

TEST(Memory, FreshMemoryIsNotZero) {
  void* p = nullptr;
  ASSERT_EQ(cudaMalloc(&p, 1000), cudaSuccess);
  std::vector<unsigned char> got(1000);
  ASSERT_EQ(cudaMemcpy(got.data(), p, 1000, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(got, std::vector<unsigned char>(1000, 0xa5));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 256, 0u);
  EXPECT_EQ(cudaFree(p), cudaSuccess);
}

TEST(Memory, CopiesWhoseKindDoesNotFitAreRefused) {
  DeviceBuffer<char> a(100, 0), b(100, 0);
  std::vector<char> host(100);
  EXPECT_EQ(cudaMemcpy(host.data(), a.data(), 100, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(a.data(), b.data(), 100, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), host.data(), 100, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(a.data() + 1, b.data(), 100, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue)
      << "too long";
  EXPECT_EQ(cudaMemcpy(a.data() + 1, b.data(), 99, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), b.data(), 100, cudaMemcpyDefault), cudaSuccess);
}

TEST(Memory, PointersAreTold) {
  DeviceBuffer<char> device(10, 0);
  void* host = nullptr;
  ASSERT_EQ(cudaHostAlloc(&host, 10, cudaHostAllocMapped), cudaSuccess);
  char plain = 0;
  cudaPointerAttributes a;
  ASSERT_EQ(cudaPointerGetAttributes(&a, device.data() + 3), cudaSuccess);
  EXPECT_EQ(a.type, cudaMemoryTypeDevice);
  ASSERT_EQ(cudaPointerGetAttributes(&a, host), cudaSuccess);
  EXPECT_EQ(a.type, cudaMemoryTypeHost);
  ASSERT_EQ(cudaPointerGetAttributes(&a, &plain), cudaSuccess);
  EXPECT_EQ(a.type, cudaMemoryTypeUnregistered);
  void* mapped = nullptr;
  EXPECT_EQ(cudaHostGetDevicePointer(&mapped, host, 0), cudaSuccess);
  EXPECT_EQ(cudaHostGetDevicePointer(&mapped, &plain, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
  EXPECT_EQ(cudaFree(&plain), cudaErrorInvalidValue);
}

TEST(Memory, ThereIsSoMuchOfIt) {
  ASSERT_EQ(setenv("CUDA_ON_CPU_MEMORY", "10000", 1), 0);
  size_t before = 0, n_free = 0, n_total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &n_total), cudaSuccess);
  EXPECT_EQ(n_total, 10000u);
  void* p = nullptr;
  ASSERT_EQ(cudaMalloc(&p, 1000), cudaSuccess);
  ASSERT_EQ(cudaMemGetInfo(&n_free, &n_total), cudaSuccess);
  EXPECT_EQ(n_free, before - 1000);
  void* q = &q;
  EXPECT_EQ(cudaMalloc(&q, before - 999), cudaErrorMemoryAllocation);
  EXPECT_EQ(q, nullptr);
  EXPECT_EQ(cudaFree(p), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&q, before), cudaSuccess);
  EXPECT_EQ(cudaFree(q), cudaSuccess);
  unsetenv("CUDA_ON_CPU_MEMORY");
}

__global__ void write_at(char* p, size_t at) { p[at] = 1; }

TEST(MemoryDeathTest, WritingBehindTheEndIsReported) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        void* p = nullptr;
        cudaMalloc(&p, 100);
        cuda_on_cpu::launch(false, write_at, dim3(1), dim3(1), 0, nullptr, static_cast<char*>(p),
                            size_t{100});
        cudaFree(p);
      },
      "written 0 bytes behind the end of 100 bytes|use-after-poison");
}

#if !defined(CUDA_ON_CPU_TSAN)  // the child of a process with threads may not start threads under it
TEST(Memory, AnotherProcessMapsItThroughAHandle) {
  int to_parent[2], to_child[2];
  ASSERT_EQ(pipe(to_parent), 0);
  ASSERT_EQ(pipe(to_child), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // owns 300 bytes of device memory, hands out an address inside them
    bool good = true;
    cudaStream_t stream;
    void* p = nullptr;
    cudaIpcMemHandle_t handle;
    good &= cudaStreamCreate(&stream) == cudaSuccess && cudaMalloc(&p, 300) == cudaSuccess;
    good &= cudaMemsetAsync(p, 7, 300, stream) == cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess;
    good &= cudaIpcGetMemHandle(&handle, static_cast<char*>(p) + 100) == cudaSuccess;
    void* own = nullptr;
    good &= cudaIpcOpenMemHandle(&own, handle, 0) == cudaErrorDeviceUninitialized;
    good &= write(to_parent[1], &handle, sizeof handle) == sizeof handle;
    char done = 0;
    good &= read(to_child[0], &done, 1) == 1;
    good &= static_cast<char*>(p)[299] == 9;
    _exit(good ? 0 : 1);
  }
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(read(to_parent[0], &handle, sizeof handle), ssize_t{sizeof handle});
  void* p = nullptr;
  ASSERT_EQ(cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess), cudaSuccess);
  std::vector<char> got(300);
  ASSERT_EQ(cudaMemcpy(got.data(), p, 300, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(got, std::vector<char>(300, 7)) << "the whole allocation, from its first byte";
  ASSERT_EQ(cudaMemset(static_cast<char*>(p) + 299, 9, 1), cudaSuccess);
  ASSERT_EQ(write(to_child[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(cudaIpcCloseMemHandle(p), cudaSuccess);
  for (int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) close(fd);
}

TEST(MemoryDeathTest, FreeingWhatAnotherProcessHasOpenIsReported) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        void* p = nullptr;
        cudaIpcMemHandle_t handle;
        int to_parent[2];
        if (cudaMalloc(&p, 300) == cudaSuccess && cudaIpcGetMemHandle(&handle, p) == cudaSuccess &&
            pipe(to_parent) == 0) {
          const pid_t child = fork();
          if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            void* there = nullptr;
            if (cudaIpcOpenMemHandle(&there, handle, 0) == cudaSuccess) (void)!write(to_parent[1], "x", 1);
            pause();
          }
          char opened = 0;
          if (read(to_parent[0], &opened, 1) == 1) cudaFree(p);
        }
      },
      "cudaFree of 300 bytes that another process has open");
}

TEST(Memory, WhatAProcessHadOpenThatHasDiedIsFreed) {
  void* p = nullptr;
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaMalloc(&p, 300), cudaSuccess);
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, p), cudaSuccess);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    void* there = nullptr;
    _exit(cudaIpcOpenMemHandle(&there, handle, 0) == cudaSuccess ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(cudaFree(p), cudaSuccess);
}
#endif

TEST(Memory, AHandleThatIsNoneIsRefused) {
  cudaIpcMemHandle_t handle;
  std::memset(&handle, 0, sizeof handle);
  void* p = nullptr;
  EXPECT_EQ(cudaIpcOpenMemHandle(&p, handle, 0), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, &p), cudaErrorInvalidValue);
}

}  // namespace
