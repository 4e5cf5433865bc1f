// Groups: what is called between ncclGroupStart and the outermost ncclGroupEnd is one operation for each
// communicator (operation.h), put on the stream of its first call.
#pragma once

#include "operation.h"

namespace loopback {

nccl::Result start_group();
// Adds a call to the group under way, or runs it as a group of its own.
nccl::Result add_call(Call call);
nccl::Result end_group();
int version();  // LOOPBACK_NCCL_VERSION
bool in_group();

}  // namespace loopback
