// The catalog: one line per algorithm, found by collective and name.
//
// Meaning of the chunks, by collective (n ranks, P parts; per-rank parts are numbered by rank):
//   all_reduce      in = out = all P parts               (P is the algorithm's choice)
//   reduce_scatter  in = n parts, out = part `rank`
//   all_gather      in = part `rank`, out = n parts
//   broadcast       in = P parts on the root, none elsewhere; out = P parts on every rank
//   reduce          in = P parts; out = P parts on the root, none elsewhere
//   gather          in = part `rank`; out = n parts on the root, none elsewhere
//   scatter         in = n parts on the root, none elsewhere; out = part `rank`
// A schedule of one rank is the copy of its inputs to its outputs (an engine drops it when in place).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "schedule/step.h"

namespace pycomm {

enum class Collective : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
};
inline constexpr int kNumCollectives = 7;
const char* collective_name(Collective c);
bool find_collective(std::string_view name, Collective* out);

struct Algorithm {
  Collective collective;
  const char* name;
  const char* summary;   // one line for people
  bool deterministic;    // its reduction tree is the canonical tree T of docs/numerics.md, for every n
  bool in_place;         // input and output of the same part may share memory
  int default_n_chunks;  // pipeline depth used when the caller gives 0; 1 where it has no meaning
  Schedule (*build)(int rank, int n_ranks, int root, int n_chunks);
  int (*rounds)(int n_ranks, int n_chunks);  // closed form: communication rounds over all ranks
  // closed form: parts sent by the busiest rank, as a multiple of one part's size
  int64_t (*max_parts_sent)(int n_ranks, int n_chunks);
};

std::span<const Algorithm> catalog();
const Algorithm* find_algorithm(Collective c, std::string_view name);
// "direct, one_shot, ring": for messages.
std::string known_algorithms(Collective c);

// Limits of a step's bit fields, with room to spare.
inline constexpr int kMaxRanks = 1 << 18;
inline constexpr int kMaxChunks = 1 << 16;
inline constexpr int kMaxRounds = 1 << 20;

// Algorithm::build with its arguments checked: kSchedule when one is out of range. n_chunks 0 is the default.
Status build_schedule(const Algorithm& a, int rank, int n_ranks, int root, int n_chunks, Schedule* out);

}  // namespace pycomm
