#include "engine/fuse.h"

#include <algorithm>
#include <bit>
#include <optional>

namespace pycomm {

SendTable::SendTable(const std::vector<Schedule>& schedules) {
  for (const Schedule& s : schedules) {
    for (const Step& step : s.steps) {
      if (step.op() != StepOp::kSend) continue;
      auto& list = chunks_[{s.rank, static_cast<int>(step.peer)}];
      for (uint32_t i = 0; i < step.n_chunks; i++) list.push_back(step.src + i);
    }
  }
}

bool SendTable::find(int from, int to, size_t k, uint32_t* chunk) const {
  const auto it = chunks_.find({from, to});
  if (it == chunks_.end() || k >= it->second.size()) return false;
  *chunk = it->second[k];
  return true;
}

namespace {

// One step on one chunk, with the peer's chunk resolved.
struct Move {
  StepOp op;
  bool src_left;
  uint32_t round, src, dst;
  Ref incoming;
};

struct Expr {
  Ref leaf{-1, 0};
  int left = -1, right = -1;
};

// The canonical tree's split: how many of n operands go left.
uint32_t canonical_left(uint32_t n) {
  const uint32_t p = std::bit_floor(n);
  return std::min(p, n - p / 2);
}

class Round {
 public:
  Round(const Schedule& s, const std::vector<uint32_t>& loc) : s_(s), loc_(loc) {}

  void add(const Move& m) {
    moves_.push_back(m);
    const int incoming = m.op == StepOp::kRecv || m.op == StepOp::kRecvReduce ? leaf(m.incoming) : -1;
    int value = -1;
    switch (m.op) {
      case StepOp::kSend: return;
      case StepOp::kRecv: value = incoming; break;
      case StepOp::kCopy: value = read(m.src); break;
      case StepOp::kRecvReduce:
        value = m.src_left ? node(read(m.src), incoming) : node(incoming, read(m.src));
        break;
      case StepOp::kReduce:
        value = m.src_left ? node(read(m.src), read(m.dst)) : node(read(m.dst), read(m.src));
        break;
    }
    std::erase_if(written_, [&](const auto& w) { return w.first == m.dst; });
    written_.emplace_back(m.dst, value);
  }

  // `used_later` says for each scratch chunk whether a later round reads it.
  void flush(const std::vector<uint8_t>& used_later, uint32_t round, std::vector<Instr>* out) {
    std::erase_if(written_,
                  [&](const auto& w) { return w.first >= s_.n_in + s_.n_out && !used_later[w.first]; });
    std::vector<Instr> fused;
    if (!order(&fused, round)) {
      stepwise(round, out);
      return;
    }
    for (Instr& i : fused) out->push_back(std::move(i));
  }

 private:
  int leaf(Ref r) {
    pool_.push_back({r, -1, -1});
    return static_cast<int>(pool_.size()) - 1;
  }
  int node(int l, int r) {
    pool_.push_back({{-1, 0}, l, r});
    return static_cast<int>(pool_.size()) - 1;
  }
  int read(uint32_t chunk) {
    // In place a chunk may have been written under its other name.
    for (auto it = written_.rbegin(); it != written_.rend(); ++it) {
      if (loc_[it->first] == loc_[chunk]) return it->second;
    }
    return leaf({s_.rank, chunk});
  }

  void collect(int e, std::vector<Ref>* leaves) const {
    if (pool_[e].left < 0) {
      leaves->push_back(pool_[e].leaf);
      return;
    }
    collect(pool_[e].left, leaves);
    collect(pool_[e].right, leaves);
  }
  uint32_t count(int e) const { return pool_[e].left < 0 ? 1 : count(pool_[e].left) + count(pool_[e].right); }
  bool canonical(int e) const {
    if (pool_[e].left < 0) return true;
    return count(pool_[e].left) == canonical_left(count(e)) && canonical(pool_[e].left) &&
           canonical(pool_[e].right);
  }

