// One fault by name, for ThreadSanitizer to find: `planted_faults missing_barrier`. `none` runs the same code
// without a fault and must stay quiet. tests/cpp/cuda_on_cpu/CMakeLists.txt says what each must print.
#include <cstdio>
#include <cstring>

#include "cuda_runtime.h"

namespace {

bool fault = false;
const char* fault_name = "";
bool is(const char* name) { return fault && std::strcmp(fault_name, name) == 0; }

__global__ void rotate(int* p, bool missing_barrier, bool missing_warp_barrier) {
  __shared__ int shared[64];
  shared[threadIdx.x] = p[threadIdx.x];
  if (!missing_barrier) __syncthreads();
  const int v = shared[(threadIdx.x + 1) % 64];
  __syncthreads();
  shared[threadIdx.x] = v;
  if (!missing_warp_barrier) __syncwarp();
  p[threadIdx.x] = shared[threadIdx.x ^ 1];
}

// Block 0 fills data and raises a flag; block 1 waits for it and reads.
__global__ void hand_over(int* data, int* out, unsigned* flag, bool relaxed_release, bool relaxed_acquire) {
  if (blockIdx.x == 0) {
    data[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) __atomic_store_n(flag, 1u, relaxed_release ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
  } else {
    if (threadIdx.x == 0) {
      while (__atomic_load_n(flag, relaxed_acquire ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE) == 0)
        __nanosleep(20);
    }
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];
  }
}

__global__ void two_blocks_write(int* p) { p[threadIdx.x] = static_cast<int>(blockIdx.x); }
__global__ void one_block_writes(int* p) { p[threadIdx.x] = 1; }

// Both streams write p in a graph, one after the other.
bool replay_graph(cudaStream_t a, cudaStream_t b, cudaEvent_t event, int* p, bool missing_edge) {
  const auto order = [&](cudaStream_t first, cudaStream_t second) {
    return cudaEventRecord(event, first) == cudaSuccess &&
           cudaStreamWaitEvent(second, event, 0) == cudaSuccess;
  };
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  if (cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed) || !order(a, b)) return false;
  cuda_on_cpu::launch(false, one_block_writes, dim3(1), dim3(64), 0, a, p);
  if (!missing_edge && !order(a, b)) return false;
  cuda_on_cpu::launch(false, one_block_writes, dim3(1), dim3(64), 0, b, p);
  return order(b, a) && !cudaStreamEndCapture(a, &graph) && !cudaGraphInstantiate(&exec, graph, 0) &&
         !cudaGraphLaunch(exec, a) && !cudaStreamSynchronize(a);
}

}  // namespace

int main(int argc, char** argv) {
  fault_name = argc > 1 ? argv[1] : "none";
  fault = std::strcmp(fault_name, "none") != 0;
  cudaStream_t a, b;
  cudaEvent_t event;
  int *p, *q;
  unsigned* flag;
  if (cudaStreamCreate(&a) || cudaStreamCreate(&b) || cudaEventCreate(&event) ||
      cudaMalloc(reinterpret_cast<void**>(&p), 256) || cudaMalloc(reinterpret_cast<void**>(&q), 256) ||
      cudaMalloc(reinterpret_cast<void**>(&flag), 4)) {
    return 1;
  }
  using cuda_on_cpu::launch;
  cudaMemsetAsync(p, 0, 256, a);
  cudaMemsetAsync(flag, 0, 4, a);
  launch(false, rotate, dim3(1), dim3(64), 0, a, p, is("missing_barrier"), is("missing_warp_barrier"));
  launch(true, hand_over, dim3(2), dim3(64), 0, a, p, q, flag, is("relaxed_release"), is("relaxed_acquire"));
  launch(false, is("blocks_race") ? two_blocks_write : one_block_writes, dim3(is("blocks_race") ? 2 : 1),
         dim3(64), 0, a, p);
  cudaEventRecord(event, a);
  if (!is("missing_event")) cudaStreamWaitEvent(b, event, 0);
  launch(false, one_block_writes, dim3(1), dim3(64), 0, b, p);
  cudaStreamSynchronize(b);
  cudaStreamSynchronize(a);
  cudaMemsetAsync(q, 0, 256, b);
  cudaStreamSynchronize(b);
  cudaMemcpyAsync(q, p, 256, cudaMemcpyDeviceToDevice, b);
  if (!is("missing_synchronise")) cudaStreamSynchronize(b);
  volatile int* const seen = q;  // the host reads device memory: here they are one
  while (*seen == 0) {
  }
  const int first = *seen;
  cudaStreamSynchronize(b);
  if (!replay_graph(a, b, event, p, is("missing_edge"))) return 1;
  std::printf("ran %s: %d\n", fault_name, first);
  return 0;
}
