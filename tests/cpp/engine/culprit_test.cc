// A rank that dies or stops in the middle of a long call, in a real process: the error names it, where it is,
// and how far the call had come.
//
// The middle is an exact place: one page of rank 1's input cannot be read, and the engine meets it when rank
// 1 adds its own part 0 in round 1 of tile kFault. What happens to the process there is the test's choice.
// Its right neighbour, rank 2, wants that sum in its round 2; the tiles before are done.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "engine/plan.h"
#include "engine/run_ranks.h"
#include "schedule/catalog.h"

namespace pycomm {
namespace {

constexpr int kRanks = 3;
constexpr uint64_t kSlice = 1024;  // elements: one page
constexpr uint64_t kTiles = 12;
constexpr uint64_t kFault = 5;
constexpr uint64_t kCount = kSlice * kTiles * kRanks;

class Pages {
 public:
  explicit Pages(size_t n_bytes)
      : n_bytes_(n_bytes),
        data_(mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Pages() { munmap(data_, n_bytes_); }
  float* data() const { return static_cast<float*>(data_); }

 private:
  size_t n_bytes_;
  void* data_;
};

Status run_ring(const std::string& folder, int rank, double timeout_s, const Pages& in, const Pages& out) {
  std::shared_ptr<Node> node;
  PYCOMM_RETURN_IF_ERROR(Node::join(folder, rank, kRanks, kControlBytes, kDeadlineS, nullptr, &node));
  std::shared_ptr<Communicator> comm;
  PYCOMM_RETURN_IF_ERROR(Communicator::create(node, {0, 1, 2}, rank, timeout_s, {0, 0, 0}, &comm));
  std::unique_ptr<Plan> plan;
  PYCOMM_RETURN_IF_ERROR(make_plan(*find_algorithm(Collective::kAllReduce, "ring"), rank, kRanks, 0, 0,
                                   PlanMode::kTiled, &plan));
  Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, kCount);
  request.call.in = Buffer(in.data(), kCount);
  request.call.out = Buffer(out.data(), kCount);
  PYCOMM_RETURN_IF_ERROR(comm->prepare(&request, "ring"));
  request.call.tile_bytes = plan->max_exposed * kSlice * sizeof(float);
  return comm->run(request, nullptr);
}

// A rank in a process of its own, killed at the end of the test if it lives.
class Process {
 public:
  Process(const std::string& folder, int rank, double timeout_s, void (*on_fault)(int)) {
    pid_ = fork();
    if (pid_ != 0) return;
    const Pages in(kCount * sizeof(float)), out(kCount * sizeof(float));
    if (on_fault != nullptr) {
      signal(SIGSEGV, on_fault);
      mprotect(in.data() + kFault * kSlice, kSlice * sizeof(float), PROT_NONE);
    }
    const Status s = run_ring(folder, rank, timeout_s, in, out);
    _exit(s.ok() ? 1 : 0);
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

void die(int) { kill(getpid(), SIGKILL); }
void stop(int) { raise(SIGSTOP); }

// Rank 0's error; rank 2 finds the culprit, with a timeout of its own, and rank 0 is told by it.
Status run_with(void (*on_fault)(int), double timeout_of_2_s, pid_t* culprit) {
  setenv("PYCOMM_ARENA_MAX", "268435456", 0);
  const PrivateFolder folder;
  const Process one(folder.run(), 1, kDeadlineS, on_fault), two(folder.run(), 2, timeout_of_2_s, nullptr);
  *culprit = one.pid();
  const Pages in(kCount * sizeof(float)), out(kCount * sizeof(float));
  const double start = monotonic_s();
  Status s = run_ring(folder.run(), 0, kDeadlineS, in, out);
  EXPECT_LT(monotonic_s() - start, 10);
  return s;
}

std::string host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

const std::string kProgress = format("; round 2 of 4, %zu of %zu bytes done",
                                     kFault* kSlice* kRanks * sizeof(float), kCount * sizeof(float));

TEST(Culprit, WhoDiedWhereAndHowFarTheCallWas) {
  pid_t culprit = 0;
  const Status s = run_with(die, kDeadlineS, &culprit);
  EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
  expect_in(s.message(), "all_reduce/ring #1: rank 2 (host ");
  expect_in(s.message(), format("rank 1 (host %s, pid %d, dead) died", host().c_str(), culprit));
  expect_in(s.message(), "its last collective was all_reduce/ring(op sum, float32, count 36864");
  expect_in(s.message(), kProgress);
}

TEST(Culprit, WhoStoppedWhereAndHowFarTheCallWas) {
  pid_t culprit = 0;
  const Status s = run_with(stop, 0.5, &culprit);
  EXPECT_EQ(s.code(), Code::kTimeout) << s.message();
  expect_in(s.message(), "all_reduce/ring #1: rank 2 (host ");
  expect_in(s.message(), format(" s for rank 1 (host %s, pid %d, stopped)", host().c_str(), culprit));
  expect_in(s.message(), "(timeout 0.5 s");
  expect_in(s.message(), kProgress);
}

}  // namespace
}  // namespace pycomm
