#include "engine/pipes.h"

namespace pycomm {

void Pipe::clear() {
  filled_.word.store(0, std::memory_order_relaxed);
  drained_.word.store(0, std::memory_order_relaxed);
}

Cell* Pipe::to_fill() {
  const uint64_t at = filled_.word.load(std::memory_order_relaxed);
  if (at - drained_.word.load(std::memory_order_acquire) >= kCells) return nullptr;
  return &cells_[at % kCells];
}

void Pipe::filled() {
  filled_.word.store(filled_.word.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

const Cell* Pipe::to_drain() const {
  const uint64_t at = drained_.word.load(std::memory_order_relaxed);
  if (filled_.word.load(std::memory_order_acquire) == at) return nullptr;
  return &cells_[at % kCells];
}

void Pipe::drained() {
  drained_.word.store(drained_.word.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

Status Pipes::open() {
  if (offset_ != 0) return Status();
  PYCOMM_RETURN_IF_ERROR(
      group_.node()->arena()->allocate(sizeof(Pipe) * static_cast<size_t>(group_.size()), &offset_));
  auto* const mine = reinterpret_cast<Pipe*>(group_.arena_base(group_.rank()) + offset_);
  for (int q = 0; q < group_.size(); q++) mine[q].clear();  // the block may be recycled memory
  group_.own().pipes.word.store(offset_, std::memory_order_release);
  return Status();
}

Pipe* Pipes::pipe(int owner, int to) const {
  const uint64_t offset =
      owner == group_.rank() ? offset_ : group_.control(owner).pipes.word.load(std::memory_order_acquire);
  if (offset == 0) return nullptr;
  return reinterpret_cast<Pipe*>(group_.arena_base(owner) + offset) + to;
}

void Pipes::ring(int peer) {
  Control& c = group_.control(peer);
  c.bell.word.fetch_add(1, std::memory_order_seq_cst);
  if (c.bell_sleepers.word.load(std::memory_order_seq_cst) != 0) futex_wake_all(c.bell.word, Half::kLow);
}

}  // namespace pycomm
