// DeviceArena: when memory that peers reach, once given back, may be handed out again.
//
// PeerMemory knows places and nothing of streams: what is released there may be allocated at once. But who
// lets go of a block has often left work on a stream that uses it. So a block is *given back* here first,
// with an event on each stream that may: its own (current when it was made), those that it was *used on*
// (DeviceBlock::used_on), and the end of the last call on the device's communication stream, of whatever
// communicator. It is *free* when these have passed, for which allocate() looks. Where there is no room
// without them, allocate() waits for them, kWait_s at most.
//
// Held until the process ends are blocks that nothing will say that of: given back while one of the streams
// is captured into a CUDA graph, whose replays may use them at any time, or while the device has failed.
//
// *Packing* is the block in which a communicator's calls pack lists of tensors, so that peers read and write
// it where it lies; on the communication stream only. It grows by being replaced, and is given back then, or
// kept if a graph has it. It takes at most half of the heap, with what was outgrown and is not free yet.
//
// Threads: any; packing() those of the communicator's calls, one at a time. A block may be given back
// wherever its last owner dies: within a capture, after the engine (then nobody allocates any more, and
// nothing is waited for), in a forked child (then nothing is done). It takes as long as a launch on the
// streams would, which is long where a stream is full of work; no other lock than the arena's and CUDA's is
// taken.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/cuda/device_context.h"
#include "engine/device_engine.h"
#include "transport/cuda/peer_memory.h"

namespace pycomm::cuda {

class DeviceArena : public std::enable_shared_from_this<DeviceArena> {
 public:
  static constexpr double kWait_s = 5;
  DeviceArena(std::shared_ptr<PeerMemory> memory, std::shared_ptr<DeviceContext> context, size_t n_heap_bytes)
      : memory_(std::move(memory)), context_(std::move(context)), n_heap_bytes_(n_heap_bytes) {}

  // kSystem: there is no room, and none came. kInterrupt: the hooks say so.
  Status allocate(size_t n_bytes, Stream stream, CallerHooks* hooks, std::unique_ptr<DeviceBlock>* out);
  void give_back(const DeviceBlock::Impl& block);
  // At least that many bytes; null: there is no room. Once there, it is there for fewer bytes, too.
  // is_captured: for a call that is captured.
  std::byte* packing(size_t n_bytes, bool is_captured);
  // With the engine, whose calls have ended: nothing is handed out any more, and all but what is held is
  // PeerMemory's again, which can be freed then (cudaFree waits for the device).
  void end();

 private:
  struct GivenBack {
    void* p;
    size_t n_bytes;
    std::vector<std::shared_ptr<HeldEvent>> after;
    bool is_held = false;  // until the process ends
    bool was_packing = false;
  };
  std::shared_ptr<HeldEvent> mark(Stream stream) const;
  size_t free_passed();  // with the mutex held, as the next
  void replace_packing(size_t n_bytes);
  std::string why_not_free(bool has_waited) const;

  const std::shared_ptr<PeerMemory> memory_;
  const std::shared_ptr<DeviceContext> context_;
  const size_t n_heap_bytes_;
  mutable std::mutex mutex_;  // of all below
  std::vector<GivenBack> given_back_;
  std::byte* packing_ = nullptr;
  size_t n_packing_bytes_ = 0;
  size_t n_largest_bytes_ = 0;  // that packing was asked for, of what half of the heap has room for
  bool packing_is_captured_ = false;
  bool has_ended_ = false;
};

}  // namespace pycomm::cuda

namespace pycomm {

struct DeviceBlock::Impl {
  std::weak_ptr<cuda::DeviceArena> arena;  // none after the engine
  std::shared_ptr<PeerMemory> memory;
  void* data;
  size_t n_bytes;
  std::vector<cuda::Stream> streams;
  uint64_t fork_generation;
  bool is_held = false;
};

}  // namespace pycomm
