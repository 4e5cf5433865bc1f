// What a rank shows its peers of one communicator: a block in its arena, at the same layout everywhere.
//
// A *position* is a number, compared with wrap-around, that counts the tiles of all calls since the
// communicator was made. A rank enters a position by writing the *head* of a slot, taken in turn: one cache
// line that holds position and signature hash in one word (so agreement costs nothing extra), the signature,
// and either up to 32 bytes of data or the addresses of the tensors. The slot's *stage* follows the head:
// small data beside their flag. `progress` counts posts (engine/plan.h) since the communicator was made.
// `state` tells whether the rank has left or failed, and `failure` what it saw, or why it left. A refused
// call leaves its reason in the stage. `shrink` serves even after the communicator has failed.
//
// A slot may be written again once all peers have entered a later position than the one after which they are
// done with it (Engine::slot_free_).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/futex.h"

namespace pycomm {

inline constexpr int kSlots = 4;
inline constexpr size_t kTinyBytes = 32;
inline constexpr size_t kStageBytes = size_t{512} << 10;
inline constexpr uint64_t kNoAddress = ~uint64_t{0};

struct alignas(64) Head {
  std::atomic<uint64_t> word;  // position << 32 | hash
  uint64_t signature;
  uint64_t count;
  uint32_t extra;
  uint32_t call;
  union {
    char tiny[kTinyBytes];
    struct {
      uint64_t in, out;  // arena offsets, kNoAddress when the tensor is not in the arena
      uint64_t detail;   // InPlace; all_to_all: the largest block this rank sends or receives
    } address;
  };
};
static_assert(sizeof(Head) == 64);

// The pad keeps the slots from sharing a cache set.
struct alignas(64) Slot {
  Head head;
  std::byte stage[kStageBytes];
  std::byte pad[128];
};

enum class InPlace : uint64_t { kNo, kYes, kEither };

enum class RankState : uint64_t { kActive, kLeft, kFailed };

// Of a shrink (engine/shrink.h). Of the host's first rank counts, for all of them: vote and decided.
inline constexpr size_t kShrinkWords = 32;
struct alignas(128) ShrinkArea {
  std::atomic<uint64_t> vote;     // engine/board.h
  std::atomic<uint64_t> decided;  // 1 + the slot of the decision; 0: none yet
  std::atomic<uint64_t> joined;   // offset of this rank's block for the new communicator; 0: it has not come
  std::atomic<uint64_t> beat;     // rises while it is there
  std::atomic<uint64_t> excluded[kShrinkWords];  // the ranks that it wants to go on without
  std::atomic<uint64_t> lost[kShrinkWords];      // the ranks of other hosts that it cannot reach
  std::atomic<uint64_t> values[2][kShrinkWords];
};

// What a rank is in, for peers and `pycomm ps` to read at any time, also when it hangs or is stopped: stores
// and loads are relaxed, each word is right by itself. Ranks are the communicator's.
struct alignas(128) Shown {
  static constexpr uint64_t kInside = uint64_t{1} << 63;  // of `call`: it has not returned yet
  static constexpr uint64_t kSends = uint64_t{1} << 62;   // of `transfer`: a send, else a recv
  static constexpr uint32_t kAnybody = UINT32_MAX;
  std::atomic<uint64_t> call;            // kInside, kind << 32, number; the latest, 0 before the first
  std::atomic<uint64_t> waits_for;       // 0: for nobody, else kInside | rank
  std::atomic<uint64_t> waits_since_ns;  // CLOCK_MONOTONIC
  std::atomic<uint64_t> transfer;        // 0: waits for none, else kInside | kSends | rank
  std::atomic<uint64_t> transfer_since_ns;
  // Of how many calls on CUDA its device has passed what comes before them on the caller's stream, and of how
  // many the end. All ranks make the same ones.
  std::atomic<uint64_t> device_reached, device_passed;
};

// Whose block this is, for `pycomm ps`, which finds the arena through /proc: written before `set`, which says
// that it holds.
struct alignas(128) Identity {
  static constexpr uint64_t kSet = 0x7079636f6d6d7073;  // "pycommps"
  std::atomic<uint64_t> set;
  int64_t pid;
  int32_t rank, size;  // in this communicator
  int32_t job_rank;
  uint32_t unused;
  char job[64];
  char
      label[32];  // which of the job's communicators: "" is that of pycomm.init, "1" its first child, "1.2" …
  char host[64];
};

inline constexpr size_t kListed = 16;
struct alignas(128) Listing {
  std::atomic<uint64_t> blocks[kListed];  // 1 + offset of a control block; of a node's first block only
};

struct Control {
  Flag sleepers;  // how many peers sleep on a flag of ours
  Flag progress;
  Flag state;  // RankState
  char failure[1024];
  Flag bell;  // point-to-point (engine/p2p.h): rung by peers; its own sleepers
  Flag bell_sleepers;
  Flag pipes;     // offset of our pipes, 0 before the first send
  Flag departed;  // how many peers will never look at this block again
  Flag note;      // what the program of this rank says that it is doing; the engine does not look at it
  ShrinkArea shrink;
  Shown shown;
  Identity identity;
  Listing listing;
  alignas(4096) Slot slots[kSlots];
};
static_assert(offsetof(Control, slots) == 4096);

inline constexpr size_t kControlBytes = sizeof(Control) + alignof(Control);
// The control block in the allocation at `offset`. Mappings are page-aligned everywhere, so this is the same
// place for every process.
inline Control* control_at(std::byte* base, uint64_t offset) {
  return reinterpret_cast<Control*>(base +
                                    (offset + alignof(Control) - 1) / alignof(Control) * alignof(Control));
}

// Is `a` at or behind `b`?
constexpr bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace pycomm
