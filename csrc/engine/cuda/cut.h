// Cut: how a vector falls into parts and slices, and where each lies in a rank's tensors.
//
// Parts are equal (rounded up to whole 64 bytes, so the last may be short or empty) or as given by counts,
// the same rule as the CPU engine's. A tensor that holds only some of the parts begins at its own first part.
// Lengths and positions are elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/cuda/round_plan.h"

namespace pycomm::cuda {

class Cut {
 public:
  Cut(const RoundPlan& plan, uint64_t count, std::span<const uint64_t> counts, size_t elem_size,
      uint64_t slice_elems)
      : plan_(plan), count_(count) {
    const uint64_t line = std::max<uint64_t>(1, 64 / elem_size);
    if (counts.empty()) {
      uint64_t base = plan.n_parts == 0 ? 0 : (count + plan.n_parts - 1) / plan.n_parts;
      if (plan.n_parts > 1) base = (base + line - 1) / line * line;
      for (uint32_t p = 0; p < plan.n_parts; p++) starts_.push_back(std::min(count, base * p));
    } else {
      uint64_t at = 0;
      for (const uint64_t c : counts) {
        starts_.push_back(at);
        at += c;
      }
    }
    starts_.push_back(count);
    uint64_t longest = 0;
    for (uint32_t p = 0; p < plan.n_parts; p++) longest = std::max(longest, len(p));
    if (slice_elems > line) slice_elems -= slice_elems % line;
    slice_ = std::clamp<uint64_t>(longest, 1, std::max<uint64_t>(1, slice_elems));
    n_tiles_ = static_cast<uint32_t>((longest + slice_ - 1) / slice_);
    in_ = extent(0, plan.n_in);
    out_ = extent(plan.n_in, plan.n_out);
  }

  // What a tensor holds of the vector.
  struct Extent {
    uint64_t first = 0, len = 0;
    uint64_t end() const { return first + len; }
  };
  const Extent& in() const { return in_; }
  const Extent& out() const { return out_; }
  uint64_t count() const { return count_; }
  uint64_t slice() const { return slice_; }  // the longest
  uint32_t n_tiles() const { return n_tiles_; }
  uint64_t start(uint32_t part) const { return starts_[part]; }
  uint64_t len(uint32_t part) const { return starts_[part + 1] - starts_[part]; }
  uint64_t slice_len(uint32_t part, uint32_t tile) const {
    const uint64_t at = slice_ * tile;
    return at >= len(part) ? 0 : std::min(slice_, len(part) - at);
  }

 private:
  Extent extent(uint32_t first, uint32_t n) const {
    Extent e;
    for (uint32_t c = first; c < first + n; c++) {
      const uint64_t at = starts_[plan_.part[c]], end = at + len(plan_.part[c]);
      if (c == first) e.first = at;
      const uint64_t last = std::max(e.end(), end);
      e.first = std::min(e.first, at);
      e.len = last - e.first;
    }
    return e;
  }

  const RoundPlan& plan_;
  uint64_t count_;
  std::vector<uint64_t> starts_;  // one more than parts
  uint64_t slice_ = 1;
  uint32_t n_tiles_ = 0;
  Extent in_, out_;
};

}  // namespace pycomm::cuda