  // One instruction for each written chunk, a chunk whose old value is still to be read after its readers.
  // False when that has no order, or a value is not a canonical tree.
  bool order(std::vector<Instr>* fused, uint32_t round) const {
    std::vector<Instr> todo;
    for (const auto& [chunk, e] : written_) {
      if (!canonical(e)) return false;
      Instr i;
      i.round = round;
      i.dsts = {{s_.rank, chunk}};
      collect(e, &i.srcs);
      const bool no_op =
          i.srcs.size() == 1 && i.srcs[0].rank == s_.rank && loc_[i.srcs[0].chunk] == loc_[chunk];
      if (!no_op) todo.push_back(std::move(i));
    }
    const auto reads = [&](const Instr& i, uint32_t location) {
      return std::any_of(i.srcs.begin(), i.srcs.end(),
                         [&](Ref r) { return r.rank == s_.rank && loc_[r.chunk] == location; });
    };
    while (!todo.empty()) {
      bool moved = false;
      for (size_t k = 0; k < todo.size() && !moved; k++) {
        const uint32_t location = loc_[todo[k].dsts[0].chunk];
        bool blocked = false;
        for (size_t j = 0; j < todo.size(); j++) blocked = blocked || (j != k && reads(todo[j], location));
        if (blocked) continue;
        fused->push_back(std::move(todo[k]));
        todo.erase(todo.begin() + static_cast<std::ptrdiff_t>(k));
        moved = true;
      }
      if (!moved) return false;
    }
    return true;
  }

  void stepwise(uint32_t round, std::vector<Instr>* out) const {
    for (const Move& m : moves_) {
      Instr i;
      i.round = round;
      i.dsts = {{s_.rank, m.dst}};
      const Ref src{s_.rank, m.src}, dst{s_.rank, m.dst};
      switch (m.op) {
        case StepOp::kSend: continue;
        case StepOp::kRecv: i.srcs = {m.incoming}; break;
        case StepOp::kCopy: i.srcs = {src}; break;
        case StepOp::kRecvReduce:
          i.srcs = m.src_left ? std::vector{src, m.incoming} : std::vector{m.incoming, src};
          break;
        case StepOp::kReduce: i.srcs = m.src_left ? std::vector{src, dst} : std::vector{dst, src}; break;
      }
      out->push_back(std::move(i));
    }
  }

  const Schedule& s_;
  const std::vector<uint32_t>& loc_;
  std::vector<Move> moves_;
  std::vector<Expr> pool_;
  std::vector<std::pair<uint32_t, int>> written_;  // chunk, expression; in order of the last write
};

// last_read[c]: the last round in which chunk c is a source, plus one.
std::vector<uint32_t> last_reads(const Schedule& s) {
  std::vector<uint32_t> last(s.n_chunks());
  const auto note = [&](uint32_t chunk, uint32_t round) { last[chunk] = std::max(last[chunk], round + 1); };
  for (const Step& step : s.steps) {
    for (uint32_t i = 0; i < step.n_chunks; i++) {
      const auto round = static_cast<uint32_t>(step.round);
      if (step.op() != StepOp::kRecv) note(step.src + i, round);
      if (step.op() == StepOp::kReduce) note(step.dst + i, round);
    }
  }
  return last;
}

}  // namespace

Status fuse(const Schedule& s, const SendTable& sends, const std::vector<uint32_t>& locations,
            std::vector<Instr>* out) {
  const std::vector<uint32_t> last = last_reads(s);
  std::map<int, size_t> received;
  for (size_t at = 0; at < s.steps.size();) {
    const auto round = static_cast<uint32_t>(s.steps[at].round);
    Round values(s, locations);
    for (; at < s.steps.size() && s.steps[at].round == round; at++) {
      const Step& step = s.steps[at];
      for (uint32_t i = 0; i < step.n_chunks; i++) {
        Move m{step.op(), step.src_left(), round, step.src + i, step.dst + i, {-1, 0}};
        if (m.op == StepOp::kRecv || m.op == StepOp::kRecvReduce) {
          m.incoming.rank = static_cast<int>(step.peer);
          if (!sends.find(m.incoming.rank, s.rank, received[m.incoming.rank]++, &m.incoming.chunk)) {
            return Status::error(
                Code::kSchedule,
                format("rank %d receives from rank %d, which sends nothing more", s.rank, m.incoming.rank));
          }
        }
        values.add(m);
      }
    }
    std::vector<uint8_t> used_later(s.n_chunks());
    for (uint32_t c = 0; c < s.n_chunks(); c++) used_later[c] = last[c] > round + 1;
    values.flush(used_later, round, out);
  }
  return Status();
}

}  // namespace pycomm
