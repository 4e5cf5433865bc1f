// Groups: what is called between ncclGroupStart and the outermost ncclGroupEnd is one operation of its
// stream.
//
// An *operation* is what a stream runs: the transfers of all calls of one communicator in a group. All of
// them progress together; it ends when everything that it sends has been read and everything that it expects
// has come. So, as with NCCL, calls that are grouped cannot wait for each other, and calls that are not, or
// operations that ranks issue in different orders, do. A device runs one operation at a time (unless ranks
// share it, see README.md): operations of several communicators in different orders on several ranks hang
// here for certain, where with NCCL they only may.
#pragma once

#include <memory>

#include "comm.h"

namespace loopback {

enum class Kind : uint32_t { kSend, kRecv, kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce };

struct Call {
  Kind kind;
  const void* src;
  void* dst;
  size_t count;  // of a rank's block for reduce_scatter and all_gather
  nccl::DataType type;
  int op;    // nccl::RedOp, or one that was made
  int root;  // or the peer
  std::shared_ptr<Core> core;
  nccl::Stream stream;
};

nccl::Result start_group();
// Adds a call to the group under way, or runs it as a group of its own.
nccl::Result add_call(Call call);
nccl::Result end_group();
bool in_group();

}  // namespace loopback
