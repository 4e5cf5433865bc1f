// Every algorithm by name. A new algorithm is one file beside this one and one line in this list.
//
// The file defines `const Algorithm kThatName`: a builder and its closed forms. Ranks exchange indices into
// this list (agreement check, selection tables); all ranks run the same build, so its order is free.
#pragma once

#include "schedule/builder.h"
#include "schedule/catalog.h"

// clang-format off
#define PYCOMM_ALGORITHMS(X)     \
  X(kAllReduceDirect)            \
  X(kAllReduceOneShot)           \
  X(kAllReduceRing)              \
  X(kAllReduceRecursiveDoubling) \
  X(kAllReduceHalvingDoubling)   \
  X(kAllReduceTree)              \
  X(kAllReduceDoubleTree)        \
  X(kReduceScatterDirect)        \
  X(kReduceScatterRing)          \
  X(kReduceScatterHalving)       \
  X(kAllGatherDirect)            \
  X(kAllGatherRing)              \
  X(kAllGatherDoubling)          \
  X(kBroadcastDirect)            \
  X(kBroadcastBinomial)          \
  X(kBroadcastChain)             \
  X(kBroadcastScatterAllGather)  \
  X(kReduceDirect)               \
  X(kReduceBinomial)             \
  X(kGatherDirect)               \
  X(kGatherBinomial)             \
  X(kScatterDirect)              \
  X(kScatterBinomial)
// clang-format on

namespace pycomm {

#define PYCOMM_DECLARE(name) extern const Algorithm name;
PYCOMM_ALGORITHMS(PYCOMM_DECLARE)
#undef PYCOMM_DECLARE

}  // namespace pycomm
