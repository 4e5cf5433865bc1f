// What crosses between hosts in a compressed call: float32 vectors as codes with a scale for each block.
//
// Words: the *message* of n elements is its blocks' maxima (float32, n_blocks(n) of them), then its n codes
// (kernels/blocks.h); its blocks begin at its first element. A sender encodes with maxima of its own, so
// nothing is agreed on before, and a message says all that its receiver needs.
//
// Where it is used (engine/rounds.h): a run of the `direct` schedule, in which no value is encoded twice.
// What a rank keeps of a chunk that it sends is the decoded value, so that all ranks end with the same bits.
// A reduction over H hosts is T(H) (docs/numerics.md) in float32 of the owner's own value, in full precision,
// and H-1 decoded ones; an all_reduce encodes that once more, for all.
//
// Error feedback: `residual`, one float32 for each element of the run's vector, is added to what is encoded,
// and then holds what the codes do not say of it. An owner encodes contributions for other owners' parts and
// the sum of its own part, so one residual of the vector's length serves both (Seide et al. 2014, "1-Bit
// Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").
// Cost: code_size + 1/64 bytes an element on the wire; memory is read once, in pieces that stay in cache.
#pragma once

#include "engine/call.h"
#include "kernels/blocks.h"

namespace pycomm {

class Codec {
 public:
  static constexpr uint64_t kPiece = 16 * kBlockElems;  // 16 KiB of float32

  Codec() = default;
  Codec(Compression compression, float* residual)
      : is_active_(compression != Compression::kNone), code_(code_dtype(compression)), residual_(residual) {}

  bool is_active() const { return is_active_; }
  size_t message_bytes(uint64_t n) const { return n_blocks(n) * sizeof(float) + n * dtype_size(code_); }
  // `at`: of the first element in the vector. With `keep`, values become what the message says.
  void encode(std::byte* message, float* values, uint64_t n, uint64_t at, bool keep) const;
  // Elements [from, from + n_values) of a message of n; from is a multiple of kBlockElems.
  void decode(float* values, const std::byte* message, uint64_t n, uint64_t from, uint64_t n_values) const;

 private:
  bool is_active_ = false;
  DType code_ = DType::kFloat32;
  float* residual_ = nullptr;
};

// Whether the call may be compressed: kValue says what came and what may.
Status check_compression(const Signature& sig, bool several_hosts);

}  // namespace pycomm
