// The part of NCCL's interface that pycomm calls, declared by ourselves: no header of NCCL's is needed to
// build.
//
// Names, values and layouts are NCCL's, whose binary interface only grows; tests/cpp/cuda/nccl_signatures.cc
// is compiled against the real nccl.h and fails to compile where they differ. PYCOMM_NCCL_REQUIRED lists what
// every version from 2.18 on has, PYCOMM_NCCL_OPTIONAL what came later (a null pointer where it is missing).
// Each entry is X(result type, member of Api, symbol, (parameters)).
//
// A communicator that was made with blocking = 0 answers kInProgress where a call goes on behind its back; no
// further call may be made on it (but async error and abort) until comm_get_async_error says otherwise.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct ncclComm;

namespace pycomm::nccl {

using Stream = CUstream_st*;
using Comm = ncclComm*;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimedOut = 8,  // 2.30
};

enum DataType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat8E4M3 = 10,  // these two: 2.24
  kFloat8E5M2 = 11,
};

// From kNumOps on: made by red_op_create_pre_mul_sum.
enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4, kNumOps = 5 };

enum ScalarResidence : int { kScalarDevice = 0, kScalarHostImmediate = 1 };

struct UniqueId {
  char internal[128];
};

inline constexpr int kUndefinedInt = INT_MIN;
inline constexpr int kShrinkDefault = 0, kShrinkAbort = 1;
inline constexpr int kRevokeDefault = 0;
inline constexpr int kShrinkVersion = 22700, kRevokeVersion = 22900;
inline constexpr int kSharedGpuVersion = 23000;  // from here on several ranks may have one GPU
inline constexpr int kOldestVersion = 21800;     // major * 10000 + minor * 100 + patch

// ncclConfig_t as it was in 2.17: later versions read its size and take their defaults for what is not there.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kOldestVersion;
  int blocking = kUndefinedInt;
  int cga_cluster_size = kUndefinedInt;
  int min_ctas = kUndefinedInt;
  int max_ctas = kUndefinedInt;
  const char* net_name = nullptr;
  int split_share = kUndefinedInt;
};

// clang-format off
#define PYCOMM_NCCL_REQUIRED(X)                                                                                \
  X(Result, get_version, ncclGetVersion, (int* version))                                                       \
  X(Result, get_unique_id, ncclGetUniqueId, (UniqueId* id))                                                    \
  X(const char*, get_error_string, ncclGetErrorString, (Result result))                                        \
  X(const char*, get_last_error, ncclGetLastError, (Comm comm))                                                \
  X(Result, comm_init_rank_config, ncclCommInitRankConfig,                                                     \
    (Comm* comm, int n_ranks, UniqueId id, int rank, Config* config))                                          \
  X(Result, comm_finalize, ncclCommFinalize, (Comm comm))                                                      \
  X(Result, comm_destroy, ncclCommDestroy, (Comm comm))                                                        \
  X(Result, comm_abort, ncclCommAbort, (Comm comm))                                                            \
  X(Result, comm_get_async_error, ncclCommGetAsyncError, (Comm comm, Result* error))                           \
  X(Result, comm_count, ncclCommCount, (const Comm comm, int* n_ranks))                                        \
  X(Result, comm_user_rank, ncclCommUserRank, (const Comm comm, int* rank))                                    \
  X(Result, group_start, ncclGroupStart, ())                                                                   \
  X(Result, group_end, ncclGroupEnd, ())                                                                       \
  X(Result, send, ncclSend,                                                                                    \
    (const void* src, size_t count, DataType type, int peer, Comm comm, Stream stream))                        \
  X(Result, recv, ncclRecv, (void* dst, size_t count, DataType type, int peer, Comm comm, Stream stream))      \
  X(Result, all_reduce, ncclAllReduce,                                                                         \
    (const void* src, void* dst, size_t count, DataType type, RedOp op, Comm comm, Stream stream))             \
  X(Result, reduce_scatter, ncclReduceScatter,                                                                 \
    (const void* src, void* dst, size_t count_each, DataType type, RedOp op, Comm comm, Stream stream))        \
  X(Result, all_gather, ncclAllGather,                                                                         \
    (const void* src, void* dst, size_t count_each, DataType type, Comm comm, Stream stream))                  \
  X(Result, broadcast, ncclBroadcast,                                                                          \
    (const void* src, void* dst, size_t count, DataType type, int root, Comm comm, Stream stream))             \
  X(Result, reduce, ncclReduce,                                                                                \
    (const void* src, void* dst, size_t count, DataType type, RedOp op, int root, Comm comm, Stream stream))   \
  X(Result, red_op_create_pre_mul_sum, ncclRedOpCreatePreMulSum,                                               \
    (RedOp* op, void* scalar, DataType type, ScalarResidence residence, Comm comm))                            \
  X(Result, red_op_destroy, ncclRedOpDestroy, (RedOp op, Comm comm))

// 2.27 shrink, 2.29 revoke.
#define PYCOMM_NCCL_OPTIONAL(X)                                                                                \
  X(Result, comm_shrink, ncclCommShrink,                                                                       \
    (Comm comm, int* excluded, int n_excluded, Comm* made, Config* config, int flags))                         \
  X(Result, comm_revoke, ncclCommRevoke, (Comm comm, int flags))
// clang-format on

struct Api {
#define PYCOMM_NCCL_MEMBER(result, member, symbol, parameters) result(*member) parameters = nullptr;
  PYCOMM_NCCL_REQUIRED(PYCOMM_NCCL_MEMBER)
  PYCOMM_NCCL_OPTIONAL(PYCOMM_NCCL_MEMBER)
#undef PYCOMM_NCCL_MEMBER
};

constexpr size_t type_size(DataType t) {
  switch (t) {
    case kInt8:
    case kUInt8:
    case kFloat8E4M3:
    case kFloat8E5M2: return 1;
    case kFloat16:
    case kBFloat16: return 2;
    case kInt32:
    case kUInt32:
    case kFloat32: return 4;
    case kInt64:
    case kUInt64:
    case kFloat64: return 8;
  }
  return 0;
}

}  // namespace pycomm::nccl
