// Each kernel against the memory's bandwidth: bytes/s, and the ratio to a plain triad a[i] = b[i] + s * c[i].
//
//   kernels_bench [--benchmark_filter=reduce/float32/sum]
//
// A name is reduce/<dtype>/<op>/<sources>x<destinations>/<place>, cast/<from>/<to>/<place> or
// small/<dtype>/<n_elems>; <place> says what the buffers of one call fill together: L2 (256 KiB) or memory
// (192 MiB). bytes_per_second counts what the kernel names: one read per source, one write per destination.
// `triad` is the ratio of the bandwidth to the triad's in the same place; for it, a write in memory counts
// twice, for the kernel and for the triad, since a cache line is read before it is written. The triad is this
// file's own loop, compiled for the processor's width, measured right before and after each benchmark; the
// faster of the two counts, since virtual cores change speed within seconds. Times are of the thread's own
// clock, but on a machine that does other work the memory is shared all the same, and the numbers mean
// little.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "kernels/cast.h"
#include "kernels/reduce.h"

namespace pycomm {
namespace {

constexpr size_t kL2Bytes = size_t{256} << 10;
constexpr size_t kMemoryBytes = size_t{192} << 20;

// One page-aligned pool for all benchmarks, touched once: page faults are not what is measured.
char* pool() {
  static char* const p = [] {
    void* q = std::aligned_alloc(4096, kMemoryBytes + (size_t{1} << 20));
    std::memset(q, 0, kMemoryBytes + (size_t{1} << 20));
    return static_cast<char*>(q);
  }();
  return p;
}

// n buffers of `bytes` each, skewed so that they do not share a cache set.
std::vector<void*> buffers(size_t n, size_t bytes) {
  std::vector<void*> out;
  for (size_t i = 0; i < n; ++i) out.push_back(pool() + i * ((bytes + 4095) / 4096 * 4096) + i * 320);
  return out;
}

#if defined(__x86_64__)
#define PYCOMM_CLONES __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"), noinline))
#else
#define PYCOMM_CLONES __attribute__((noinline))
#endif
PYCOMM_CLONES void triad(float* __restrict a, const float* __restrict b, const float* __restrict c, float s,
                         size_t n) {
  for (size_t i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
}

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Calls per measurement, so that the clock's own cost does not count.
size_t repeats(size_t total_bytes) { return std::max<size_t>(1, (size_t{32} << 20) / total_bytes); }

// How often a write counts: a cache miss reads the line first.
double write_weight(size_t total_bytes) { return total_bytes == kMemoryBytes ? 2 : 1; }

template <class Call>
double seconds_per_call(size_t total_bytes, const Call& call) {
  const size_t n = repeats(total_bytes);
  const double start = thread_seconds();
  for (size_t r = 0; r < n; ++r) {
    call();
    benchmark::ClobberMemory();
  }
  return (thread_seconds() - start) / static_cast<double>(n);
}

// The triad's bandwidth in bytes/s over buffers that fill `total_bytes` together: best of five.
double triad_bandwidth(size_t total_bytes) {
  const size_t n = total_bytes / 3 / sizeof(float);
  const auto p = buffers(3, n * sizeof(float));
  const double bytes = (2 + write_weight(total_bytes)) * static_cast<double>(n * sizeof(float));
  double best = 0;
  for (int k = 0; k < 5; ++k) {
    best = std::max(best, bytes / seconds_per_call(total_bytes, [&] {
                            triad(static_cast<float*>(p[0]), static_cast<float*>(p[1]),
                                  static_cast<float*>(p[2]), 0.5f, n);
                          }));
  }
  return best;
}

// Times `call`, which reads and writes so many bytes, and reports it against the triad in the same place.
template <class Call>
void measure(benchmark::State& state, size_t total_bytes, size_t read, size_t written, const Call& call) {
  const double before = triad_bandwidth(total_bytes);
  call();
  double spent = 0;
  int64_t n_calls = 0;
  for (auto _ : state) {
    const double t = seconds_per_call(total_bytes, call);
    state.SetIterationTime(t);
    spent += t;
    ++n_calls;
  }
  const double moved = static_cast<double>(read) + write_weight(total_bytes) * static_cast<double>(written);
  const double limit = std::max(before, triad_bandwidth(total_bytes));
  state.SetBytesProcessed(static_cast<int64_t>(read + written) * n_calls);
  state.counters["triad"] = moved * static_cast<double>(n_calls) / spent / limit;
}

void reduce_bench(benchmark::State& state, DType dtype, ReduceOp op, int n_srcs, int n_dsts, size_t total) {
  const size_t n = total / (n_srcs + n_dsts) / dtype_size(dtype);
  const auto all = buffers(n_srcs + n_dsts, n * dtype_size(dtype));
  const std::vector<void*> dsts(all.begin(), all.begin() + n_dsts);
  const std::vector<const void*> srcs(all.begin() + n_dsts, all.end());
  const ReduceFn fn = find_reduce(dtype, op);
  const size_t n_bytes = n * dtype_size(dtype);
  measure(state, total, n_srcs * n_bytes, n_dsts * n_bytes,
          [&] { fn(dsts.data(), n_dsts, srcs.data(), n_srcs, n, 3.0); });
}

void cast_bench(benchmark::State& state, DType dst, DType src, size_t total) {
  const size_t n = total / (dtype_size(dst) + dtype_size(src));
  const auto p = buffers(2, n * std::max(dtype_size(dst), dtype_size(src)));
  measure(state, total, n * dtype_size(src), n * dtype_size(dst),
          [&] { cast(dst, p[0], src, p[1], n, 0.5f); });
}

// A call on a few elements: nanoseconds, two sources, two destinations.
void small_bench(benchmark::State& state, DType dtype, size_t n_elems) {
  const auto all = buffers(4, 4096);
  void* dsts[] = {all[0], all[1]};
  const void* srcs[] = {all[2], all[3]};
  const ReduceFn fn = find_reduce(dtype, ReduceOp::kSum);
  for (auto _ : state) {
    fn(dsts, 2, srcs, 2, n_elems, 1.0);
    benchmark::ClobberMemory();
  }
}

void add(const std::string& name, void (*fn)(benchmark::State&, DType, ReduceOp, int, int, size_t),
         DType dtype, ReduceOp op, int n_srcs, int n_dsts) {
  for (const auto& [place, total] : {std::pair{"L2", kL2Bytes}, std::pair{"memory", kMemoryBytes}}) {
    benchmark::RegisterBenchmark((name + "/" + place).c_str(), fn, dtype, op, n_srcs, n_dsts, total)
        ->UseManualTime()
        ->MinTime(0.05);
  }
}

void register_all() {
  for (int d = 0; d < kNumDTypes; ++d) {
    const DType dtype = static_cast<DType>(d);
    for (int o = 0; o < kNumReduceOps; ++o) {
      const ReduceOp op = static_cast<ReduceOp>(o);
      if (find_reduce(dtype, op) == nullptr) continue;
      std::vector<std::pair<int, int>> shapes = {{2, 2}};
      if (op == ReduceOp::kSum) shapes = {{1, 1}, {2, 1}, {2, 2}, {4, 4}, {8, 8}, {16, 1}};
      for (const auto& [n_srcs, n_dsts] : shapes) {
        add(std::string("reduce/") + dtype_name(dtype) + "/" + reduce_op_name(op) + "/" +
                std::to_string(n_srcs) + "x" + std::to_string(n_dsts),
            reduce_bench, dtype, op, n_srcs, n_dsts);
      }
    }
  }
  for (int a = 0; a < kNumDTypes; ++a) {
    for (int b = 0; b < kNumDTypes; ++b) {
      const DType dst = static_cast<DType>(a), src = static_cast<DType>(b);
      if (!scale_supported(dst, src)) continue;
      for (const auto& [place, total] : {std::pair{"L2", kL2Bytes}, std::pair{"memory", kMemoryBytes}}) {
        const std::string name = std::string("cast/") + dtype_name(src) + "/" + dtype_name(dst) + "/" + place;
        benchmark::RegisterBenchmark(name.c_str(), cast_bench, dst, src, total)
            ->UseManualTime()
            ->MinTime(0.1);
      }
    }
  }
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt32}) {
    for (size_t n : {1, 8, 13, 256}) {
      const std::string name = std::string("small/") + dtype_name(dtype) + "/" + std::to_string(n);
      benchmark::RegisterBenchmark(name.c_str(), small_bench, dtype, n);
    }
  }
}

}  // namespace
}  // namespace pycomm

int main(int argc, char** argv) {
  if (const pycomm::Status status = pycomm::init_kernels(); !status.ok()) {
    std::fprintf(stderr, "kernels_bench: %s\n", status.message().c_str());
    return 1;
  }
  benchmark::AddCustomContext("isa", pycomm::active_isa());
  pycomm::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
