// all_gather with compression, as the engine issues it: an all_gather of bytes.
//
// Each rank's part travels as one message of codes (kernels/cuda/kernels.h), padded to 16 bytes, by any way
// that there is for bytes; then every rank, the sender included, takes what the messages say, so all have the
// same bits. They are those of the CPU engine with a rank on each host (engine/compressed.h). Cost: one
// launch on the sender, one for all messages on every rank.
#pragma once

#include <vector>

#include "engine/cuda/device_impl.h"

namespace pycomm {

inline bool is_coded_gather(const Call& call) {
  return call.sig.kind == CallKind::kAllGather && call.sig.compression != Compression::kNone;
}

// The all_gather of the messages of `coded`: its counts are their bytes.
struct CodedGather {
  CodedGather(const Call& coded, const DeviceEngine::Link& link);
  CodedGather(const CodedGather&) = delete;  // the call points into it
  CodedGather& operator=(const CodedGather&) = delete;
  DType code;
  std::vector<uint64_t> n_bytes;  // of each rank's message
  Call call;                      // without memory
};

}  // namespace pycomm
