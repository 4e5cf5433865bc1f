#include "schedule/verify.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "schedule/builder.h"
#include "schedule/print.h"
#include "schedule/values.h"

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

// A step of a rank, for messages.
struct At {
  int rank, index;
};

class Verifier {
 public:
  Verifier(std::span<const Schedule> schedules, const Claim& claim)
      : all_(schedules), claim_(claim), n_(static_cast<int>(schedules.size())), values_(n_) {}

  Proof run() {
    proof_.ok = check_form() && check_pairing() && check_values();
    return std::move(proof_);
  }

 private:
  bool fail(int rank, int index, std::string what) {
    Violation& v = proof_.violation;
    v.rank = rank;
    v.index = index;
    v.what = std::move(what);
    if (rank >= 0 && index >= 0) {
      const Step& step = all_[rank].steps[index];
      v.round = static_cast<int>(step.round);
      v.step = step_text(all_[rank], step);
    }
    return false;
  }

  // --- form ---------------------------------------------------------------------------------------------

  // The parts that rank r's inputs (outputs) must hold: all of 0 … n_parts - 1, only its own, or none.
  enum class Holds { kAll, kOwn, kNone };
  Holds expected_in(int r) const {
    switch (claim_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduceScatter:
      case Collective::kReduce: return Holds::kAll;
      case Collective::kAllGather:
      case Collective::kGather: return Holds::kOwn;
      case Collective::kBroadcast:
      case Collective::kScatter: return r == claim_.root ? Holds::kAll : Holds::kNone;
    }
    return Holds::kNone;
  }
  Holds expected_out(int r) const {
    switch (claim_.collective) {
      case Collective::kAllReduce:
      case Collective::kAllGather:
      case Collective::kBroadcast: return Holds::kAll;
      case Collective::kReduceScatter:
      case Collective::kScatter: return Holds::kOwn;
      case Collective::kReduce:
      case Collective::kGather: return r == claim_.root ? Holds::kAll : Holds::kNone;
    }
    return Holds::kNone;
  }
  bool parts_per_rank() const {
    return claim_.collective != Collective::kAllReduce && claim_.collective != Collective::kBroadcast &&
           claim_.collective != Collective::kReduce;
  }

