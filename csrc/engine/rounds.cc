#include "engine/rounds.h"

#include <algorithm>
#include <cstring>

namespace pycomm {

Rounds::Rounds(Remote& remote, const Task& task)
    : remote_(remote), task_(task), elem_size_(dtype_size(task.dtype)) {
  const Schedule& s = *task_.schedule;
  reduce_ = find_reduce(task_.dtype, task_.op);
  uint64_t longest = 0;
  if (task_.counts.empty()) {
    const uint64_t line = std::max<uint64_t>(1, 64 / elem_size_);
    base_ = s.n_parts <= 1 ? task_.count : (task_.count + s.n_parts - 1) / s.n_parts;
    if (s.n_parts > 1) base_ = (base_ + line - 1) / line * line;
    longest = std::min(base_, task_.count);
  } else {
    uint64_t at = 0;
    for (const uint64_t c : task_.counts) {
      starts_.push_back(at);
      at += c;
      longest = std::max(longest, c);
    }
  }
  const auto origin = [&](uint32_t first, uint32_t n) {
    uint64_t at = ~uint64_t{0};
    for (uint32_t c = first; c < first + n; c++) at = std::min(at, start_of(s.part[c]));
    return n == 0 ? 0 : at;
  };
  in_origin_ = origin(0, s.n_in);
  for (uint32_t c = 0; c < s.n_in; c++)
    repeats_.push_back(static_cast<uint32_t>(std::count(s.part.begin(), s.part.begin() + c, s.part[c])));
  out_origin_ = origin(s.n_in, s.n_out);
  slice_ = std::max<uint64_t>(1, std::min<uint64_t>(longest, kSliceBytes / elem_size_));
  n_tiles_ = static_cast<uint32_t>(std::max<uint64_t>(1, (longest + slice_ - 1) / slice_));
  eager_ = task_.count * elem_size_ <= kEagerBytes;
}

uint64_t Rounds::start_of(uint32_t part) const {
  return starts_.empty() ? std::min(task_.count, base_ * part) : starts_[part];
}

uint64_t Rounds::len_of(uint32_t part) const {
  if (!starts_.empty()) return task_.counts[part];
  const uint64_t at = base_ * part;
  return at >= task_.count ? 0 : std::min(base_, task_.count - at);
}

uint64_t Rounds::slice_len(uint32_t part, uint32_t tile) const {
  const uint64_t len = len_of(part), at = slice_ * tile;
  return at >= len ? 0 : std::min(slice_, len - at);
}

// Of the tile's slice of a chunk.
std::byte* Rounds::address(Tile& tile, uint32_t chunk) {
  const Schedule& s = *task_.schedule;
  const uint64_t slice_at = slice_ * tile.number;
  if (chunk >= s.n_in + s.n_out)
    return tile.scratch.data() + (chunk - s.n_in - s.n_out) * slice_ * elem_size_;
  const bool in = chunk < s.n_in;
  const uint64_t at = start_of(s.part[chunk]) - (in ? in_origin_ : out_origin_) + slice_at;
  const uint64_t repeat_bytes = in ? repeats_[chunk] * task_.in_stride_bytes : 0;
  return (in ? task_.in : task_.out) + at * elem_size_ + repeat_bytes;
}

void Rounds::start() {
  const Schedule& s = *task_.schedule;
  if (!eager_) {
    std::vector<bool> told(static_cast<size_t>(s.n_ranks));
    for (const Step& step : s.steps) {
      const bool comes = step.op() == StepOp::kRecv || step.op() == StepOp::kRecvReduce;
      if (!comes || told[step.peer]) continue;
      told[step.peer] = true;
      remote_.open(task_.members[step.peer]);
    }
  }
  find_landings();
  tiles_.resize(std::min(kWindow, n_tiles_));
  while (n_begun_ < tiles_.size()) begin_tile(tiles_[n_begun_]);
}

void Rounds::begin_tile(Tile& tile) {
  tile.number = n_begun_++;
  tile.first = tile.last = 0;
  tile.sent_to.assign(static_cast<size_t>(task_.schedule->n_ranks), 0);
  tile.had_from.assign(static_cast<size_t>(task_.schedule->n_ranks), 0);
  tile.scratch.resize(task_.schedule->n_scratch * slice_ * elem_size_);
  tile.coded.resize(task_.codec.is_active() ? task_.schedule->n_chunks() : 0);
  for (Coded& c : tile.coded) c.is_made = false;
  next_round(tile);
}

void Rounds::next_round(Tile& tile) {
  const std::vector<Step>& steps = task_.schedule->steps;
  tile.first = tile.last;
  while (tile.last < steps.size() && steps[tile.last].round == steps[tile.first].round) tile.last++;
  try_round(tile);
}

// Begins the round when nothing that it writes is being sent; ends the tile when there is no round left.
void Rounds::try_round(Tile& tile) {
  const std::vector<Step>& steps = task_.schedule->steps;
  tile.waits_for_leaving = false;
  const bool over = tile.first == steps.size();
  bool conflict = over && !tile.leaving.empty();
  const bool sends_memory = !task_.codec.is_active();
  for (size_t i = tile.first; i < tile.last && sends_memory && !conflict; i++) {
    if (steps[i].op() == StepOp::kSend) continue;
    for (uint32_t c = 0; c < steps[i].n_chunks && !conflict; c++) {
      std::byte* const to = address(tile, steps[i].dst + c);
      conflict = std::any_of(tile.leaving.begin(), tile.leaving.end(),
                             [&](uint32_t chunk) { return address(tile, chunk) == to; });
    }
  }
  if (conflict) {
    tile.waits_for_leaving = true;
    return;
  }
  if (over) {
    n_done_++;
    if (n_begun_ < n_tiles_) begin_tile(tile);
    return;
  }
  expect_all(tile);
}

Remote::Key Rounds::key(const Tile& tile, uint32_t index, int from) const {
  return {task_.call, task_.run, tile.number, index, from};
}

// A recv may land at once when no other step of its round touches that memory: the others are done later, in
// their order. In place, an input and an output chunk are the same memory.
void Rounds::find_landings() {
  const Schedule& s = *task_.schedule;
  Tile first;  // any tile will do: slices lie alike
  first.scratch.resize(s.n_scratch * slice_ * elem_size_ + 1);
  lands_.assign(s.steps.size(), false);
  const auto touches = [&](const Step& other, const std::byte* memory) {
    for (uint32_t c = 0; c < other.n_chunks; c++) {
      if (address(first, other.dst + c) == memory) return true;
      if (other.op() != StepOp::kRecv && address(first, other.src + c) == memory) return true;
    }
    return false;
  };
  for (size_t i = 0; i < s.steps.size(); i++) {
    const Step& mine = s.steps[i];
    if (mine.op() != StepOp::kRecv) continue;
    bool alone = true;
    for (size_t j = 0; j < s.steps.size() && alone; j++) {
      if (j == i || s.steps[j].round != mine.round || s.steps[j].op() == StepOp::kSend) continue;
      for (uint32_t c = 0; c < mine.n_chunks && alone; c++) {
        // An empty part shares its address with the next one, and nothing lands there.
        if (len_of(s.part[mine.dst + c]) > 0) alone = !touches(s.steps[j], address(first, mine.dst + c));
      }
    }
    lands_[i] = alone;
  }
}

// The round's sends, then what it expects. A function that ends a receive may run at once: the message may
// be there. `awaited` counts one more until all are expected, so that the round does not end before.
void Rounds::expect_all(Tile& tile) {
  const std::vector<Step>& steps = task_.schedule->steps;
  tile.awaited = 1;
  size_t n_incoming = 0;
  for (size_t i = tile.first; i < tile.last; i++) {
    if (steps[i].op() == StepOp::kRecv || steps[i].op() == StepOp::kRecvReduce)
      n_incoming += steps[i].n_chunks;
  }
  if (tile.incoming.size() < n_incoming) tile.incoming.resize(n_incoming);
  send_all(tile);
  size_t at = 0;
  for (size_t i = tile.first; i < tile.last; i++) {
    const Step& s = steps[i];
    if (s.op() != StepOp::kRecv && s.op() != StepOp::kRecvReduce) continue;
    const bool direct = lands_[i] && !task_.codec.is_active();
    for (uint32_t c = 0; c < s.n_chunks; c++) {
      Incoming& in = tile.incoming[at++];
      in.step = static_cast<uint32_t>(i);
      in.chunk = c;
      const size_t n_bytes = message_bytes(slice_len(task_.schedule->part[s.dst + c], tile.number));
      std::byte* to = address(tile, s.dst + c);
      if (!direct) {
        if (in.staged.size() < n_bytes) in.staged.resize(n_bytes);
        to = in.staged.data();
      }
      tile.awaited++;
      remote_.expect(key(tile, tile.had_from[s.peer]++, task_.members[s.peer]), to, n_bytes,
                     [this, &tile, &in](const std::byte* data) {
                       in.data = data;
                       if (--tile.awaited == 0) finish_round(tile);
                     });
    }
  }
  if (--tile.awaited == 0) finish_round(tile);
}

void Rounds::send_all(Tile& tile) {
  const std::vector<Step>& steps = task_.schedule->steps;
  for (size_t i = tile.first; i < tile.last; i++) {
    const Step& s = steps[i];
    if (s.op() != StepOp::kSend) continue;
    for (uint32_t c = 0; c < s.n_chunks; c++) {
      const uint32_t chunk = s.src + c;
      const int to = task_.members[s.peer];
      const Remote::Key k = key(tile, tile.sent_to[s.peer]++, to);
      const std::byte* data = outgoing(tile, chunk);
      const size_t n_bytes = message_bytes(slice_len(task_.schedule->part[chunk], tile.number));
      tile.leaving.push_back(chunk);
      const auto left = [this, &tile, chunk] {
        tile.leaving.erase(std::find(tile.leaving.begin(), tile.leaving.end(), chunk));
        if (tile.waits_for_leaving) try_round(tile);
      };
      const auto send = [this, to, k, data, n_bytes, left] {
        remote_.send(to, k, data, n_bytes, left, task_.n_sockets);
      };
      if (eager_)
        send();
      else
        remote_.when_opened(to, send);
    }
  }
}

size_t Rounds::message_bytes(uint64_t n) const {
  return task_.codec.is_active() ? task_.codec.message_bytes(n) : n * elem_size_;
}

// What is sent of a chunk. An output stays on this rank, too: it becomes what its codes say.
const std::byte* Rounds::outgoing(Tile& tile, uint32_t chunk) {
  if (!task_.codec.is_active()) return address(tile, chunk);
  Coded& coded = tile.coded[chunk];
  if (coded.is_made) return coded.message.data();
  coded.is_made = true;
  const uint32_t part = task_.schedule->part[chunk];
  const uint64_t n = slice_len(part, tile.number);
  coded.message.resize(std::max(coded.message.size(), message_bytes(n)));
  task_.codec.encode(coded.message.data(), reinterpret_cast<float*>(address(tile, chunk)), n,
                     start_of(part) + slice_ * tile.number, chunk >= task_.schedule->n_in);
  return coded.message.data();
}

void Rounds::finish_round(Tile& tile) {
  for (size_t i = tile.first; i < tile.last; i++) do_step(tile, i);
  next_round(tile);
}

void Rounds::do_step(Tile& tile, size_t at) {
  const Step& s = task_.schedule->steps[at];
  for (uint32_t c = 0; c < s.n_chunks; c++) {
    if (s.op() == StepOp::kSend) continue;
    std::byte* const dst = address(tile, s.dst + c);
    const uint64_t n = slice_len(task_.schedule->part[s.dst + c], tile.number);
    const std::byte* incoming = nullptr;
    if (s.op() == StepOp::kRecv || s.op() == StepOp::kRecvReduce) {
      const auto found = std::find_if(tile.incoming.begin(), tile.incoming.end(),
                                      [&](const Incoming& in) { return in.step == at && in.chunk == c; });
      incoming = found->data;  // there is one: the round ends when all have come
    }
    if (n == 0) continue;
    if (task_.codec.is_active()) {
      do_step_on_codes(tile, s, c, incoming);
      continue;
    }
    const std::byte* const src = s.op() == StepOp::kRecv ? nullptr : address(tile, s.src + c);
    const auto combine = [&](const void* other, const void* own) {
      const void* srcs[2] = {s.src_left() ? own : other, s.src_left() ? other : own};
      void* to = dst;
      reduce_(&to, 1, srcs, 2, n, 1.0);
    };
    switch (s.op()) {
      case StepOp::kRecv:
        if (incoming != dst) std::memcpy(dst, incoming, n * elem_size_);
        break;
      case StepOp::kRecvReduce: combine(incoming, src); break;
      case StepOp::kReduce: combine(dst, src); break;
      case StepOp::kCopy:
        if (dst != src) std::memmove(dst, src, n * elem_size_);
        break;
      case StepOp::kSend: break;
    }
  }
}

// As do_step, of one chunk; what comes is codes, and a copy of what was sent is what its codes say.
void Rounds::do_step_on_codes(Tile& tile, const Step& s, uint32_t c, const std::byte* incoming) {
  float* const dst = reinterpret_cast<float*>(address(tile, s.dst + c));
  const float* const src =
      s.op() == StepOp::kRecv ? nullptr : reinterpret_cast<float*>(address(tile, s.src + c));
  const uint64_t n = slice_len(task_.schedule->part[s.dst + c], tile.number);
  const auto combine = [&](const float* other, const float* own, uint64_t at, uint64_t m) {
    const void* srcs[2] = {s.src_left() ? own : other, s.src_left() ? other : own};
    void* to = dst + at;
    reduce_(&to, 1, srcs, 2, m, 1.0);
  };
  switch (s.op()) {
    case StepOp::kRecv: task_.codec.decode(dst, incoming, n, 0, n); break;
    case StepOp::kRecvReduce:
      for (uint64_t at = 0; at < n; at += Codec::kPiece) {
        float piece[Codec::kPiece];
        const uint64_t m = std::min(Codec::kPiece, n - at);
        task_.codec.decode(piece, incoming, n, at, m);
        combine(piece, src + at, at, m);
      }
      break;
    case StepOp::kReduce: combine(dst, src, 0, n); break;
    case StepOp::kCopy:
      if (const Coded& coded = tile.coded[s.src + c]; coded.is_made)
        task_.codec.decode(dst, coded.message.data(), n, 0, n);
      else if (dst != src)
        std::memmove(dst, src, n * sizeof(float));
      break;
    case StepOp::kSend: break;
  }
}

}  // namespace pycomm
