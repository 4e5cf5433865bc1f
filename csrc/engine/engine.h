// The shared-memory engine: runs plans (engine/plan.h) on the tensors of one communicator's ranks.
//
// Three protocols carry one plan. *Eager*: one tile, data beside the head, one synchronisation. *Tiled*: the
// vector's parts are cut into slices; tile t is slice t of every part; staging tile t, reducing tile t-1 and
// copying out tile t-2 overlap. *Direct*: every rank's tensors lie in its arena, nothing is staged. Above
// kEagerBytes a call opens with a head that only carries addresses, from which all ranks conclude alike
// whether it can be direct. All ranks' heads are compared at the first tile, so a refused or mismatched call
// is seen by every rank before it reads anything.
//
// Not thread-safe: the Communicator serialises calls. Traffic, n ranks, S bytes: direct all-reduce 2S read
// and 2S written over all ranks for n = 2; one-shot staged S written and nS read by each rank.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "engine/call.h"
#include "engine/group.h"
#include "engine/plan.h"
#include "kernels/reduce.h"

namespace pycomm {

inline constexpr size_t kEagerBytes = 2048;

class Engine {
 public:
  explicit Engine(Group& group);

  // Runs the call to its end. A kRefused status leaves the group usable; any other failure has failed it.
  Status run(const Call& call, CallerHooks* hooks, double timeout_s);
  // Waits for all ranks, and compares what they are about to do; moves no data.
  Status agree(const Signature& sig, CallerHooks* hooks, double timeout_s);
  // Tells the peers that this rank's own call was invalid.
  Status refuse(const std::string& why, CallerHooks* hooks, double timeout_s);
  // Tells the peers what this rank was told from elsewhere: their call ends with this message.
  Status pass_on(const std::string& message, CallerHooks* hooks, double timeout_s);
  // Does the call's algorithm combine all operands in one place (so that it rounds once)?
  Status reduces_at_once(const Call& call, bool* out);

 private:
  struct Partition;
  struct Run;
  friend struct Run;
  // How a refusal's text begins: it is why this rank's own call was invalid, or a whole message.
  static constexpr char kOwnRefusal = 'o', kPassedOn = 'p';

  void begin_call(CallKind kind);
  Status conclude(Run& run, Status s);
  Status post_refusal(const std::string& text, CallerHooks* hooks, double timeout_s);
  Status run_collective(Run& run);
  void fail_group(const Run& run, const Status& s);
  Status run_all_to_all(Run& run);
  Status run_barrier(Run& run);
  Status offer_direct(Run& run, bool* direct);
  Status run_tiles(Run& run);
  Status run_eager_one_shot(Run& run);
  Status run_direct(Run& run);
  Status plan_for(const Call& call, uint8_t algorithm, PlanMode mode, const Plan** out);

  uint32_t slot_of(uint32_t at) const { return (base_ + at) % kSlots; }
  Status free_slot(Run& run, uint32_t at);
  void hold_slot(uint32_t at, uint32_t done, uint32_t last_position);
  void post_head(Run& run, uint32_t tile);
  Status await_heads(Run& run, uint32_t tile);
  Status check_agreement(Run& run);
  Status await_post(Run& run, uint32_t tile, const Wait& w);
  void post_progress();

  Status stage_tile(Run& run, uint32_t tile);
  Status run_instrs(Run& run, uint32_t tile, uint32_t first, uint32_t last);
  void run_instr(Run& run, uint32_t tile, const Instr& instr);
  void scale_outputs(Run& run, uint32_t tile);

  Group& group_;
  int rank_;
  int n_;
  uint32_t call_ = 0;
  uint64_t progress_ = 0;               // our posts since the beginning
  std::vector<uint64_t> posts_before_;  // every rank's posts before this call
  std::vector<uint32_t> seen_;          // latest position seen of each rank
  uint32_t base_ = 1;                   // the position of this call's first head; 0 is nobody's
  struct Until {
    uint32_t position, slot;
  };
  std::array<Until, kSlots>
      slot_free_{};  // peers must have entered this position, which they show in that slot
  using PlanKey = std::tuple<int, int, int>;  // algorithm, root, mode
  std::map<PlanKey, std::unique_ptr<Plan>> plans_;
  PlanKey last_key_{-1, 0, 0};
  const Plan* last_plan_ = nullptr;
  std::vector<std::byte> scratch_;
  std::vector<const void*> srcs_;
  std::vector<void*> dsts_;
};

}  // namespace pycomm
