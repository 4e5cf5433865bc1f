#include "engine/call.h"

#include <algorithm>

#include "engine/device_engine.h"
#include "schedule/catalog.h"

namespace pycomm {

namespace {
constexpr uint32_t kRefusedHash = 0xffffffffu;  // no valid call has it
constexpr int32_t kRootBits = (1 << 26) - 1;    // ranks are below 2^20 (schedule/step.h)
}  // namespace

const char* call_kind_name(CallKind kind) {
  switch (kind) {
    case CallKind::kAllReduce: return "all_reduce";
    case CallKind::kReduceScatter: return "reduce_scatter";
    case CallKind::kAllGather: return "all_gather";
    case CallKind::kBroadcast: return "broadcast";
    case CallKind::kReduce: return "reduce";
    case CallKind::kGather: return "gather";
    case CallKind::kScatter: return "scatter";
    case CallKind::kAllToAll: return "all_to_all";
    case CallKind::kBarrier: return "barrier";
    case CallKind::kRefused: return "a refused call";
  }
  return "?";
}

const char* compression_name(Compression c) {
  switch (c) {
    case Compression::kNone: return "none";
    case Compression::kFp16: return "fp16";
    case Compression::kBf16: return "bf16";
    case Compression::kFp8: return "fp8";
    case Compression::kInt8: return "int8";
  }
  return "?";
}

DType code_dtype(Compression c) {
  switch (c) {
    case Compression::kNone: return DType::kFloat32;
    case Compression::kFp16: return DType::kFloat16;
    case Compression::kBf16: return DType::kBFloat16;
    case Compression::kFp8: return DType::kFloat8E4M3;
    case Compression::kInt8: return DType::kInt8;
  }
  return DType::kFloat32;
}

uint32_t hash_mix(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b * 0x9E3779B97F4A7C15ull)) * 0xBF58476D1CE4E5B9ull;
  h ^= h >> 29;
  h *= 0x94D049BB133111EBull;
  return static_cast<uint32_t>(h >> 32);
}

uint64_t Signature::packed() const {
  return static_cast<uint64_t>(kind) | static_cast<uint64_t>(op) << 8 | static_cast<uint64_t>(dtype) << 16 |
         static_cast<uint64_t>(algorithm) << 24 | static_cast<uint64_t>(root & kRootBits) << 32 |
         static_cast<uint64_t>(captured) << 58 | static_cast<uint64_t>(on_device) << 59 |
         static_cast<uint64_t>(compression) << 60 | static_cast<uint64_t>(deterministic) << 63;
}

Signature Signature::unpack(uint64_t packed, uint64_t count, uint32_t extra) {
  Signature s;
  s.kind = static_cast<CallKind>(packed & 255);
  s.op = static_cast<ReduceOp>(packed >> 8 & 255);
  s.dtype = static_cast<DType>(packed >> 16 & 255);
  s.algorithm = static_cast<uint8_t>(packed >> 24 & 255);
  s.root = static_cast<int32_t>(packed >> 32 & kRootBits);
  s.captured = (packed >> 58 & 1) != 0;
  s.on_device = (packed >> 59 & 1) != 0;
  s.compression = static_cast<Compression>(packed >> 60 & 7);
  s.deterministic = packed >> 63 != 0;
  s.count = count;
  s.extra = extra;
  return s;
}

uint32_t Signature::hash() const {
  if (kind == CallKind::kRefused) return kRefusedHash;
  const uint32_t h = hash_mix(packed(), count * 0x2545F4914F6CDD1Dull + extra);
  return h == kRefusedHash ? 0 : h;
}

std::string Signature::text() const {
  std::string s = call_kind_name(kind);
  if (kind == CallKind::kBarrier || kind == CallKind::kRefused) return s;
  if (algorithm < catalog().size())
    s += std::string("/") + catalog()[algorithm].name;
  else if (const char* way = on_device ? device_way_name(algorithm) : ""; *way != 0)
    s += std::string("/") + way;
  s += "(";
  const bool reduces =
      kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter || kind == CallKind::kReduce;
  if (reduces) s += std::string("op ") + reduce_op_name(op) + ", ";
  s += std::string(dtype_name(dtype)) + ", count " + std::to_string(count);
  const bool rooted = kind == CallKind::kBroadcast || kind == CallKind::kReduce ||
                      kind == CallKind::kGather || kind == CallKind::kScatter;
  if (rooted) s += ", root " + std::to_string(root);
  if (compression != Compression::kNone) s += std::string(", compression ") + compression_name(compression);
  if (deterministic) s += ", deterministic";
  if (on_device) s += captured ? ", on CUDA, captured into a graph" : ", on CUDA";
  return s + format(", parameters %08x)", extra);
}

Buffer::Buffer(std::vector<Segment> segments, size_t elem_size) {
  // Neighbours in memory become one piece, so that views of one bucket count as one buffer.
  for (const Segment& s : segments) {
    if (s.n_elems == 0) continue;
    if (!segments_.empty() && segments_.back().data + segments_.back().n_elems * elem_size == s.data) {
      segments_.back().n_elems += s.n_elems;
    } else {
      starts_.push_back(n_elems_);
      segments_.push_back(s);
    }
    n_elems_ += s.n_elems;
  }
  if (!segments_.empty()) data_ = segments_[0].data;
  if (segments_.size() <= 1) {
    segments_.clear();
    starts_.clear();
  }
}

std::byte* Buffer::locate(uint64_t at, size_t elem_size, uint64_t* run) const {
  if (segments_.empty()) {
    *run = n_elems_ - at;
    return data_ + at * elem_size;
  }
  const auto i =
      static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin()) - 1;
  const uint64_t within = at - starts_[i];
  *run = segments_[i].n_elems - within;
  return segments_[i].data + within * elem_size;
}

}  // namespace pycomm
