// Memory of a device that torch's allocator has as well, and may hold more of than it uses.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace pycomm {

// What frees device memory that torch keeps for later: called before a refusal, within a call of CUDA's that
// any thread may make; null: nothing does.
void set_free_cached(void (*free_cached)());

// cudaMalloc of `wanted` bytes, or, after what is retired (peer_memory.h) and what torch keeps has been
// freed, of `least`; *got says which. kSystem: there is no memory; `what` names it ("scratch").
Status device_malloc(int device, size_t wanted, size_t least, const std::string& what, void** p, size_t* got);

}  // namespace pycomm
