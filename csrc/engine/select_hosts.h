// Which algorithm carries a run between hosts, and over how many connections: a table by collective and size.
//
// Beside engine/select.h, which chooses within a host: what is best over a network says nothing about shared
// memory. Sizes are those of a run (engine/rounds.h), that is of one owner's share of a call or of a tile of
// it. The same on every rank of a communicator. Tables come from the built-in defaults or from measurement
// (pycomm/tuning_hosts.py); algorithm= of a call comes before both.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "schedule/catalog.h"

namespace pycomm {

struct HostChoice {
  uint64_t max_bytes;  // of the run; the last entry holds for all above
  uint8_t algorithm;   // index in the catalog
  uint8_t n_sockets;   // connections to each peer; 0: all that there may be
};

class HostSelector {
 public:
  HostSelector();
  // deterministic: an algorithm that honours the canonical order, where the table's does not.
  HostChoice choose(Collective collective, uint64_t n_bytes, bool deterministic) const;
  const std::vector<HostChoice>& table(Collective c) const { return tables_[static_cast<size_t>(c)]; }
  // Entries must rise in max_bytes and name algorithms of that collective.
  Status set_table(Collective c, std::vector<HostChoice> table);

 private:
  std::vector<std::vector<HostChoice>> tables_;
};

}  // namespace pycomm
