// What goes over NCCL, on GPUs and a real NCCL: every algorithm of the catalog, NCCL's own collectives;
// compared bit for bit with the CPU's kernels.
//
// Ranks are processes, this program again with NCCL_TEST_RANK = "<mode> <rank> <n> <device> <unique id in
// hex>": one for each GPU, with two GPUs or more. With one GPU they share it, which NCCL allows since 2.30
// (NCCL_MULTI_RANK_GPU_ENABLE); with an older one the tests are skipped, which is said. Without a GPU: 77,
// which ctest calls skipped. The loopback's tests (tests/cpp/cuda/nccl_*_test.cc) have the faults, which
// nobody can plant here.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstring>
#include <numeric>

#include "cuda/nccl_worker.h"
#include "engine/cuda/nccl_native.h"

extern char** environ;

namespace pycomm {
namespace {

// ---- as a rank

Status run_algorithms(NcclRank& me) {
  Worker worker(me);
  size_t i = 0;
  for (const Algorithm& a : catalog()) {
    for (const uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{233}, uint64_t{20011}}) {
      Case c;
      c.algorithm = &a;
      c.root = static_cast<int>(i) % me.n;
      c.dtype = std::array{DType::kFloat32, DType::kBFloat16, DType::kInt64}[i % 3];
      c.counts = counts_for(a, me.n, size);
      c.in_place = a.in_place && i % 2 == 0;
      c.off = i % 2 == 0 ? 0 : dtype_size(c.dtype);
      c.slice_bytes = size > 1000 ? 16384 : 64;
      PYCOMM_RETURN_IF_ERROR(worker.run(c));
      i++;
    }
    if (!a.deterministic) continue;
    Case c;
    c.algorithm = &a;
    c.dtype = DType::kFloat16;
    c.counts = counts_for(a, me.n, 37);
    c.deterministic = true;
    c.exact = false;
    PYCOMM_RETURN_IF_ERROR(worker.run(c));
  }
  return worker.result();
}

Status run_native_case(NcclRank& me, Collective collective, DType t, ReduceOp op, DeviceArena& arena,
                       std::mt19937_64& rng) {
  const std::vector<uint64_t> counts = has_parts(collective)
                                           ? std::vector<uint64_t>(static_cast<size_t>(me.n), 1003)
                                           : std::vector<uint64_t>{3001};
  const Numbers x = make_numbers(collective, me.n, me.n - 1, t, op, true, counts, rng);
  const auto r = static_cast<size_t>(me.rank);
  cuda::NativeCall call;
  call.collective = collective;
  call.dtype = t;
  call.op = op;
  call.scalar = factor(me.rank);
  call.root = me.n - 1;
  call.count = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  if (has_parts(collective)) call.counts = counts;
  if (!native_supported(call, me.n).ok()) return {};
  call.in = arena.place(x.in[r], 0);
  call.out = arena.place(x.out[r].size(), 0);
  if (cudaStreamSynchronize(nullptr) != cudaSuccess) return Status::error(Code::kSystem, "inputs");
  PYCOMM_RETURN_IF_ERROR(run_native(me.comm, me.stream, call, me.patience));
  if (!ends(me.stream, 120)) return Status::error(Code::kSystem, "the stream does not end");
  const auto got = same(t, arena.read(call.out, x.out[r].size()), x.out[r]);
  const auto clean = got ? arena.finish() : got;
  if (clean) return {};
  return Status::error(Code::kSystem, format("%s %s %s: %s", collective_name(collective), dtype_name(t),
                                             reduce_op_name(op), clean.message()));
}

Status run_native_cases(NcclRank& me) {
  if (cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking) != cudaSuccess) {
    return Status::error(Code::kSystem, "no stream");
  }
  DeviceArena arena(4 << 20);
  std::mt19937_64 rng{3};
  const bool exact_avg = (me.n & (me.n - 1)) == 0;  // NCCL multiplies by 1/n first
  for (const Collective c : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kReduce,
                             Collective::kAllGather, Collective::kBroadcast}) {
    for (int d = 0; d < kNumDTypes; d++) {
      const auto t = static_cast<DType>(d);
      for (const ReduceOp op : operations_of(t)) {
        const bool reduces = c != Collective::kAllGather && c != Collective::kBroadcast;
        if (op == ReduceOp::kAvg ? !exact_avg : !reduces && op != ReduceOp::kSum) continue;
        PYCOMM_RETURN_IF_ERROR(run_native_case(me, c, t, op, arena, rng));
      }
    }
  }
  return {};
}

