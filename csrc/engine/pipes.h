// Pipes: the rings of cells through which send and recv move their messages (engine/p2p.h).
//
// Each rank owns a *pipe* to every rank, itself included: kCells cells in its arena, filled by it and drained
// by the other. A message is cut into cells of at most kCellBytes; the first carries tag, dtype and size.
// Both counters only rise, so cell number i lies at i modulo kCells, and the pipe is full when they differ by
// kCells. The pipes are allocated at the first send; before that their offset in the control block is 0.
//
// Every rank has one *bell* in its control block, rung by whoever has filled or drained a cell of a pipe
// between the two; a rank that waits for any of its pipes sleeps on it.
// One thread at a time on each end of a pipe (PointToPoint's mutex sees to that).
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/group.h"

namespace pycomm {

inline constexpr uint64_t kCells = 8;
inline constexpr size_t kCellBytes = size_t{32} << 10;

struct CellHeader {
  uint64_t message_bytes;  // of the whole message
  uint32_t n_bytes;        // in this cell
  int32_t tag;
  uint32_t dtype;
  uint32_t first;  // 1: a message begins
};

struct alignas(64) Cell {
  CellHeader header;
  std::byte data[kCellBytes];
};

class Pipe {
 public:
  void clear();
  // The owner's end: the next cell to fill, null while the pipe is full; and its hand-over.
  Cell* to_fill();
  void filled();
  // The other end: the next cell to drain, null while the pipe is empty; and its return.
  const Cell* to_drain() const;
  void drained();

 private:
  Flag filled_;   // cells filled since the beginning
  Flag drained_;  // cells drained
  Cell cells_[kCells];
};

class Pipes {
 public:
  explicit Pipes(Group& group) : group_(group) {}
  // Allocates our pipes and shows them to the peers. Does nothing the second time.
  Status open();
  // Null until the sender has opened its pipes.
  Pipe* to(int peer) const { return pipe(group_.rank(), peer); }
  Pipe* from(int peer) const { return pipe(peer, group_.rank()); }
  void ring(int peer);

 private:
  Pipe* pipe(int owner, int to) const;

  Group& group_;
  uint64_t offset_ = 0;  // of ours
};

}  // namespace pycomm
