// Fuzz target: the votes of a shrink between hosts (engine/shrink.h, engine/board.h), told anything by peers.
//
// The input says which messages arrive (ballots, sets of ranks, sizes, kinds: near true ones, then anything),
// from ranks of other hosts, of this one, and from strangers to the communicator; who is lost or leaves; and
// when this rank comes itself, for a moment. Whatever comes: nothing is read or written beyond a set, no rank
// that does not exist is in a decision, a decision never changes, and run() ends.
#include <optional>

#include "engine/hierarchy.h"
#include "engine/shrink.h"
#include "world.h"

namespace pycomm {
namespace {

constexpr uint64_t kId = 9;
constexpr size_t kSetBytes = 8;  // of a set of kRanks ranks

// run() gives up Shrink::kAgreeS after its timeout: after this one, at once or after a look or two.
constexpr double kTimeoutS = -Shrink::kAgreeS;

uint64_t ballot(FuzzInput* input) {
  const uint8_t choice = input->byte();
  if (choice < 200) return Board::ballot(choice % 8, input->byte() % World::kRanks);
  if (choice < 220) return Board::ballot(Board::kMaxRound - choice % 2, input->byte());
  return ~uint64_t{0} >> input->byte() % 64;
}

void say(FuzzInput* input, Shrink* shrink, Net* net) {
  const int peer = input->byte() % World::kJob;
  MessageHeader h;
  h.group = kId;
  h.kind = input->byte() % 8;
  h.count = ballot(input);
  h.signature = ballot(input);
  const size_t n_sets = h.kind == 0 ? 3 : h.kind == 1 ? 0 : 1;
  h.n_bytes = n_sets * kSetBytes;
  const uint8_t odd = input->byte();
  if (odd > 220) h.n_bytes = odd - 220u;
  if (odd == 255) h.kind = input->byte();
  auto own = exactly(input, h.n_bytes);
  for (size_t i = 0; i < h.n_bytes; i += kSetBytes) own[i] = static_cast<std::byte>(input->byte());
  std::byte* const data = own.get();
  const auto lock = net->lock();
  FUZZ_CHECK(shrink->landing(peer, h) == nullptr);
  shrink->arrived(peer, h, data, std::move(own));
}

void run(FuzzInput* input) {
  World& world = World::get();
  Net& net = *world.net();
  const auto groups = world.groups();
  const Placement placement(World::host_of(), 0);
  Shrink shrink(*groups[0], placement, world.net(), kId, World::job_ranks());
  std::optional<RankSet> decided;
  int n_runs = 0;
  for (int n = 0; n < 300 && !input->empty(); n++) {
    const uint8_t choice = input->byte();
    if (choice < 16) {
      const auto lock = net.lock();
      shrink.lost(choice % World::kJob, Status::error(Code::kPeerLost, "gone"));
    } else if (choice < 32) {
      const auto lock = net.lock();
      shrink.left(choice % World::kJob, "");
    } else if (choice < 40 && n_runs < 2) {
      n_runs++;
      RankSet excluded, survivors;
      if (choice % 4 == 0) excluded.add(1 + choice % 3);
      const Status s = shrink.run(
          excluded, 4096, kTimeoutS + choice % 2 * 1e-3, nullptr, [] {}, &survivors);
      FUZZ_CHECK(s.ok() ? survivors.has(0) : s.code() == Code::kTimeout || s.code() == Code::kPeerLost);
    } else {
      say(input, &shrink, &net);
    }
    RankSet now;
    if (!groups[0]->board().decided(&now)) {
      FUZZ_CHECK(!decided);
      continue;
    }
    FUZZ_CHECK(!decided || *decided == now);
    for (int q = World::kRanks; q < Shrink::kMaxRanks; q++) FUZZ_CHECK(!now.has(q));
    decided = now;
  }
}

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  pycomm::FuzzInput input(data, n_bytes);
  pycomm::run(&input);
  return 0;
}
