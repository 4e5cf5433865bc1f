// Ranks as processes over the loopback NCCL: the same results as with threads, and a rank that dies.
//
// A process is this program again, with NCCL_TEST_RANK = "<mode> <rank> <n> <unique id>"; all use device 0.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "cuda/nccl_worker.h"

extern char** environ;

namespace pycomm {
namespace {

Status run_cases(NcclRank& me) {
  Worker worker(me);
  for (const Algorithm& a : catalog()) PYCOMM_RETURN_IF_ERROR(worker.run_algorithm(a));
  PYCOMM_RETURN_IF_ERROR(run_coded_cases(me));
  PYCOMM_RETURN_IF_ERROR(worker.result());  // at the end: peers wait for the calls of a rank that was wrong
  return me.comm.finalize(me.patience);
}

// Rank 1 is gone: nothing tells its peers, so what ends this is the deadline, and abort.
Status lose_a_rank(NcclRank& me) {
  if (me.rank == 1) _exit(0);
  std::byte* p = nullptr;
  if (cudaMalloc(reinterpret_cast<void**>(&p), 400) != cudaSuccess) _exit(3);
  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess) _exit(3);
  nccl::NcclComm& c = me.comm;
  Status s = c.settle(c.api().all_reduce(p, p, 100, nccl::kFloat32, nccl::kSum, c.raw(), stream),
                      "ncclAllReduce", me.patience);
  if (s.ok()) s = c.finalize({0.3, {}});
  PYCOMM_RETURN_IF_ERROR(c.abort());
  if (s.code() == Code::kTimeout && s.message().find("not done after 0.3 s") != std::string::npos)
    return Status();
  return Status::error(Code::kSystem, "no deadline: " + s.message());
}

// Starts n processes in that mode; their exit statuses.
std::vector<int> run_processes(int n, const char* mode) {
  const nccl::UniqueId id = new_id();
  std::vector<pid_t> pids;
  for (int r = 0; r < n; r++) {
    std::vector<std::string> text;
    for (char** e = environ; *e != nullptr; e++) text.emplace_back(*e);
    text.push_back(format("NCCL_TEST_RANK=%s %d %d %s", mode, r, n, id.internal));
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

class NcclProcesses : public testing::TestWithParam<int> {};

TEST_P(NcclProcesses, ComputeTheSame) {
  const int n = GetParam();
  EXPECT_EQ(run_processes(n, "cases"), std::vector<int>(static_cast<size_t>(n), 0));
}
#if defined(__SANITIZE_ADDRESS__)
INSTANTIATE_TEST_SUITE_P(Nccl, NcclProcesses, testing::Values(3));
#else
INSTANTIATE_TEST_SUITE_P(Nccl, NcclProcesses, testing::ValuesIn(kRanks));
#endif

TEST(NcclProcess, ARankThatIsGoneIsADeadline) {
  EXPECT_EQ(run_processes(3, "lose"), std::vector<int>({0, 0, 0}));
}

}  // namespace

int run_as_rank(const char* what) {
  char mode[16], name[128];
  NcclRank me;
  nccl::UniqueId id{};
  if (std::sscanf(what, "%15s %d %d %127s", mode, &me.rank, &me.n, name) != 4) return 2;
  std::snprintf(id.internal, sizeof id.internal, "%s", name);
  Status s = nccl::NcclComm::init(id, me.n, me.rank, 0, me.patience, &me.comm);
  if (s.ok()) s = std::strcmp(mode, "lose") == 0 ? lose_a_rank(me) : run_cases(me);
  if (s.ok()) return 0;
  std::fprintf(stderr, "rank %d: %s\n", me.rank, s.message().c_str());
  return 1;
}

}  // namespace pycomm
