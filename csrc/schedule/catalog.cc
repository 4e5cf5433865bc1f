// Finding an algorithm by name, and building a schedule with its arguments checked.
#include "schedule/catalog.h"

#include <array>

#include "schedule/algorithms.h"

namespace pycomm {

std::span<const Algorithm> catalog() {
#define PYCOMM_LIST(name) name,
  static const std::array all = {PYCOMM_ALGORITHMS(PYCOMM_LIST)};
  return all;
}

const Algorithm* find_algorithm(Collective c, std::string_view name) {
  for (const Algorithm& a : catalog()) {
    if (a.collective == c && name == a.name) return &a;
  }
  return nullptr;
}

const char* collective_name(Collective c) {
  switch (c) {
    case Collective::kAllReduce: return "all_reduce";
    case Collective::kReduceScatter: return "reduce_scatter";
    case Collective::kAllGather: return "all_gather";
    case Collective::kBroadcast: return "broadcast";
    case Collective::kReduce: return "reduce";
    case Collective::kGather: return "gather";
    case Collective::kScatter: return "scatter";
  }
  return "?";
}

bool find_collective(std::string_view name, Collective* out) {
  for (int i = 0; i < kNumCollectives; i++) {
    const auto c = static_cast<Collective>(i);
    if (name != collective_name(c)) continue;
    *out = c;
    return true;
  }
  return false;
}

std::string known_algorithms(Collective c) {
  std::string names;
  for (const Algorithm& a : catalog()) {
    if (a.collective == c) names += (names.empty() ? "" : ", ") + std::string(a.name);
  }
  return names;
}

Status build_schedule(const Algorithm& a, int rank, int n_ranks, int root, int n_chunks, Schedule* out) {
  const std::string who = format("%s/%s: ", collective_name(a.collective), a.name);
  const auto refuse = [&](const std::string& what) { return Status::error(Code::kSchedule, who + what); };
  if (n_ranks < 1 || n_ranks > kMaxRanks)
    return refuse(format("n_ranks is %d, expected 1 to %d", n_ranks, kMaxRanks));
  if (rank < 0 || rank >= n_ranks) return refuse(format("rank is %d, expected 0 to %d", rank, n_ranks - 1));
  if (root < 0 || root >= n_ranks) return refuse(format("root is %d, expected 0 to %d", root, n_ranks - 1));
  if (n_chunks < 0 || n_chunks > kMaxChunks) {
    return refuse(format("n_chunks is %d, expected 0 (the default) to %d", n_chunks, kMaxChunks));
  }
  if (n_chunks == 0) n_chunks = a.default_n_chunks;
  if (a.rounds(n_ranks, n_chunks) >= kMaxRounds) {
    return refuse(format("%d ranks and %d chunks need %d rounds, a step can number %d; use fewer chunks",
                         n_ranks, n_chunks, a.rounds(n_ranks, n_chunks), kMaxRounds));
  }
  *out = a.build(rank, n_ranks, root, n_chunks);
  return Status();
}

}  // namespace pycomm
