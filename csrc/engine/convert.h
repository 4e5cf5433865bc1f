// What some calls need around the engine: a copy of the input that is scaled, or held in float32.
//
//   premul_sum             the input times the rank's own factor, then a plain sum; in float32 for fp16, bf16
//                             and fp8, which would be rounded after the factor
//   deterministic, and     fp16, bf16 and fp8 would be rounded at every hop; the contract (docs/numerics.md)
//   is an algorithm of        the canonical tree in float32, rounded once: the whole call runs in float32
//   several hops
//   compression between    codes are of float32 vectors (engine/compressed.h): so is the whole call
//   hosts
#pragma once

#include <vector>

#include "engine/engine.h"

namespace pycomm {

class Converted {
 public:
  // Whether a call needs this at all; few do, and small calls feel the look.
  static bool may_apply(const Call& call, bool deterministic) {
    return call.sig.op == ReduceOp::kPremulSum || deterministic || call.sig.compression != Compression::kNone;
  }
  // Redirects the call to converted buffers where it needs them. `engine`: null when no single one reduces
  // the call (engine/hierarchy.h).
  Status begin(Engine* engine, bool deterministic, Call* call);
  // After a successful call: brings the result back to the tensors that the caller gave.
  void end();

 private:
  Call* call_ = nullptr;  // set when it runs in float32
  Buffer user_out_;
  std::vector<std::byte> in_, out_;
};

}  // namespace pycomm
