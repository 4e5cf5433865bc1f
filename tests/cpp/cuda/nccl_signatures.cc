// Compiled against the real nccl.h, where one is given: our declarations of NCCL must have its names, values,
// layouts and signatures. Nothing of this is run; what differs does not compile.
//
// c++ -std=c++20 -fsyntax-only -Icsrc -I<CUDA's include> -I<…/nvidia/nccl/include>
// tests/cpp/cuda/nccl_signatures.cc
#include <nccl.h>

#include <type_traits>

#include "transport/cuda/nccl_api.h"

namespace {

namespace ours = pycomm::nccl;

// Our type for each of NCCL's; the same for all others.
template <class T>
struct Ours {
  using Type = T;
};
template <class T>
struct Ours<T*> {
  using Type = typename Ours<T>::Type*;
};
template <class T>
requires(!std::is_const_v<T>) struct Ours<const T> {
  using Type = const typename Ours<T>::Type;
};
template <>
struct Ours<ncclResult_t> {
  using Type = ours::Result;
};
template <>
struct Ours<ncclDataType_t> {
  using Type = ours::DataType;
};
template <>
struct Ours<ncclRedOp_t> {
  using Type = ours::RedOp;
};
template <>
struct Ours<ncclScalarResidence_t> {
  using Type = ours::ScalarResidence;
};
template <>
struct Ours<ncclUniqueId> {
  using Type = ours::UniqueId;
};
template <>
struct Ours<ncclConfig_t> {
  using Type = ours::Config;
};
template <class R, class... A>
struct Ours<R (*)(A...)> {
  using Type = typename Ours<R>::Type (*)(typename Ours<A>::Type...);
};

#define SAME(result, member, symbol, parameters)                                              \
  static_assert(std::is_same_v<Ours<decltype(&::symbol)>::Type, decltype(ours::Api::member)>, \
                #symbol " has another signature");
PYCOMM_NCCL_REQUIRED(SAME)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9)
PYCOMM_NCCL_OPTIONAL(SAME)
#endif

template <class Theirs, class Mine>
constexpr bool same_layout = sizeof(Theirs) == sizeof(Mine) && alignof(Theirs) == alignof(Mine);
static_assert(same_layout<ncclResult_t, ours::Result> && same_layout<ncclDataType_t, ours::DataType>);
static_assert(same_layout<ncclRedOp_t, ours::RedOp> &&
              same_layout<ncclScalarResidence_t, ours::ScalarResidence>);
static_assert(same_layout<ncclUniqueId, ours::UniqueId>);
// Config grows at its end; ours is its beginning.
static_assert(sizeof(ours::Config) <= sizeof(ncclConfig_t) && alignof(ncclConfig_t) == alignof(ours::Config));
#define SAME_PLACE(theirs, mine) static_assert(offsetof(ncclConfig_t, theirs) == offsetof(ours::Config, mine))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cgaClusterSize, cga_cluster_size);
SAME_PLACE(minCTAs, min_ctas);
SAME_PLACE(maxCTAs, max_ctas);
SAME_PLACE(netName, net_name);
SAME_PLACE(splitShare, split_share);

#define SAME_VALUE(theirs, mine) static_assert(static_cast<int>(theirs) == static_cast<int>(ours::mine))
SAME_VALUE(ncclSuccess, kSuccess);
SAME_VALUE(ncclUnhandledCudaError, kUnhandledCudaError);
SAME_VALUE(ncclSystemError, kSystemError);
SAME_VALUE(ncclInternalError, kInternalError);
SAME_VALUE(ncclInvalidArgument, kInvalidArgument);
SAME_VALUE(ncclInvalidUsage, kInvalidUsage);
SAME_VALUE(ncclRemoteError, kRemoteError);
SAME_VALUE(ncclInProgress, kInProgress);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 7)
SAME_VALUE(ncclTimeout, kTimedOut);
#endif
SAME_VALUE(ncclInt8, kInt8);
SAME_VALUE(ncclUint8, kUInt8);
SAME_VALUE(ncclInt32, kInt32);
SAME_VALUE(ncclUint32, kUInt32);
SAME_VALUE(ncclInt64, kInt64);
SAME_VALUE(ncclUint64, kUInt64);
SAME_VALUE(ncclFloat16, kFloat16);
SAME_VALUE(ncclFloat32, kFloat32);
SAME_VALUE(ncclFloat64, kFloat64);
SAME_VALUE(ncclBfloat16, kBFloat16);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
SAME_VALUE(ncclFloat8e4m3, kFloat8E4M3);
SAME_VALUE(ncclFloat8e5m2, kFloat8E5M2);
#endif
SAME_VALUE(ncclSum, kSum);
SAME_VALUE(ncclProd, kProd);
SAME_VALUE(ncclMax, kMax);
SAME_VALUE(ncclMin, kMin);
SAME_VALUE(ncclAvg, kAvg);
SAME_VALUE(ncclNumOps, kNumOps);
SAME_VALUE(ncclScalarDevice, kScalarDevice);
SAME_VALUE(ncclScalarHostImmediate, kScalarHostImmediate);
SAME_VALUE(NCCL_CONFIG_UNDEF_INT, kUndefinedInt);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 9)
SAME_VALUE(NCCL_SHRINK_DEFAULT, kShrinkDefault);
SAME_VALUE(NCCL_SHRINK_ABORT, kShrinkAbort);
#if defined(NCCL_REVOKE_DEFAULT)
SAME_VALUE(NCCL_REVOKE_DEFAULT, kRevokeDefault);
#endif
#endif
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr ours::Config kMine;
static_assert(kTheirs.magic == kMine.magic && kTheirs.blocking == kMine.blocking);
static_assert(kTheirs.splitShare == kMine.split_share && kTheirs.netName == kMine.net_name);

}  // namespace
