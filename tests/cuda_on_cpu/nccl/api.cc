// NCCL's functions, as the loopback has them: arguments checked as NCCL does, then comm.h and group.h.
//
// Environment: LOOPBACK_NCCL_VERSION (what ncclGetVersion says: 23203), LOOPBACK_NCCL_FAULT (comm.h),
// NCCL_MULTI_RANK_GPU_ENABLE (as NCCL's: several ranks may share a device).
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "cuda_runtime_api.h"
#include "group.h"

namespace nccl = pycomm::nccl;
using namespace nccl;
using loopback::Core;

#define PYCOMM_NCCL_DECLARE(result, member, symbol, parameters) \
  extern "C" __attribute__((visibility("default"))) result symbol parameters;
PYCOMM_NCCL_REQUIRED(PYCOMM_NCCL_DECLARE)
PYCOMM_NCCL_OPTIONAL(PYCOMM_NCCL_DECLARE)
#undef PYCOMM_NCCL_DECLARE

namespace {

constexpr unsigned kMagic = 0xcafebeef;

Result make_core(const std::string& name, int n_ranks, int rank, bool blocking, std::shared_ptr<Core>* out) {
  auto core = std::make_shared<Core>();
  core->name = name;
  core->n_ranks = n_ranks;
  core->rank = rank;
  core->blocking = blocking;
  core->faults = loopback::Faults::of_rank(rank);
  if (cudaGetDevice(&core->device) != cudaSuccess) return kUnhandledCudaError;
  core->segment = loopback::Segment::attach(name, n_ranks);
  if (core->segment == nullptr) return kSystemError;
  *out = std::move(core);
  return kSuccess;
}

bool bad_type(DataType type) { return static_cast<int>(type) < 0 || type_size(type) == 0; }

Result bad_op(Core& core, RedOp op, DataType type) {
  if (op < 0) return kInvalidArgument;
  if (op < kNumOps) return kSuccess;
  const std::lock_guard lock(core.mutex);
  const auto at = static_cast<size_t>(op - kNumOps);
  if (at >= core.made.size() || !core.made[at].alive || core.made[at].type != type) return kInvalidArgument;
  return kSuccess;
}

Result call(loopback::Kind kind, const void* src, void* dst, size_t count, DataType type, RedOp op, int root,
            Comm comm, Stream stream) {
  if (comm == nullptr) return kInvalidArgument;
  Core& core = *comm->core;
  if (bad_type(type)) return core.refuse(kInvalidArgument, "an unknown data type");
  if (bad_op(core, op, type) != kSuccess) return core.refuse(kInvalidArgument, "an unknown reduction");
  if (root < 0 || root >= core.n_ranks) return core.refuse(kInvalidArgument, "no such rank");
  if (core.aborted && !core.revoked) return core.refuse(kInvalidUsage, "the communicator was aborted");
  return loopback::add_call({kind, src, dst, count, type, op, root, comm->core, stream});
}

// A communicator for some ranks of another one, which `fn` finds out about; *made is written at the end.
struct Child {
  std::string name;
  int n_ranks = 0, rank = -1;
};
Result make_child(const std::shared_ptr<Core>& parent, Comm* made, std::function<Result(Child*)> fn) {
  return parent->run_call([parent = parent.get(), made, fn = std::move(fn)] {
    Child child;
    if (const Result r = fn(&child); r != kSuccess) return r;
    if (child.rank < 0) return kSuccess;
    auto handle = std::make_unique<ncclComm>();
    if (const Result r = make_core(child.name, child.n_ranks, child.rank, parent->blocking, &handle->core);
        r != kSuccess) {
      return r;
    }
    const std::shared_ptr<Core> core = handle->core;
    if (const Result r = loopback::meet(core); r != kSuccess) return r;
    *made = handle.release();
    return kSuccess;
  });
}

}  // namespace

// ---- the library

Result ncclGetVersion(int* version) {
  *version = loopback::version();
  return kSuccess;
}

const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kSuccess: return "no error";
    case kUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case kSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case kInternalError: return "internal error - please report this issue to the NCCL developers";
    case kInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case kInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case kRemoteError: return "remote process exited or there was a network error";
    case kInProgress: return "NCCL operation in progress";
    case kTimedOut: return "timed out";
  }
  return "unknown result code";
}

const char* ncclGetLastError(Comm comm) {
  thread_local std::string text;
  if (comm == nullptr) return "";
  const std::lock_guard lock(comm->core->mutex);
  text = comm->core->last_error;
  return text.c_str();
}

Result ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "/loopback-nccl-%d-%08x%08x", getpid(), random(),
                random());
  return kSuccess;
}

// ---- communicators

Result ncclCommInitRankConfig(Comm* made, int n_ranks, UniqueId id, int rank, Config* config) {
  if (made == nullptr || n_ranks < 1 || n_ranks > loopback::kMaxRanks || rank < 0 || rank >= n_ranks) {
    return kInvalidArgument;
  }
  if (config != nullptr && (config->magic != kMagic || config->version < 21400)) return kInvalidArgument;
  if (loopback::in_group()) return kInvalidUsage;  // not emulated
  const bool blocking = config == nullptr || config->blocking != 0;
  auto handle = std::make_unique<ncclComm>();
  if (const Result r = make_core(id.internal, n_ranks, rank, blocking, &handle->core); r != kSuccess)
    return r;
  const std::shared_ptr<Core> core = handle->core;
  *made = handle.release();
  const Result result = core->run_call([core] { return loopback::meet(core); });
  if (result != kSuccess && result != kInProgress) {
    delete *made;
    *made = nullptr;
  }
  return result;
}

