#include "engine/cuda/round_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "engine/fuse.h"
#include "kernels/cuda/kernels.h"

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
    *n_staging = std::max(*n_staging, n);
    batch();
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
    std::vector<size_t> level(instrs_.size());
    std::map<std::pair<size_t, int>, Batch> batches;
    for (size_t k = 0; k < instrs_.size(); k++) {
      const Instr& instr = instrs_[k];
      for (size_t j = 0; j < k; j++) {
        if (conflict(instrs_[j], instr)) level[k] = std::max(level[k], level[j] + 1);
      }
      LocalStep step{instr.dsts[0].chunk, {}};
      for (const Ref r : instr.srcs) step.srcs.push_back(operand(r));
      const bool has_landed = step.srcs.size() == 1 && !step.srcs[0].staged && step.srcs[0].at == step.dst;
      if (has_landed) continue;
      const int n_srcs = static_cast<int>(step.srcs.size());
      Batch& b = batches[{level[k], n_srcs}];
      b.n_srcs = n_srcs;
      b.steps.push_back(std::move(step));
    }
    for (auto& [key, b] : batches) round_.batches.push_back(std::move(b));
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
  std::vector<Ref> incoming_;  // of each receive, the peer's chunk
  PlanRound round_;
};

Status check_sources(const RoundPlan& plan) {
  for (const PlanRound& round : plan.rounds) {
    for (const Batch& b : round.batches) {
      if (b.n_srcs <= kMaxReduceSrcs) continue;
      return Status::error(
          Code::kSchedule,
          format("%s/%s of %d ranks combines %d operands at once, and the CUDA kernels take %d; use "
                 "another algorithm (%s)",
                 collective_name(plan.collective), plan.algorithm, plan.n_ranks, b.n_srcs, kMaxReduceSrcs,
                 known_algorithms(plan.collective).c_str()));
    }
  }
  return Status();
}

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
    for (const Instr& i : instrs) plan.complete &= i.srcs.size() == 1 || is_complete(i, schedules);
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
  PYCOMM_RETURN_IF_ERROR(check_sources(plan));
  *out = std::move(plan);
  return Status();
}

}  // namespace pycomm::cuda
