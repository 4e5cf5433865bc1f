// The state of one call while the engine runs it: how the vector is cut, and where every chunk lies.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/engine.h"
#include "schedule/catalog.h"

namespace pycomm {

// Cuts `count` elements into parts: equal ones (rounded up to whole cache lines, so the last may be short or
// empty), or as given by `counts`.
struct Engine::Partition {
  uint64_t count = 0;
  uint64_t base = 0;
  std::span<const uint64_t> counts;
  std::vector<uint64_t> starts;
  uint64_t max_len = 0;

  Partition(uint64_t total, uint32_t n_parts, size_t elem_size, std::span<const uint64_t> given)
      : count(total), counts(given) {
    if (!counts.empty()) {
      uint64_t at = 0;
      for (uint64_t c : counts) {
        starts.push_back(at);
        at += c;
        max_len = std::max(max_len, c);
      }
      return;
    }
    if (n_parts <= 1) {
      base = max_len = count;
      return;
    }
    const uint64_t line = std::max<uint64_t>(1, 64 / elem_size);
    base = (count + n_parts - 1) / n_parts;
    base = (base + line - 1) / line * line;
    max_len = std::min(base, count);
  }
  uint64_t start(uint32_t part) const { return counts.empty() ? std::min(count, base * part) : starts[part]; }
  uint64_t len(uint32_t part) const {
    if (!counts.empty()) return counts[part];
    const uint64_t s = base * part;
    return s >= count ? 0 : std::min(base, count - s);
  }
};

struct VectorAddress {
  std::byte* in = nullptr;
  std::byte* out = nullptr;
};

struct Engine::Run {
  const Call& call;
  Waiting waiting;
  size_t elem_size;
  uint32_t hash;
  const Plan* plan = nullptr;
  Partition parts;
  uint64_t slice = 0;         // elements of a slice
  uint64_t stride_bytes = 0;  // of a slice in the slot
  uint32_t n_tiles = 1;
  uint32_t first_tile = 0;  // position of tile 0 (1 behind an address head)
  uint32_t last_position = 0;
  bool tiny = false;
  uint64_t in_origin = 0, out_origin = 0;  // the vector's element at which the tensor begins
  ReduceFn reduce = nullptr;               // plain reduction
  ReduceFn complete = nullptr;             // avg: with the division
  std::vector<VectorAddress>
      addresses;  // direct: of every rank, shifted so that element 0 of the vector is here

  Run(const Call& c, Group& group, CallerHooks* hooks, double timeout_s, uint32_t number, uint32_t n_parts)
      : call(c),
        waiting(group, hooks, timeout_s, call_kind_name(c.sig.kind),
                c.sig.algorithm < catalog().size() ? catalog()[c.sig.algorithm].name : nullptr, number),
        elem_size(dtype_size(c.dtype())),
        hash(c.sig.hash()),
        parts(c.sig.count, n_parts, elem_size, c.counts) {}

  // Of the whole vector, when `tiles` tiles are done.
  uint64_t done_bytes(uint32_t tiles) const {
    return std::min(call.sig.count, slice * tiles * plan->n_parts) * elem_size;
  }
  uint64_t slice_len(uint32_t part, uint32_t tile) const {
    const uint64_t len = parts.len(part), at = slice * tile;
    return at >= len ? 0 : std::min(slice, len - at);
  }
};

}  // namespace pycomm