  bool check_chunks(int r, const char* name, uint32_t first, uint32_t n, Holds expected) {
    const Schedule& s = all_[r];
    const uint32_t want = expected == Holds::kAll ? s.n_parts : expected == Holds::kOwn ? 1 : 0;
    if (n != want) return fail(r, -1, format("has %u %s chunks, expected %u", n, name, want));
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t part = expected == Holds::kAll ? i : static_cast<uint32_t>(r);
      if (s.part[first + i] != part) {
        return fail(r, -1,
                    format("%s chunk %u holds part %u, expected part %u", name, i, s.part[first + i], part));
      }
    }
    return true;
  }

  bool check_form() {
    if (n_ < 1 || n_ > kMaxVerifyRanks) {
      return fail(-1, -1, format("%d ranks; between 1 and %d can be verified", n_, kMaxVerifyRanks));
    }
    if (claim_.root < 0 || claim_.root >= n_)
      return fail(-1, -1, format("root %d is not a rank of %d", claim_.root, n_));
    for (int r = 0; r < n_; r++) {
      const Schedule& s = all_[r];
      if (s.rank != r || s.n_ranks != n_) {
        return fail(
            r, -1,
            format("the schedule says rank %d of %d, expected rank %d of %d", s.rank, s.n_ranks, r, n_));
      }
      if (s.n_parts == 0 || s.n_parts != all_[0].n_parts ||
          (parts_per_rank() && s.n_parts != static_cast<uint32_t>(n_))) {
        return fail(r, -1,
                    format("the vector is cut into %u parts, expected %u", s.n_parts,
                           parts_per_rank() ? static_cast<uint32_t>(n_) : std::max(all_[0].n_parts, 1u)));
      }
      const uint64_t total = uint64_t{s.n_in} + s.n_out + s.n_scratch;
      if (s.part.size() != total) {
        return fail(r, -1,
                    format("part[] has %zu entries, expected %llu", s.part.size(),
                           static_cast<unsigned long long>(total)));
      }
      for (uint32_t part : s.part) {
        if (part >= s.n_parts) return fail(r, -1, format("a chunk holds part %u of %u", part, s.n_parts));
      }
      if (!check_chunks(r, "input", 0, s.n_in, expected_in(r))) return false;
      if (!check_chunks(r, "output", s.n_in, s.n_out, expected_out(r))) return false;
      for (int i = 0; i < static_cast<int>(s.steps.size()); i++) {
        if (!check_step(r, i)) return false;
      }
      proof_.n_steps += static_cast<int64_t>(s.steps.size());
    }
    return true;
  }

  bool check_step(int r, int i) {
    const Schedule& s = all_[r];
    const Step& step = s.steps[i];
    const StepOp op = step.op();
    if (op > StepOp::kCopy) return fail(r, i, "this op does not exist");
    if (i > 0 && step.round < s.steps[i - 1].round) return fail(r, i, "rounds must not fall");
    if (step.n_chunks == 0) return fail(r, i, "covers no chunk");
    const bool talks = op == StepOp::kSend || op == StepOp::kRecv || op == StepOp::kRecvReduce;
    const bool reads = op != StepOp::kRecv, writes = op != StepOp::kSend;
    if (talks && (step.peer >= static_cast<uint64_t>(n_) || step.peer == static_cast<uint64_t>(r))) {
      return fail(r, i, format("peer %u is not another rank of %d", static_cast<unsigned>(step.peer), n_));
    }
    const uint64_t total = s.n_chunks();
    if (reads && step.src + step.n_chunks > total) return fail(r, i, "reads chunks that do not exist");
    if (writes && step.dst + step.n_chunks > total) return fail(r, i, "writes chunks that do not exist");
    if (writes && step.dst < s.n_in) return fail(r, i, "writes to an input");
    for (uint32_t c = 0; reads && writes && c < step.n_chunks; c++) {
      const uint32_t from = s.part[step.src + c], to = s.part[step.dst + c];
      if (from != to) return fail(r, i, format("moves part %u into a place for part %u", from, to));
    }
    return true;
  }

  // --- pairing ------------------------------------------------------------------------------------------

  bool check_pairing() {
    std::map<std::pair<int, int>, std::vector<At>> sends;
    for (int r = 0; r < n_; r++) {
      for (int i = 0; i < static_cast<int>(all_[r].steps.size()); i++) {
        const Step& step = all_[r].steps[i];
        if (step.op() == StepOp::kSend) sends[{r, static_cast<int>(step.peer)}].push_back({r, i});
      }
    }
    std::map<std::pair<int, int>, size_t> used;
    partner_.resize(n_);
    for (int r = 0; r < n_; r++) {
      partner_[r].assign(all_[r].steps.size(), -1);
      for (int i = 0; i < static_cast<int>(all_[r].steps.size()); i++) {
        const Step& step = all_[r].steps[i];
        if (step.op() != StepOp::kRecv && step.op() != StepOp::kRecvReduce) continue;
        const auto key = std::make_pair(static_cast<int>(step.peer), r);
        const std::vector<At>& list = sends[key];
        const size_t k = used[key]++;
        if (k >= list.size()) {
          return fail(
              r, i,
              format("rank %d sends %zu times to rank %d, so nothing comes", key.first, list.size(), r));
        }
        if (!check_pair(list[k], {r, i})) return false;
        partner_[r][i] = list[k].index;
      }
    }
    for (const auto& [key, list] : sends) {
      const size_t n_used = used[key];
      if (n_used < list.size()) {
        return fail(key.first, list[n_used].index, format("rank %d does not receive it", key.second));
      }
    }
    return true;
  }

  bool check_pair(At send_at, At recv_at) {
    const Schedule &from = all_[send_at.rank], &to = all_[recv_at.rank];
    const Step &send = from.steps[send_at.index], &recv = to.steps[recv_at.index];
    const std::string meets = format("meets rank %d's step %d (round %u: %s), ", send_at.rank, send_at.index,
                                     static_cast<unsigned>(send.round), step_text(from, send).c_str());
    if (send.round != recv.round)
      return fail(recv_at.rank, recv_at.index, meets + "which is in another round");
    if (send.n_chunks != recv.n_chunks) return fail(recv_at.rank, recv_at.index, meets + "of another length");
    for (uint32_t c = 0; c < send.n_chunks; c++) {
      const uint32_t sent = from.part[send.src + c], taken = to.part[recv.dst + c];
      if (sent != taken) {
        return fail(recv_at.rank, recv_at.index,
                    meets + format("part %u goes into a place for part %u", sent, taken));
      }
    }
    return true;
  }

  // --- races and values ---------------------------------------------------------------------------------

  // Where a chunk lies: in place an input is the output of the same part.
  uint32_t place(int r, uint32_t chunk) const { return place_[r][chunk]; }

  void init_places() {
    place_.resize(n_);
    held_.resize(n_);
    touched_.resize(n_);
    for (int r = 0; r < n_; r++) {
      const Schedule& s = all_[r];
      for (uint32_t c = 0; c < s.n_chunks(); c++) place_[r].push_back(c);
      for (uint32_t i = 0; claim_.in_place && i < s.n_in; i++) {
        for (uint32_t o = 0; o < s.n_out; o++) {
          if (s.part[s.out(o)] == s.part[i]) place_[r][i] = s.out(o);
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
