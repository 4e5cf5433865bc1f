// What a schedule costs before anybody runs it: in seconds between machines, in bytes within one.
//
// *Network* (alpha-beta-gamma): a message of m bytes takes alpha + m beta and occupies the sender's outgoing
// and the receiver's incoming port for that long; reducing m received bytes takes m gamma on the receiver; a
// copy within a rank is free. Two levels: rank r is on node r / ranks_per_node, and messages within a node
// and between nodes have their own alpha and beta. With slice_bytes a message is cut, and a slice travels on
// as soon as it has arrived and is reduced, so that transfers and reductions overlap.
//
//   simulate   the schedules of all ranks, message by message (up to kMaxSimulatedRanks ranks and
//              kMaxSimulatedSteps steps): time and memory in proportion to steps and slices
//   stream     above: one schedule at a time, as if all ranks took each round together; where even that is
//              too much, the schedules of some ranks only. Exact where all ranks do the same (ring,
//              halving-doubling), else an estimate within a few tenths
//
// *Shared memory*: t = call + syncs * flag + bytes * s_per_byte, where `shared_work` counts a plan's
// synchronisations and bytes touched (engine/engine.h has the protocols; the three constants are measured,
// bench/cost.py). Parts are real numbers here, not rounded to elements.
// Source: Hockney (1994), alpha and beta; Thakur, Rabenseifner and Gropp (2005), section 3, gamma.
#pragma once

#include <cstdint>

#include "schedule/catalog.h"

namespace pycomm {

struct LinkCost {
  double alpha_s = 0;          // per message
  double beta_s_per_byte = 0;  // 1 / bandwidth
};

struct CostModel {
  LinkCost in_node;
  LinkCost between;
  double gamma_s_per_byte = 0;  // per reduced byte
  int ranks_per_node = 0;       // 0: all ranks are on one node
  double slice_bytes = 0;       // 0: messages are not cut

  const LinkCost& link(int a, int b) const {
    return ranks_per_node == 0 || a / ranks_per_node == b / ranks_per_node ? in_node : between;
  }
};

enum class CostMethod : uint8_t { kSimulated, kStreamed };
const char* cost_method_name(CostMethod m);

struct Cost {
  double seconds = 0;
  CostMethod method = CostMethod::kSimulated;
  int rounds = 0;             // closed form
  double max_bytes_sent = 0;  // closed form: by the busiest rank
};

inline constexpr int kMaxSimulatedRanks = 4096;
inline constexpr int64_t kMaxSimulatedSteps = int64_t{80} << 20;
inline constexpr int kMaxCostRanks = 100000;
inline constexpr int64_t kMaxSlicesPerPart = 1 << 12;

// n_bytes: of the whole vector. kSchedule when the schedule cannot be built; kValue for a model out of range.
Status predict(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
               const CostModel& model, Cost* out);
// The two ways, for comparison in tests.
Status simulate_cost(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
                     const CostModel& model, double* seconds);
Status stream_cost(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
                   const CostModel& model, double* seconds);

enum class SharedProtocol : uint8_t { kTiled, kDirect };

struct SharedWork {
  double syncs = 0;          // times that a rank waits for another, one after the other
  double read_bytes = 0;     // by the busiest rank
  double written_bytes = 0;  // by that rank
};

// What the shared-memory engine does for one call on one node (<= kMaxVerifyRanks ranks). tile_bytes: the
// size of a tile of the staged vector; unused by kDirect.
Status shared_work(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
                   SharedProtocol protocol, double tile_bytes, SharedWork* out);

}  // namespace pycomm
