#include "engine/select.h"

#include <limits>

#include "engine/control.h"
#include "schedule/catalog.h"

namespace pycomm {

Status algorithm_index(CallKind kind, const std::string& name, uint8_t* out) {
  std::string known;
  for (size_t i = 0; i < catalog().size(); i++) {
    const Algorithm& a = catalog()[i];
    if (static_cast<uint8_t>(a.collective) != static_cast<uint8_t>(kind)) continue;
    if (name == a.name) {
      *out = static_cast<uint8_t>(i);
      return Status();
    }
    known += (known.empty() ? "" : ", ") + std::string(a.name);
  }
  return Status::error(Code::kValue, format("algorithm '%s' is not one of %s's: %s", name.c_str(),
                                            call_kind_name(kind), known.c_str()));
}

Selector::Selector(int n_ranks) : tables_(kNumCollectives) {
  constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  const auto index = [](CallKind kind, const char* name) {
    uint8_t i = 0;
    const Status s = algorithm_index(kind, name, &i);
    return s.ok() ? i : uint8_t{255};
  };
  for (int k = 0; k < kNumCollectives; k++) {
    const auto kind = static_cast<CallKind>(k);
    const uint8_t direct = index(kind, "direct");
    tables_[k] = {{kAll, direct, direct, 256 << 10}};
  }
  const uint8_t direct = index(CallKind::kAllReduce, "direct"),
                one_shot = index(CallKind::kAllReduce, "one_shot");
  // Two ranks: reading everything once costs one synchronisation a tile instead of two. More ranks: only
  // while the message is small.
  auto& all_reduce = tables_[static_cast<size_t>(CallKind::kAllReduce)];
  if (n_ranks == 2) {
    all_reduce = {{kAll, one_shot, direct, 128 << 10}};
  } else {
    all_reduce = {{16 << 10, one_shot, direct, 128 << 10}, {kAll, direct, direct, 256 << 10}};
  }
}

const Choice& Selector::choose(CallKind kind, uint64_t n_bytes) const {
  const std::vector<Choice>& t = tables_[static_cast<size_t>(kind)];
  for (const Choice& c : t) {
    if (n_bytes <= c.max_bytes) return c;
  }
  return t.back();
}

Status Selector::set_table(CallKind kind, std::vector<Choice> table) {
  if (table.empty()) return Status::error(Code::kValue, "a selection table needs at least one entry");
  for (size_t i = 0; i < table.size(); i++) {
    const Choice& c = table[i];
    for (uint8_t a : {c.algorithm, c.direct_algorithm}) {
      if (a >= catalog().size() ||
          static_cast<uint8_t>(catalog()[a].collective) != static_cast<uint8_t>(kind)) {
        return Status::error(Code::kValue,
                             format("entry %zu of the %s table names no algorithm of that collective", i,
                                    call_kind_name(kind)));
      }
    }
    if (c.tile_bytes < 4096 || c.tile_bytes > kStageBytes ||
        (i > 0 && c.max_bytes <= table[i - 1].max_bytes)) {
      return Status::error(Code::kValue,
                           format("entry %zu of the %s table: tile size out of range or sizes not rising", i,
                                  call_kind_name(kind)));
    }
  }
  tables_[static_cast<size_t>(kind)] = std::move(table);
  return Status();
}

}  // namespace pycomm
