// A schedule, run over the network: the engine between hosts.
//
// A *run* is one schedule of the catalog on contiguous memory. Its parts are cut into slices, and a *tile* is
// the schedule on one slice of every part: tiles are independent of each other, and up to kWindow of them are
// under way, so that one's transfer overlaps another's reduction and a pipeline of rounds is always full.
// A tile goes from round to round: it sends, expects what comes, and when all of a round has come it does the
// round's local steps in their order. What comes lands in its place, or where a reduction or another step of
// the same round needs the old value, in memory of its own first.
//
// A round begins only when nothing that it writes is still being sent.
//
// With a Codec (engine/compressed.h; float32 and `direct` only) a chunk is encoded when it is sent, once for
// all peers, and decoded in the local step that takes it. What is sent is then memory of the tile's own.
// Source: schedule/step.h (the rules that make this free of deadlock). Cost: the schedule's rounds and bytes.
// Guarded by the Net's mutex; progress is made by messages that arrive and leave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/compressed.h"
#include "engine/remote.h"
#include "kernels/reduce.h"
#include "schedule/catalog.h"

namespace pycomm {

class Rounds {
 public:
  struct Task {
    const Schedule* schedule;
    std::span<const int> members;  // the communicator's rank of each of the schedule's
    uint32_t call = 0, run = 0;
    std::byte* in = nullptr;  // of the first input chunk; consecutive ones follow each other
    // From one input of a part to the next input of the same part, where there are several
    // (schedule/exact.h).
    uint64_t in_stride_bytes = 0;
    std::byte* out = nullptr;
    uint64_t count = 0;                // elements of the whole vector
    std::span<const uint64_t> counts;  // of each part, where they are given
    DType dtype = DType::kUInt8;
    ReduceOp op = ReduceOp::kSum;
    Codec codec;        // its vector is this one, or not active
    int n_sockets = 0;  // connections to each peer; 0: all that there may be
  };
  static constexpr uint32_t kWindow = 8;
  static constexpr size_t kSliceBytes = size_t{256} << 10;
  // Calls of at most this many bytes are sent before the peer has entered the call.
  static constexpr size_t kEagerBytes = size_t{64} << 10;

  Rounds(Remote& remote, const Task& task);
  // With the Net's lock: begins; done() says when all has come and left.
  void start();
  bool done() const { return n_done_ == n_tiles_; }

 private:
  struct Incoming {
    uint32_t step, chunk;  // the chunk's number within the step
    const std::byte* data = nullptr;
    std::vector<std::byte> staged;
  };
  struct Coded {
    bool is_made = false;
    std::vector<std::byte> message;
  };
  struct Tile {
    uint32_t number = 0;
    size_t first = 0, last = 0;     // the steps of the round under way
    uint32_t awaited = 0;           // messages of the round that have not come
    uint32_t opening = 0;           // peers that have not opened the call
    std::vector<uint32_t> leaving;  // chunks that are being sent
    std::vector<Incoming> incoming;
    std::vector<uint32_t> sent_to, had_from;  // messages so far, by peer
    std::vector<std::byte> scratch;
    std::vector<Coded> coded;  // of each chunk that was sent, with a codec
    bool waits_for_leaving = false;
  };

  uint64_t start_of(uint32_t part) const;
  uint64_t len_of(uint32_t part) const;
  uint64_t slice_len(uint32_t part, uint32_t tile) const;
  std::byte* address(Tile& tile, uint32_t chunk);
  void find_landings();
  void begin_tile(Tile& tile);
  void next_round(Tile& tile);
  void try_round(Tile& tile);
  void send_all(Tile& tile);
  void expect_all(Tile& tile);
  void finish_round(Tile& tile);
  void do_step(Tile& tile, size_t step);
  void do_step_on_codes(Tile& tile, const Step& step, uint32_t chunk, const std::byte* incoming);
  size_t message_bytes(uint64_t n) const;
  const std::byte* outgoing(Tile& tile, uint32_t chunk);
  Remote::Key key(const Tile& tile, uint32_t index, int from) const;

  Remote& remote_;
  Task task_;
  size_t elem_size_;
  ReduceFn reduce_ = nullptr;
  uint64_t base_ = 0;  // length of equal parts
  uint64_t in_origin_ = 0, out_origin_ = 0;
  std::vector<uint32_t> repeats_;  // of each input chunk: how many before it hold its part
  std::vector<uint64_t> starts_;
  uint64_t slice_ = 1;
  std::vector<bool> lands_;  // of each step: what comes may land while the round's other steps are not done
  uint32_t n_tiles_ = 1, n_begun_ = 0, n_done_ = 0;
  bool eager_ = false;
  std::vector<Tile> tiles_;  // the window; one that ends begins as the next
};

}  // namespace pycomm
