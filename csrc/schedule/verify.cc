// The verifier's second half: runs all ranks' steps round by round on symbols, and judges what comes out.
//
// A round: first every send takes the value its chunk held before the round, then every rank applies its
// steps in list order. Chunks are looked up by place, so the in-place binding is run as it will be executed.
#include "schedule/verify.h"

#include <algorithm>
#include <unordered_map>

#include "schedule/builder.h"
#include "schedule/print.h"
#include "schedule/values.h"
#include "schedule/verify_form.h"

namespace pycomm {

std::string Violation::text() const {
  std::string who;
  if (rank >= 0) who += format("rank %d, ", rank);
  if (index >= 0) who += format("step %d (round %d: %s), ", index, round, step.c_str());
  if (who.empty()) return what;
  who.resize(who.size() - 2);
  return who + ": " + what;
}

namespace {

class Verifier {
 public:
  Verifier(std::span<const Schedule> schedules, const Claim& claim)
      : all_(schedules), claim_(claim), n_(static_cast<int>(schedules.size())), values_(n_) {}

  Proof run() {
    for (const Schedule& s : all_) proof_.n_steps += static_cast<int64_t>(s.steps.size());
    FormChecker form(all_, claim_, &proof_.violation);
    proof_.ok = form.check_form() && form.check_pairing(&partner_) && check_values();
    return std::move(proof_);
  }

 private:
  bool fail(int rank, int index, std::string what) {
    return blame(all_, rank, index, std::move(what), &proof_.violation);
  }

  // Where a chunk lies: in place an input is the output of the same part.
  uint32_t place(int r, uint32_t chunk) const { return place_[r][chunk]; }

  void init_places() {
    place_.resize(n_);
    held_.resize(n_);
    touched_.resize(n_);
    for (int r = 0; r < n_; r++) {
      const Schedule& s = all_[r];
      for (uint32_t c = 0; c < s.n_chunks(); c++) place_[r].push_back(c);
      if (claim_.in_place) {
        std::vector<uint32_t> out_of_part(s.n_parts, s.n_chunks());  // n_chunks: there is none
        for (uint32_t o = 0; o < s.n_out; o++) out_of_part[s.part[s.out(o)]] = s.out(o);
        for (uint32_t i = 0; i < s.n_in; i++) {
          if (out_of_part[s.part[i]] < s.n_chunks()) place_[r][i] = out_of_part[s.part[i]];
        }
      }
      held_[r].assign(s.n_chunks(), kNothing);
      touched_[r].assign(s.n_chunks(), {});
      for (uint32_t i = 0; i < s.n_in; i++) held_[r][place(r, i)] = values_.leaf(r, s.part[i]);
    }
  }

  // A copy onto itself (in place) is left out by engines.
  bool is_nothing(int r, const Step& step) const {
    if (step.op() != StepOp::kCopy) return false;
    for (uint32_t c = 0; c < step.n_chunks; c++) {
      if (place(r, step.src + c) != place(r, step.dst + c)) return false;
    }
    return true;
  }

  // The steps of a round are next_[r] … end_[r] - 1.
  bool next_round(std::vector<size_t>* begin, std::vector<size_t>* end, uint64_t* round) const {
    *begin = *end;
    bool any = false;
    for (int r = 0; r < n_; r++) {
      if ((*begin)[r] == all_[r].steps.size()) continue;
      const uint64_t its = all_[r].steps[(*begin)[r]].round;
      *round = any ? std::min(*round, its) : its;
      any = true;
    }
    for (int r = 0; r < n_; r++) {
      const std::vector<Step>& steps = all_[r].steps;
      while ((*end)[r] < steps.size() && steps[(*end)[r]].round == *round) (*end)[r]++;
    }
    return any;
  }

