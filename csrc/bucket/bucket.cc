// Buckets by one greedy pass; the rules and their reasons are in bucket.h.
//
// Each kind has at most one open bucket. A full one is closed where it stands, and the sort by last index at
// the end gives rule 5; it cannot reorder buckets of one kind, whose last indices grow already (rule 2).
#include "bucket/bucket.h"

#include <algorithm>
#include <cinttypes>
#include <limits>
#include <unordered_map>

namespace pycomm {

namespace {
struct Open {
  size_t at;  // index of the kind's open bucket
  uint64_t n_bytes;
  uint64_t cap_bytes;
};
}  // namespace

Status assign_buckets(std::span<const Param> params, uint64_t first_cap_bytes, uint64_t cap_bytes,
                      std::vector<Bucket>* out) {
  if (first_cap_bytes > cap_bytes) {
    return Status::error(Code::kValue,
                         format("buckets: the first cap of %" PRIu64 " bytes exceeds the cap of %" PRIu64
                                " bytes; the first bucket is the small one",
                                first_cap_bytes, cap_bytes));
  }
  if (params.size() > std::numeric_limits<uint32_t>::max()) {
    return Status::error(Code::kValue, format("buckets: %zu parameters, more than 2^32 - 1", params.size()));
  }
  std::vector<Bucket> buckets;
  std::unordered_map<int32_t, Open> open_of_kind;
  for (uint32_t i = 0; i < params.size(); ++i) {
    const Param& param = params[i];
    auto [it, first_of_kind] = open_of_kind.try_emplace(param.kind, Open{buckets.size(), 0, first_cap_bytes});
    Open& open = it->second;
    if (first_of_kind) buckets.emplace_back();
    const bool has_room = open.n_bytes <= open.cap_bytes && param.n_bytes <= open.cap_bytes - open.n_bytes;
    // A bucket without bytes takes anything: it has no one to share the cap with.
    if (!has_room && open.n_bytes > 0 && param.n_bytes > 0) {
      open = Open{buckets.size(), 0, cap_bytes};
      buckets.emplace_back();
    }
    buckets[open.at].push_back(i);
    open.n_bytes += param.n_bytes;
  }
  std::sort(buckets.begin(), buckets.end(),
            [](const Bucket& a, const Bucket& b) { return a.back() < b.back(); });
  *out = std::move(buckets);
  return Status();
}

}  // namespace pycomm