Status be_a_rank(const char* what) {
  char mode[16], hex[2 * sizeof(nccl::UniqueId) + 1];
  NcclRank me;
  int device = 0;
  if (std::sscanf(what, "%15s %d %d %d %256s", mode, &me.rank, &me.n, &device, hex) != 5) {
    return Status::error(Code::kValue, format("NCCL_TEST_RANK is '%s'", what));
  }
  nccl::UniqueId id{};
  for (size_t i = 0; i < sizeof id.internal; i++) {
    unsigned byte = 0;
    if (std::sscanf(hex + 2 * i, "%2x", &byte) != 1)
      return Status::error(Code::kValue, "the unique id is cut");
    id.internal[i] = static_cast<char>(byte);
  }
  if (cudaSetDevice(device) != cudaSuccess) return Status::error(Code::kSystem, "cudaSetDevice");
  me.patience.timeout_s = 120;  // ranks that share a GPU take turns
  PYCOMM_RETURN_IF_ERROR(nccl::NcclComm::init(id, me.n, me.rank, device, me.patience, &me.comm));
  const std::string name = mode;
  Status s = name == "algorithms" ? run_algorithms(me) : run_native_cases(me);
  if (s.ok()) s = me.comm.finalize(me.patience);
  if (me.comm.valid()) (void)me.comm.abort();
  return s;
}

// ---- as the test

int n_devices() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

std::vector<int> run_processes(int n, const char* mode) {
  const nccl::UniqueId id = new_id();
  std::string hex;
  for (const char c : id.internal) hex += format("%02x", static_cast<unsigned char>(c));
  std::vector<pid_t> pids;
  for (int r = 0; r < n; r++) {
    std::vector<std::string> text;
    for (char** e = environ; *e != nullptr; e++) text.emplace_back(*e);
    text.push_back(format("NCCL_TEST_RANK=%s %d %d %d %s", mode, r, n, r % n_devices(), hex.c_str()));
    if (n > n_devices()) {
      text.emplace_back("NCCL_MULTI_RANK_GPU_ENABLE=1");
      text.emplace_back("NCCL_MAX_CTAS=2");  // all ranks' blocks are resident together
    }
    std::vector<char*> env;
    for (std::string& t : text) env.push_back(t.data());
    env.push_back(nullptr);
    char name[] = "/proc/self/exe";
    char* argv[] = {name, nullptr};
    pid_t pid = -1;
    EXPECT_EQ(posix_spawn(&pid, name, nullptr, nullptr, argv, env.data()), 0);
    pids.push_back(pid);
  }
  std::vector<int> statuses;
  for (const pid_t pid : pids) {
    int status = -1;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  }
  return statuses;
}

class NcclGpu : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Gpu, NcclGpu, testing::Values("algorithms", "native"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(NcclGpu, HasTheBitsOfTheCpu) {
  const nccl::Library* library = nullptr;
  ASSERT_OK(nccl::open(&library));
  std::vector<int> sizes = {2, 4};
  if (n_devices() > 1) {
    sizes = {2};
    for (const int n : {3, 4, 8}) {
      if (n <= n_devices()) sizes.push_back(n);
    }
  } else if (library->version < nccl::kSharedGpuVersion) {
    GTEST_SKIP() << "one GPU, and NCCL " << nccl::version_text(library->version)
                 << ": ranks can share a GPU since 2.30";
  }
  for (const int n : sizes) {
    EXPECT_EQ(run_processes(n, GetParam()), std::vector<int>(static_cast<size_t>(n), 0)) << n << " ranks";
  }
}

}  // namespace
}  // namespace pycomm

int main(int argc, char** argv) {
  if (const char* what = std::getenv("NCCL_TEST_RANK")) {
    const pycomm::Status s = pycomm::be_a_rank(what);
    if (!s.ok()) std::fprintf(stderr, "rank %s: %s\n", what, s.message().c_str());
    return s.ok() ? 0 : 1;
  }
  testing::InitGoogleTest(&argc, argv);
  if (!testing::GTEST_FLAG(list_tests) && pycomm::n_devices() == 0) {
    std::printf("SKIPPED: no GPU\n");
    return 77;
  }
  return RUN_ALL_TESTS();
}