  bool check_values() {
    init_places();
    std::vector<size_t> begin(n_), end(n_);
    std::vector<int64_t> n_sent(n_);
    uint64_t round = 0;
    while (next_round(&begin, &end, &round)) {
      round_stamp_++;
      bool talks = false;
      sent_.resize(n_);
      for (int r = 0; r < n_; r++) {
        sent_[r].clear();
        for (size_t i = begin[r]; i < end[r]; i++) {
          const Step& step = all_[r].steps[i];
          if (step.op() != StepOp::kSend) continue;
          if (!send(r, static_cast<int>(i))) return false;
          n_sent[r] += static_cast<int64_t>(step.n_chunks);
          talks = true;
        }
      }
      for (int r = 0; r < n_; r++) {
        for (size_t i = begin[r]; i < end[r]; i++) {
          if (!apply(r, static_cast<int>(i))) return false;
        }
      }
      proof_.rounds += talks;
    }
    for (int64_t parts : n_sent) {
      proof_.max_parts_sent = std::max(proof_.max_parts_sent, parts);
      proof_.n_parts_sent += parts;
    }
    return check_outputs();
  }

  bool send(int r, int i) {
    const Step& step = all_[r].steps[i];
    std::vector<Value>& out = sent_[r][i];
    for (uint32_t c = 0; c < step.n_chunks; c++) {
      const uint32_t at = place(r, step.src + c);
      if (held_[r][at] == kNothing) {
        return fail(r, i,
                    format("sends %s, which was never written", chunk_text(all_[r], step.src + c).c_str()));
      }
      touched_[r][at].sent_in = round_stamp_;
      out.push_back(held_[r][at]);
    }
    return true;
  }

  bool apply(int r, int i) {
    const Schedule& s = all_[r];
    const Step& step = s.steps[i];
    const StepOp op = step.op();
    if (op == StepOp::kSend || is_nothing(r, step)) return true;
    const bool receives = op == StepOp::kRecv || op == StepOp::kRecvReduce;
    const std::vector<Value>* incoming = receives ? &sent_[step.peer][partner_[r][i]] : nullptr;
    for (uint32_t c = 0; c < step.n_chunks; c++) {
      const uint32_t src = step.src + c, dst = step.dst + c, at = place(r, dst);
      if (touched_[r][at].sent_in == round_stamp_) {
        return fail(r, i, format("writes %s while it is being sent", chunk_text(s, dst).c_str()));
      }
      const Value own = op == StepOp::kRecv ? kNothing : held_[r][place(r, src)];
      if (op != StepOp::kRecv && own == kNothing) {
        return fail(r, i, format("reads %s, which was never written", chunk_text(s, src).c_str()));
      }
      Value result = own;
      if (op == StepOp::kRecv) result = (*incoming)[c];
      if (op == StepOp::kRecvReduce || op == StepOp::kReduce) {
        const Value other = op == StepOp::kReduce ? held_[r][at] : (*incoming)[c];
        if (other == kNothing)
          return fail(r, i, format("adds to %s, which was never written", chunk_text(s, dst).c_str()));
        const int twice = values_.in_both(own, other);
        if (twice >= 0)
          return fail(r, i, format("counts rank %d's input of part %u twice", twice, s.part[dst]));
        result = step.src_left() ? values_.sum(own, other) : values_.sum(other, own);
      }
      held_[r][at] = result;
      touched_[r][at].last_step = i;
    }
    return true;
  }

