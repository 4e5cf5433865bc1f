// Fuzz target: send and recv between hosts (engine/far.h, and the mailbox behind it), told anything by peers.
//
// The input posts recvs (any source or one, of any size and type), has the rank of this host that is beside
// us send through its pipe, and says which pieces arrive: announcements and pieces with sizes, types and
// flags of its choice, also from ranks that share this host, from ourselves and from processes that are in no
// communicator. Whatever comes: nothing is written beyond a recv's memory, no piece is put where no message
// has begun, the memory that is really used is that of the bytes that came, and when the communicator is
// closed every transfer has ended.
#include <vector>

#include "engine/p2p.h"
#include "world.h"

// A message may announce 2^48 bytes: that there is no such memory is for the engine to say.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace pycomm {
namespace {

constexpr uint64_t kId = 7;

struct Transfer {
  std::unique_ptr<std::byte[]> memory;
  std::shared_ptr<Work> work;
};

DType small_dtype(FuzzInput* input) { return input->byte() % 2 == 0 ? DType::kUInt8 : DType::kFloat32; }

// As it should be, or not; `left`: of the message that is coming from this peer, as a true sender would have
// it.
MessageHeader header(FuzzInput* input, uint64_t* left) {
  const uint8_t choice = input->byte();
  MessageHeader h;
  h.group = kId;
  h.part = input->byte() % 3;
  h.extra = static_cast<uint32_t>(small_dtype(input));
  h.flags = *left == 0 ? 1 : 0;
  h.count = input->byte() * 5u;
  if (h.flags == 1) *left = h.count;
  h.n_bytes = std::min<uint64_t>(*left, 1 + input->byte() * 3u);
  *left -= h.n_bytes;
  if ((choice & 1) != 0) return h;
  if ((choice & 2) != 0) h.flags = input->byte() % 4;
  if ((choice & 4) != 0) h.n_bytes = input->byte();
  if ((choice & 8) != 0) h.extra = input->byte();
  if ((choice & 16) != 0) h.part = ~input->byte();
  if ((choice & 32) != 0) h.count = input->byte();
  if ((choice & 64) != 0) h.count = Far::kMaxMessageBytes + input->byte() - 128;
  if ((choice & 128) != 0) h.count = ~uint64_t{0} - input->byte();
  return h;
}

void run(FuzzInput* input) {
  World& world = World::get();
  const auto groups = world.groups();
  PointToPoint p2p(*groups[0], 0, {0, 1, -1, -1}, world.net(), kId + 1, World::job_ranks());
  PointToPoint beside(*groups[1]);
  // A Far on the same mailbox as p2p's own, which nobody can reach from here.
  Far far(p2p, world.net(), kId, World::job_ranks());
  std::vector<Transfer> transfers;
  std::array<uint64_t, World::kJob> left{};
  for (int n = 0; n < 200 && !input->empty(); n++) {
    const uint8_t choice = input->byte();
    const size_t n_bytes = input->byte() * (choice & 128 ? 5u : 1u);
    switch (choice % 8) {
      case 0:
      case 1: {
        auto memory = exactly(input, n_bytes);
        std::byte* const data = memory.get();
        const int peer = input->byte() % (World::kRanks + 1) - 1;
        transfers.push_back(
            {std::move(memory), p2p.recv(peer, input->byte() % 3, small_dtype(input), data, n_bytes, 5)});
        break;
      }
      case 2: {
        auto memory = exactly(input, n_bytes * 300);
        std::byte* const data = memory.get();
        transfers.push_back({std::move(memory),
                             beside.send(0, input->byte() % 3, small_dtype(input), data, n_bytes * 300, 5)});
        break;
      }
      default: {
        const int peer = input->byte() % World::kJob;
        const MessageHeader h = header(input, &left[static_cast<size_t>(peer)]);
        auto own = exactly(input, h.n_bytes);
        std::byte* const data = own.get();
        const auto lock = world.net()->lock();
        FUZZ_CHECK(far.landing(peer, h) == nullptr);
        far.arrived(peer, h, data, std::move(own));
      }
    }
  }
  p2p.stop();
  beside.stop();
  for (const Transfer& t : transfers) FUZZ_CHECK(t.work->done());
}

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  pycomm::FuzzInput input(data, n_bytes);
  pycomm::run(&input);
  return 0;
}
