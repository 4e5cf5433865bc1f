#include "engine/cuda/round_plan.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "engine/fuse.h"
#include "kernels/cuda/kernels.h"
#include "schedule/builder.h"

namespace pycomm::cuda {

namespace {

// In place, the input and the output chunk of a part are one place.
std::vector<uint32_t> locations_of(const Schedule& s, bool in_place) {
  std::vector<uint32_t> at(s.n_chunks());
  for (uint32_t c = 0; c < s.n_chunks(); c++) at[c] = c;
  for (uint32_t i = 0; in_place && i < s.n_in; i++) {
    for (uint32_t o = 0; o < s.n_out; o++) {
      if (s.part[s.in(i)] == s.part[s.out(o)]) at[s.out(o)] = i;
    }
  }
  return at;
}

// Does the reduction combine every rank's input, in the order of ranks?
bool is_complete(const Instr& instr, const std::vector<Schedule>& schedules) {
  if (instr.srcs.size() != schedules.size()) return false;
  for (size_t q = 0; q < instr.srcs.size(); q++) {
    const Ref x = instr.srcs[q];
    if (x.rank != static_cast<int>(q) || x.chunk >= schedules[q].n_in) return false;
  }
  return true;
}

// One round of one rank, from its schedule's steps and their fused form.
class RoundMaker {
 public:
  RoundMaker(const Schedule& s, const std::vector<uint32_t>& at, std::vector<Instr> instrs)
      : s_(s), at_(at), instrs_(std::move(instrs)) {}

  void send(const Step& step) {
    for (uint32_t i = 0; i < step.n_chunks; i++)
      round_.sends.push_back({static_cast<int>(step.peer), step.src + i});
  }
  // What comes is the peer's chunk `theirs`, meant for this rank's chunk `dst`.
  void receive(int peer, uint32_t theirs, uint32_t dst) {
    incoming_.push_back({peer, theirs});
    round_.recvs.push_back({peer, s_.part[dst], {}});
  }

  PlanRound finish(uint32_t* n_staging) {
    std::vector<bool> landed(incoming_.size());
    for (size_t k = 0; k < instrs_.size(); k++) land(k, &landed);
    uint32_t n = 0;
    for (size_t i = 0; i < landed.size(); i++) {
      if (!landed[i]) round_.recvs[i].place = {true, n++};
    }
    n_staged_ = n;
    batch();
    *n_staging = std::max(*n_staging, n_staged_);
    return std::move(round_);
  }

 private:
  bool own(Ref r) const { return r.rank == s_.rank; }
  // The receive that brings a peer's chunk.
  size_t find(Ref r) const {
    return static_cast<size_t>(std::find(incoming_.begin(), incoming_.end(), r) - incoming_.begin());
  }

  // Lets the first thing that instruction k takes from a peer land in its destination, if nobody minds.
  void land(size_t k, std::vector<bool>* landed) {
    const Instr& instr = instrs_[k];
    const uint32_t dst = instr.dsts[0].chunk;
    size_t lands = incoming_.size();
    for (const Ref r : instr.srcs) {
      if (!own(r)) lands = std::min(lands, find(r));
    }
    if (lands == incoming_.size() || (*landed)[lands]) return;
    for (size_t j = 0; j < instrs_.size(); j++) {
      if (j != k && at_[instrs_[j].dsts[0].chunk] == at_[dst]) return;
      for (const Ref r : instrs_[j].srcs) {
        if (own(r) ? at_[r.chunk] == at_[dst] : j != k && find(r) == lands) return;
      }
    }
    (*landed)[lands] = true;
    round_.recvs[lands].place = {false, dst};
  }

  Operand operand(Ref r) const { return own(r) ? Operand{false, r.chunk} : round_.recvs[find(r)].place; }