  // What rank r's output of `part` must be made of: all inputs of that part, or one.
  bool check_output(int r, uint32_t chunk, std::vector<Value>* first) {
    const Schedule& s = all_[r];
    const uint32_t part = s.part[chunk];
    const Value got = held_[r][place(r, chunk)];
    const int last = touched_[r][place(r, chunk)].last_step;
    const std::string name = chunk_text(s, chunk);
    if (got == kNothing) return fail(r, last, format("%s is never written", name.c_str()));
    const bool sums = claim_.collective == Collective::kAllReduce ||
                      claim_.collective == Collective::kReduceScatter ||
                      claim_.collective == Collective::kReduce;
    if (!sums) {
      const bool from_root =
          claim_.collective == Collective::kBroadcast || claim_.collective == Collective::kScatter;
      const int source = from_root ? claim_.root : static_cast<int>(part);
      if (got == values_.leaf(source, part)) return true;
      return fail(
          r, last,
          format("%s ends as %s, expected rank %d's input", name.c_str(), values_.text(got).c_str(), source));
    }
    const int missing = values_.missing(got);
    if (missing >= 0) {
      return fail(
          r, last,
          format("%s ends as %s, without rank %d's input", name.c_str(), values_.text(got).c_str(), missing));
    }
    if ((*first)[part] == kNothing) (*first)[part] = got;
    if (got != (*first)[part]) {
      return fail(r, last,
                  format("%s ends as %s, but on another rank as %s", name.c_str(), values_.text(got).c_str(),
                         values_.text((*first)[part]).c_str()));
    }
    if (claim_.deterministic && got != values_.canonical(0, n_, part)) {
      return fail(r, last,
                  format("%s ends as %s, the canonical tree is %s", name.c_str(), values_.text(got).c_str(),
                         values_.text(values_.canonical(0, n_, part)).c_str()));
    }
    return true;
  }

  bool check_outputs() {
    std::vector<Value> first(all_[0].n_parts, kNothing);
    for (int r = 0; r < n_; r++) {
      for (uint32_t o = 0; o < all_[r].n_out; o++) {
        if (!check_output(r, all_[r].out(o), &first)) return false;
      }
    }
    return true;
  }

  struct Touched {
    int64_t sent_in = -1;
    int last_step = -1;
  };

  std::span<const Schedule> all_;
  const Claim claim_;
  const int n_;
  Values values_;
  Proof proof_;
  std::vector<std::vector<int>> partner_;                          // [rank][recv step] -> the sender's step
  std::vector<std::vector<uint32_t>> place_;                       // [rank][chunk]
  std::vector<std::vector<Value>> held_;                           // [rank][place]
  std::vector<std::vector<Touched>> touched_;                      // [rank][place]
  std::vector<std::unordered_map<int, std::vector<Value>>> sent_;  // this round: [rank][send step]
  int64_t round_stamp_ = -1;
};

}  // namespace

Proof verify_schedules(std::span<const Schedule> schedules, const Claim& claim) {
  return Verifier(schedules, claim).run();
}

Status verify(const Algorithm& a, int n_ranks, int root, int n_chunks, bool in_place, Proof* proof) {
  const std::string who = format("%s/%s with %d ranks, root %d%s", collective_name(a.collective), a.name,
                                 n_ranks, root, in_place ? ", in place" : "");
  if (in_place && !a.in_place)
    return Status::error(Code::kSchedule, who + ": this algorithm does not run in place");
  if (n_ranks > kMaxVerifyRanks) {
    return Status::error(Code::kSchedule, who + format(": up to %d ranks can be verified", kMaxVerifyRanks));
  }
  std::vector<Schedule> schedules(std::max(n_ranks, 1));
  for (int r = 0; r < static_cast<int>(schedules.size()); r++) {
    PYCOMM_RETURN_IF_ERROR(build_schedule(a, r, n_ranks, root, n_chunks, &schedules[r]));
  }
  Proof p = verify_schedules(schedules, {a.collective, root, in_place, a.deterministic});
  if (n_chunks == 0) n_chunks = a.default_n_chunks;
  const int rounds = a.rounds(n_ranks, n_chunks);
  const int64_t parts = a.max_parts_sent(n_ranks, n_chunks);
  if (p.ok && p.rounds != rounds) {
    p.ok = false;
    p.violation.what = format("takes %d rounds, the closed form says %d", p.rounds, rounds);
  }
  if (p.ok && p.max_parts_sent != parts) {
    p.ok = false;
    p.violation.what = format("the busiest rank sends %lld parts, the closed form says %lld",
                              static_cast<long long>(p.max_parts_sent), static_cast<long long>(parts));
  }
  Status status;
  if (!p.ok) status = Status::error(Code::kSchedule, who + ": " + p.violation.text());
  if (proof != nullptr) *proof = std::move(p);
  return status;
}

}  // namespace pycomm
