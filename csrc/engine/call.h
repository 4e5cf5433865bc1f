// One collective call, as a rank makes it: what must agree between ranks, and where its data lie.
//
// `Signature` is what every rank must have said alike; its 32-bit hash travels in the flag word with the
// sequence number, and its full text is made only for an error. Counts are elements, 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"

namespace pycomm {

// The first seven are the catalog's Collective, in the same order.
enum class CallKind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kRefused,  // the rank's own call was invalid; count is meaningless
};
const char* call_kind_name(CallKind kind);

// What float elements cross between hosts as (engine/compressed.h).
enum class Compression : uint8_t { kNone, kFp16, kBf16, kFp8, kInt8 };
inline constexpr int kNumCompressions = 5;
const char* compression_name(Compression c);  // "fp16"
DType code_dtype(Compression c);              // not of kNone

struct Signature {
  CallKind kind = CallKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kUInt8;
  uint8_t algorithm = 0;  // index in the catalog, 255 where there is none
  int32_t root = 0;
  bool deterministic = false;
  Compression compression = Compression::kNone;
  bool on_device = false;  // tensors on CUDA; algorithm is then a way of engine/device_engine.h
  bool captured = false;   // into a CUDA graph, instead of being made now
  uint64_t count = 0;      // elements of the whole vector
  uint32_t extra = 0;      // hash of per-rank counts, tile size and the arena's algorithm

  // Packed for the head of a call: all but count and extra.
  uint64_t packed() const;
  static Signature unpack(uint64_t packed, uint64_t count, uint32_t extra);
  uint32_t hash() const;
  std::string text() const;  // "all_reduce/ring(op sum, float32, count 1024, parameters 00000000)"
};

uint32_t hash_mix(uint64_t a, uint64_t b);

struct Segment {
  std::byte* data;
  uint64_t n_elems;
};

// A logical vector of elements in one or more pieces of memory (a coalesced call has many).
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, uint64_t n_elems) : n_elems_(n_elems), data_(static_cast<std::byte*>(data)) {}
  Buffer(std::vector<Segment> segments, size_t elem_size);

  uint64_t n_elems() const { return n_elems_; }
  bool single() const { return segments_.empty(); }
  std::byte* data() const { return data_; }  // of the first piece
  // The piece that holds element `at`: its address, and how many elements follow in it.
  std::byte* locate(uint64_t at, size_t elem_size, uint64_t* run) const;

 private:
  uint64_t n_elems_ = 0;
  std::byte* data_ = nullptr;
  std::vector<Segment> segments_;  // empty when there is one piece
  std::vector<uint64_t> starts_;
};

struct Call {
  Signature sig;
  Buffer in, out;
  double scalar = 1.0;               // premul_sum's factor
  std::span<const uint64_t> counts;  // elements of each part, where they differ between ranks
  std::span<const uint64_t> send_counts, recv_counts;  // all_to_all
  size_t tile_bytes = 0;
  uint8_t direct_algorithm = 255;  // used when every rank's tensors are in the arena; sig.algorithm otherwise
  bool in_float32 = false;         // the buffers hold float32 instead (engine/convert.h)
  float* residual = nullptr;       // error feedback: of each element of the vector, or null
  int device = -1;                 // of the tensors, -1: host memory
  void* stream = nullptr;          // the caller's, on that device
  bool agree_only = false;         // compare the signatures, wait for all ranks, and move nothing
  DType dtype() const { return in_float32 ? DType::kFloat32 : sig.dtype; }
};

}  // namespace pycomm