  // Greedily: a step goes into the first batch after all those that it must follow.
  void batch() {
    std::vector<size_t> last(instrs_.size());  // the level of each one's result
    for (size_t k = 0; k < instrs_.size(); k++) {
      const Instr& instr = instrs_[k];
      size_t level = 0;
      for (size_t j = 0; j < k; j++) {
        if (conflict(instrs_[j], instr)) level = std::max(level, last[j] + 1);
      }
      const uint32_t dst = instr.dsts[0].chunk;
      std::vector<Operand> srcs;
      for (const Ref r : instr.srcs) srcs.push_back(operand(r));
      const bool has_landed = srcs.size() == 1 && !srcs[0].staged && srcs[0].at == dst;
      last[k] = has_landed ? level : reduce({false, dst}, s_.part[dst], srcs, level);
    }
    for (auto& [key, b] : batches_) round_.batches.push_back(std::move(b));
  }
  // dst = T of the sources, from batch `level` on; the batch in which that is done.
  size_t reduce(Operand dst, uint32_t part, std::span<const Operand> srcs, size_t level) {
    std::vector<Operand> operands(srcs.begin(), srcs.end());
    if (srcs.size() > kMaxReduceSrcs) {
      const auto left = static_cast<size_t>(canonical_left(static_cast<int>(srcs.size())));
      operands = {{true, n_staged_}, {true, n_staged_ + 1}};
      n_staged_ += 2;
      const size_t first = reduce(operands[0], part, srcs.first(left), level);
      level = std::max(first, reduce(operands[1], part, srcs.subspan(left), level)) + 1;
    }
    const int n_srcs = static_cast<int>(operands.size());
    Batch& b = batches_[{level, n_srcs}];
    b.n_srcs = n_srcs;
    b.steps.push_back({dst, part, std::move(operands)});
    return level;
  }
  bool conflict(const Instr& before, const Instr& after) const {
    const auto reads = [&](const Instr& i, uint32_t place) {
      return std::any_of(i.srcs.begin(), i.srcs.end(),
                         [&](Ref r) { return own(r) && at_[r.chunk] == place; });
    };
    const uint32_t first = at_[before.dsts[0].chunk], second = at_[after.dsts[0].chunk];
    return first == second || reads(after, first) || reads(before, second);
  }

  const Schedule& s_;
  const std::vector<uint32_t>& at_;
  std::vector<Instr> instrs_;
  std::vector<Ref> incoming_;                        // of each receive, the peer's chunk
  std::map<std::pair<size_t, int>, Batch> batches_;  // by level and number of sources
  uint32_t n_staged_ = 0;                            // places in staging so far
  PlanRound round_;
};

}  // namespace

Status make_round_plan(const Algorithm& a, int rank, int n_ranks, int root, int n_chunks, bool in_place,
                       RoundPlan* out) {
  if (in_place && !a.in_place) {
    return Status::error(Code::kSchedule,
                         format("%s/%s cannot run in place", collective_name(a.collective), a.name));
  }
  std::vector<Schedule> schedules(static_cast<size_t>(n_ranks));
  for (int q = 0; q < n_ranks; q++)
    PYCOMM_RETURN_IF_ERROR(build_schedule(a, q, n_ranks, root, n_chunks, &schedules[static_cast<size_t>(q)]));
  const SendTable sends(schedules);
  RoundPlan plan;
  plan.complete = true;
  std::vector<Instr> mine;
  for (const Schedule& s : schedules) {
    std::vector<Instr> instrs;
    PYCOMM_RETURN_IF_ERROR(fuse(s, sends, locations_of(s, in_place), &instrs));
    for (const Instr& i : instrs) {
      plan.complete &= i.srcs.size() == 1 || is_complete(i, schedules);
      plan.cut |= i.srcs.size() > kMaxReduceSrcs;
    }
    if (s.rank == rank) mine = std::move(instrs);
  }

  const Schedule& s = schedules[static_cast<size_t>(rank)];
  const std::vector<uint32_t> at = locations_of(s, in_place);
  plan.collective = a.collective;
  plan.algorithm = a.name;
  plan.rank = rank;
  plan.n_ranks = n_ranks;
  plan.root = root;
  plan.in_place = in_place;
  plan.deterministic = a.deterministic;
  plan.n_parts = s.n_parts;
  plan.n_in = s.n_in;
  plan.n_out = s.n_out;
  plan.n_scratch = s.n_scratch;
  plan.part = s.part;
  std::map<int, size_t> received;
  for (size_t i = 0, k = 0; i < s.steps.size();) {
    const auto number = static_cast<uint32_t>(s.steps[i].round);
    std::vector<Instr> instrs;
    for (; k < mine.size() && mine[k].round == number; k++) instrs.push_back(std::move(mine[k]));
    RoundMaker round(s, at, std::move(instrs));
    for (; i < s.steps.size() && s.steps[i].round == number; i++) {
      const Step& step = s.steps[i];
      if (step.op() == StepOp::kSend) round.send(step);
      if (step.op() != StepOp::kRecv && step.op() != StepOp::kRecvReduce) continue;
      for (uint32_t c = 0; c < step.n_chunks; c++) {
        const int peer = static_cast<int>(step.peer);
        uint32_t theirs = 0;
        (void)sends.find(peer, rank, received[peer]++, &theirs);  // fuse has found it, too
        round.receive(peer, theirs, step.dst + c);
      }
    }
    plan.rounds.push_back(round.finish(&plan.n_staging));
  }
  plan.complete &= !plan.cut;
  *out = std::move(plan);
  return Status();
}

}  // namespace pycomm::cuda