Result ncclCommShrink(Comm comm, int* excluded, int n_excluded, Comm* made, Config*, int flags) {
  if (comm == nullptr || made == nullptr) return kInvalidArgument;
  Core* parent = comm->core.get();
  if (flags == kShrinkAbort) {
    parent->stop();
    parent->wait_idle();
    parent->state = kSuccess;
  }
  const bool revoked = parent->revoked.exchange(false);  // shrinking is allowed then
  const Result ready = parent->check_ready();
  parent->revoked = revoked;
  if (ready != kSuccess) return ready;
  const std::vector<int> out(excluded, excluded + n_excluded);
  Child child{parent->name + "-shrunk" + std::to_string(++parent->n_shrinks), 0, 0};
  for (int q = 0; q < parent->n_ranks; q++) {
    const bool stays = std::find(out.begin(), out.end(), q) == out.end();
    if (!stays && q == parent->rank) return kInvalidArgument;
    child.n_ranks += stays;
    child.rank += stays && q < parent->rank;
  }
  *made = nullptr;
  return make_child(comm->core, made, [child](Child* c) {
    *c = child;
    return kSuccess;
  });
}

Result ncclCommRevoke(Comm comm, int flags) {
  if (comm == nullptr || flags != kRevokeDefault) return kInvalidArgument;
  const std::shared_ptr<Core> core = comm->core;
  core->revoked = true;
  core->stop();
  const auto end = [core] {
    core->wait_idle();
    core->state = kSuccess;
  };
  if (core->blocking) {
    end();
    return kSuccess;
  }
  core->state = kInProgress;
  std::thread(end).detach();
  return kInProgress;
}

Result ncclCommFinalize(Comm comm) {
  if (comm == nullptr) return kInvalidArgument;
  const std::shared_ptr<Core> core = comm->core;
  if (const Result r = core->check_ready(); r != kSuccess) return r;
  if (core->blocking) {
    core->wait_unused();
    return kSuccess;
  }
  core->state = kInProgress;
  std::thread([core] {
    core->wait_unused();
    if (core->state == kInProgress) core->state = kSuccess;
  }).detach();
  return kInProgress;
}

Result ncclCommDestroy(Comm comm) {
  if (comm == nullptr) return kSuccess;
  comm->core->wait_unused();
  delete comm;
  return kSuccess;
}

Result ncclCommAbort(Comm comm) {
  if (comm == nullptr) return kSuccess;
  while (comm->core->faults.abort_hangs) pause();
  comm->core->stop();
  comm->core->wait_unused();
  delete comm;
  return kSuccess;
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  if (comm == nullptr) return kInvalidArgument;
  *error = static_cast<Result>(comm->core->state.load());
  return kSuccess;
}

Result ncclCommCount(const Comm comm, int* n_ranks) {
  if (comm == nullptr) return kInvalidArgument;
  *n_ranks = comm->core->n_ranks;
  return kSuccess;
}

Result ncclCommUserRank(const Comm comm, int* rank) {
  if (comm == nullptr) return kInvalidArgument;
  *rank = comm->core->rank;
  return kSuccess;
}

// ---- operations

Result ncclGroupStart() { return loopback::start_group(); }
Result ncclGroupEnd() { return loopback::end_group(); }

Result ncclRedOpCreatePreMulSum(RedOp* op, void* scalar, DataType type, ScalarResidence residence,
                                Comm comm) {
  if (op == nullptr || scalar == nullptr || comm == nullptr || bad_type(type)) return kInvalidArgument;
  Core& core = *comm->core;
  const std::lock_guard lock(core.mutex);
  const bool now = residence == kScalarHostImmediate;
  core.made.push_back({type, now ? loopback::read_scalar(scalar, type) : 0, now ? nullptr : scalar});
  *op = static_cast<RedOp>(kNumOps + static_cast<int>(core.made.size()) - 1);
  return kSuccess;
}

Result ncclRedOpDestroy(RedOp op, Comm comm) {
  if (comm == nullptr || op < kNumOps) return kInvalidArgument;
  Core& core = *comm->core;
  const std::lock_guard lock(core.mutex);
  const auto at = static_cast<size_t>(op - kNumOps);
  if (at >= core.made.size() || !core.made[at].alive) return kInvalidArgument;
  core.made[at].alive = false;
  return kSuccess;
}

Result ncclSend(const void* src, size_t count, DataType type, int peer, Comm comm, Stream stream) {
  return call(loopback::Kind::kSend, src, nullptr, count, type, kSum, peer, comm, stream);
}
Result ncclRecv(void* dst, size_t count, DataType type, int peer, Comm comm, Stream stream) {
  return call(loopback::Kind::kRecv, nullptr, dst, count, type, kSum, peer, comm, stream);
}
Result ncclAllReduce(const void* src, void* dst, size_t count, DataType type, RedOp op, Comm comm,
                     Stream stream) {
  return call(loopback::Kind::kAllReduce, src, dst, count, type, op, 0, comm, stream);
}
Result ncclReduceScatter(const void* src, void* dst, size_t count_each, DataType type, RedOp op, Comm comm,
                         Stream stream) {
  return call(loopback::Kind::kReduceScatter, src, dst, count_each, type, op, 0, comm, stream);
}
Result ncclAllGather(const void* src, void* dst, size_t count_each, DataType type, Comm comm, Stream stream) {
  return call(loopback::Kind::kAllGather, src, dst, count_each, type, kSum, 0, comm, stream);
}
Result ncclBroadcast(const void* src, void* dst, size_t count, DataType type, int root, Comm comm,
                     Stream stream) {
  return call(loopback::Kind::kBroadcast, src, dst, count, type, kSum, root, comm, stream);
}
Result ncclReduce(const void* src, void* dst, size_t count, DataType type, RedOp op, int root, Comm comm,
                  Stream stream) {
  return call(loopback::Kind::kReduce, src, dst, count, type, op, root, comm, stream);
}
