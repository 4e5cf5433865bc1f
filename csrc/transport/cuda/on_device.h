// Work on a device, for who knows no CUDA header.
#pragma once

#include <functional>

#include "base/status.h"

struct CUstream_st;

namespace pycomm::cuda {

// Calls `enqueue` with `device` as the calling thread's. Where CUDA is emulated, what is on the stream then
// has ended when this returns: the host reads it next, and there are no streams of torch's.
Status on_device(int device, CUstream_st* stream, const std::function<Status()>& enqueue);

}  // namespace pycomm::cuda
