// The CUDA side of a communicator, as the rest of the engine sees it: no CUDA type is named here.
//
// engine/cuda/device_*.cc has it; engine/no_device.cc takes its place where CUDA is not built, and refuses.
// A call on device tensors is two things. On the host the ranks *agree*, as on any call (Engine::agree), so
// that a refused or different call, a dead or missing rank, is told in the words of every other collective,
// before anything is launched. Then each rank *issues* the call: it is put on the device's communication
// stream, and nothing on the host waits for it.
//
// Words: a *turn* is a call's place in the order of all calls of this process on a device, over all
// communicators; turns are taken when callers call, and issued one after the other. The *end* of a call is
// the event behind it on the stream: callers' streams wait for it, the host may.
//
// Captured into a CUDA graph, a call is agreed on once, at its capture, and not again when it is replayed;
// then the kernels compare (kernels/cuda/peer.h). It needs all that it uses to be there before.
//
// Threads: DeviceTurn, DeviceEnd and DeviceBlock from any; a DeviceEngine is used by one thread at a time,
// but for abort and allocate.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/call.h"
#include "engine/group.h"
#include "schedule/catalog.h"

namespace pycomm {

// What can run a call on devices, beside the algorithms of the catalog over NCCL (their index there).
enum class DeviceWay : uint8_t {
  kNccl = 250,         // NCCL's own collective
  kPeerOneShot = 251,  // kernels on peers' memory (engine/cuda/peer_collectives.h)
  kPeerTwoShot = 252,
  kPeer = 253,  // whatever of the two suits the size
  kAuto = 255,
};
// "nccl", "peer", "ring" …; "" of kAuto.
const char* device_way_name(uint8_t way);
// Whether its reductions are the canonical tree (docs/numerics.md).
bool device_way_is_deterministic(uint8_t way);

class DeviceTurn {
 public:
  // What is on the caller's `stream` by now comes before the call.
  static Status take(int device, void* stream, std::shared_ptr<DeviceTurn>* out);
  // Not kOk: `hooks` or `trouble` ended the wait for the earlier ones.
  Status wait(CallerHooks* hooks, const std::function<Status()>& trouble);
  // The caller's stream is captured into a CUDA graph: the call runs when that is replayed.
  bool is_captured() const;
  ~DeviceTurn();  // the next may go
  struct Impl;
  std::unique_ptr<Impl> impl;
};

class DeviceEnd {
 public:
  ~DeviceEnd();
  // What is put on the stream from now on begins after the call; also where this tells that it has failed.
  Status order(void* stream) const;
  bool is_ordered() const;  // the stream that was the caller's when it made the call goes on behind it
  bool passed() const;      // or failed
  // The device does not use the tensors any more, which may be later than a failure.
  bool over() const;
  Status failure() const;  // why the communicator has failed on the device, if it has
  int device() const;
  // Blocks the calling thread; kTimeout after timeout_s (negative: the call's own limit decides).
  Status wait(double timeout_s, CallerHooks* hooks) const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

// Which way serves which size (of the whole vector), per collective; rising, the last one for all above. A
// communicator has one from its making on, and gives it to those that split() makes.
class DeviceTables {
 public:
  struct Row {
    uint64_t max_bytes;
    uint8_t way;
  };
  DeviceTables();
  const std::vector<Row>& of(Collective c) const { return rows_[static_cast<size_t>(c)]; }
  Status set(Collective collective, std::vector<Row> rows);

 private:
  std::array<std::vector<Row>, kNumCollectives> rows_;
};

// What the engine of a communicator that was shrunk leaves to the next one's.
struct DeviceHeritage;

// Memory that peers reach, of DeviceEngine::allocate. When this goes, in whatever thread, also after the
// engine, the memory is handed out again as soon as its streams have passed what is on them by then: the one
// it was made for, those that it was used on, and the device's communication stream. Other streams are the
// owner's affair. Streams that are named live as long as this.
class DeviceBlock {
 public:
  ~DeviceBlock();
  void* data() const;
  void used_on(void* stream);
  void hold();  // nobody knows on which: it is not handed out again
  struct Impl;
  std::unique_ptr<Impl> impl;
};

class DeviceEngine {
 public:
  // What it needs of the communicator.
  struct Link {
    int rank = 0, n_ranks = 1;
    bool one_host = true;
    std::shared_ptr<Node> node;   // of the ranks of this host
    std::vector<int> node_ranks;  // of each rank, where all are on it
    // All-gather over all ranks, within the call under way.
    std::function<Status(const void* mine, size_t n_bytes, void* all)> exchange;
    std::function<std::string(int)> describe;
    std::function<Status()> trouble;  // not kOk: a rank is lost, or the communicator has failed
    std::function<void(const Status&)> fail;
    std::function<Status()> poll;  // for whoever issues a call, and waits in it: Ctrl-C
    // Of how many calls the device has passed what comes before them, and of how many the end.
    std::function<void(uint64_t n_reached, uint64_t n_passed)> show;
    // Who keeps that call (from 1 on) from ending, of the ranks here; "": no device is behind the others.
    std::function<std::string(uint64_t call)> behind;
    bool was_shrunk = false;                   // made by shrink(), alike on all ranks
    std::shared_ptr<DeviceHeritage> heritage;  // then, of the communicator before; null: there is none
  };
  static const char* why_not_built();  // null when it is
  static int device_count();
  static bool is_emulated();  // tests/cuda_on_cpu: all memory is the host's

  // Collective. All ranks get the same outcome.
  static Status create(int device, Link link, std::unique_ptr<DeviceEngine>* out);
  // What is on the stream ends first, or is aborted; what cannot be ended is kept, and said in the log.
  ~DeviceEngine();

  int device() const;
  // Frees device memory that another allocator of this process (torch's) keeps for later; called when there
  // is none left, by any thread, before the call is given up.
  static void set_free_cached(void (*free_cached)());
  // Before ranks agree on the call: what a call not captured takes of scratch, as far as it is known by now.
  // kSystem: there is no memory, and this rank alone must refuse the call.
  Status reserve(const DeviceTables& tables, Call* call);
  // kValue, the same on all ranks that agreed on the call, when nothing can run it: nothing was launched.
  Status choose(const DeviceTables& tables, Call* call) const;
  // Issues it. A failure has failed the communicator, but where the call was to be captured: kValue then.
  // *end is there after a failure, too, where something had been issued.
  Status run(const Call& call, const DeviceTurn& turn, double timeout_s, std::shared_ptr<DeviceEnd>* end);
  // Ends what is under way.
  void abort(const Status& why);
  // After a failure: what helps the ranks that are left, without the excluded; null: nothing does.
  std::shared_ptr<DeviceHeritage> bequeath(std::vector<int> excluded);
  Status failure() const;  // also of graphs' replays, once the stream has passed them
  bool is_idle() const;    // nothing is under way, or all of it has failed

  // Memory that peers reach: tensors in it need no staging. For work on `stream`. kSystem when there is no
  // room, nor comes within seconds from blocks that are gone; kInterrupt by the hooks.
  Status allocate(size_t n_bytes, void* stream, CallerHooks* hooks, std::unique_ptr<DeviceBlock>* out);
  // The ways that this communicator has for the collective.
  std::vector<uint8_t> ways(Collective collective) const;
  std::string describe() const;  // lines for a person: NCCL's version and file, why there is no peer memory

  struct Impl;

 private:
  DeviceEngine();
  std::unique_ptr<Impl> impl_;
};

// The way of that name, or the names that there are.
Status find_device_way(CallKind kind, const std::string& name, uint8_t* out);

}  // namespace pycomm
