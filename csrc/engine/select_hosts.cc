#include "engine/select_hosts.h"

#include <limits>

#include "engine/rounds.h"

namespace pycomm {

namespace {
constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

uint8_t index_of(Collective c, const char* name) {
  return static_cast<uint8_t>(find_algorithm(c, name) - catalog().data());
}

// Few rounds for what is sent at once, few bytes for the rest.
const char* default_algorithm(Collective c, bool small, bool deterministic) {
  switch (c) {
    case Collective::kAllReduce:
      return small ? "recursive_doubling" : deterministic ? "halving_doubling" : "ring";
    case Collective::kReduceScatter: return deterministic ? "halving" : "ring";
    case Collective::kAllGather: return small ? "direct" : "ring";
    case Collective::kBroadcast: return small ? "binomial" : "chain";
    case Collective::kReduce: return "binomial";
    case Collective::kGather:
    case Collective::kScatter: return "direct";
  }
  return "direct";
}
}  // namespace

HostSelector::HostSelector() {
  for (int i = 0; i < kNumCollectives; i++) {
    const auto c = static_cast<Collective>(i);
    tables_.push_back({{Rounds::kEagerBytes, index_of(c, default_algorithm(c, true, false)), 0},
                       {kAll, index_of(c, default_algorithm(c, false, false)), 0}});
  }
}

HostChoice HostSelector::choose(Collective c, uint64_t n_bytes, bool deterministic) const {
  const std::vector<HostChoice>& t = tables_[static_cast<size_t>(c)];
  HostChoice found = t.back();
  for (const HostChoice& choice : t) {
    if (n_bytes > choice.max_bytes) continue;
    found = choice;
    break;
  }
  if (deterministic && !catalog()[found.algorithm].deterministic)
    found.algorithm = index_of(c, default_algorithm(c, n_bytes <= Rounds::kEagerBytes, true));
  return found;
}

Status HostSelector::set_table(Collective c, std::vector<HostChoice> table) {
  if (table.empty()) return Status::error(Code::kValue, "a selection table needs at least one entry");
  for (size_t i = 0; i < table.size(); i++) {
    if (table[i].algorithm >= catalog().size() || catalog()[table[i].algorithm].collective != c) {
      return Status::error(
          Code::kValue,
          format("entry %zu of the %s table names no algorithm of that collective", i, collective_name(c)));
    }
    if (i > 0 && table[i].max_bytes <= table[i - 1].max_bytes) {
      return Status::error(Code::kValue,
                           format("entry %zu of the %s table: sizes not rising", i, collective_name(c)));
    }
  }
  tables_[static_cast<size_t>(c)] = std::move(table);
  return Status();
}

}  // namespace pycomm
