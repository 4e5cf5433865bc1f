// Which algorithm and tile size serve a call: a table by collective and size, the same on every rank.
//
// An entry holds for calls of at most `max_bytes`. Two algorithms are named: one for ordinary tensors (and
// any mix), and one for when all tensors lie in the arena. Tables come from the built-in defaults, from
// measurement (pycomm/tuning.py, rank 0's decision), or from the user (algorithm=, PYCOMM_ALGORITHM).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/call.h"

namespace pycomm {

struct Choice {
  uint64_t max_bytes;  // of the whole vector; the last entry holds for all above
  uint8_t algorithm;   // index in the catalog
  uint8_t direct_algorithm;
  uint32_t tile_bytes;
};

class Selector {
 public:
  Selector() = default;
  explicit Selector(int n_ranks);
  // The entry for a size; kind must be one of the catalog's collectives.
  const Choice& choose(CallKind kind, uint64_t n_bytes) const;
  const std::vector<Choice>& table(CallKind kind) const { return tables_[static_cast<size_t>(kind)]; }
  // Replaces a collective's table; entries must rise in max_bytes and name algorithms of that collective.
  Status set_table(CallKind kind, std::vector<Choice> table);

 private:
  std::vector<std::vector<Choice>> tables_;
};

// The catalog index of an algorithm by name, or an error that lists what exists.
Status algorithm_index(CallKind kind, const std::string& name, uint8_t* out);

}  // namespace pycomm
