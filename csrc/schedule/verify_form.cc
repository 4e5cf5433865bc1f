// Form and pairing of schedules: what is wrong with a step whatever the values are.
#include "schedule/verify_form.h"

#include <algorithm>
#include <map>

#include "schedule/print.h"

namespace pycomm {

bool blame(std::span<const Schedule> all, int rank, int index, std::string what, Violation* violation) {
  Violation& v = *violation;
  v.rank = rank;
  v.index = index;
  v.what = std::move(what);
  if (rank >= 0 && index >= 0) {
    const Step& step = all[rank].steps[index];
    v.round = static_cast<int>(step.round);
    v.step = step_text(all[rank], step);
  }
  return false;
}

FormChecker::Holds FormChecker::expected_in(int r) const {
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

FormChecker::Holds FormChecker::expected_out(int r) const {
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

bool FormChecker::parts_per_rank() const {
  return claim_.collective != Collective::kAllReduce && claim_.collective != Collective::kBroadcast &&
         claim_.collective != Collective::kReduce;
}

bool FormChecker::check_chunks(int r, const char* name, uint32_t first, uint32_t n, Holds expected) {
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

// What a rank's schedule says about itself: who it is, its parts and its chunks.
bool FormChecker::check_head(int r) {
  const Schedule& s = all_[r];
  if (s.rank != r || s.n_ranks != n_) {
    return fail(r, -1,
                format("the schedule says rank %d of %d, expected rank %d of %d", s.rank, s.n_ranks, r, n_));
  }
  const uint32_t n_parts = parts_per_rank() ? static_cast<uint32_t>(n_) : std::max(all_[0].n_parts, 1u);
  if (s.n_parts != n_parts) {
    return fail(r, -1, format("the vector is cut into %u parts, expected %u", s.n_parts, n_parts));
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
  return check_chunks(r, "input", 0, s.n_in, expected_in(r)) &&
         check_chunks(r, "output", s.n_in, s.n_out, expected_out(r));
}

bool FormChecker::check_form() {
  if (n_ < 1 || n_ > kMaxVerifyRanks) {
    return fail(-1, -1, format("%d ranks; between 1 and %d can be verified", n_, kMaxVerifyRanks));
  }
  if (claim_.root < 0 || claim_.root >= n_)
    return fail(-1, -1, format("root %d is not a rank of %d", claim_.root, n_));
  for (int r = 0; r < n_; r++) {
    if (!check_head(r)) return false;
    for (int i = 0; i < static_cast<int>(all_[r].steps.size()); i++) {
      if (!check_step(r, i)) return false;
    }
  }
  return true;
}

bool FormChecker::check_step(int r, int i) {
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
  // In 64 bits: a mangled step must not wrap around into a chunk that exists.
  const uint64_t total = s.n_chunks(), n_chunks = step.n_chunks;
  if (reads && step.src + n_chunks > total) return fail(r, i, "reads chunks that do not exist");
  if (writes && step.dst + n_chunks > total) return fail(r, i, "writes chunks that do not exist");
  if (writes && step.dst < s.n_in) return fail(r, i, "writes to an input");
  for (uint32_t c = 0; reads && writes && c < step.n_chunks; c++) {
    const uint32_t from = s.part[step.src + c], to = s.part[step.dst + c];
    if (from != to) return fail(r, i, format("moves part %u into a place for part %u", from, to));
  }
  return true;
}

bool FormChecker::check_pairing(std::vector<std::vector<int>>* partner) {
  std::map<std::pair<int, int>, std::vector<At>> sends;
  for (int r = 0; r < n_; r++) {
    for (int i = 0; i < static_cast<int>(all_[r].steps.size()); i++) {
      const Step& step = all_[r].steps[i];
      if (step.op() == StepOp::kSend) sends[{r, static_cast<int>(step.peer)}].push_back({r, i});
    }
  }
  std::map<std::pair<int, int>, size_t> used;
  partner->resize(n_);
  for (int r = 0; r < n_; r++) {
    (*partner)[r].assign(all_[r].steps.size(), -1);
    for (int i = 0; i < static_cast<int>(all_[r].steps.size()); i++) {
      const Step& step = all_[r].steps[i];
      if (step.op() != StepOp::kRecv && step.op() != StepOp::kRecvReduce) continue;
      const auto key = std::make_pair(static_cast<int>(step.peer), r);
      const std::vector<At>& list = sends[key];
      const size_t k = used[key]++;
      if (k >= list.size()) {
        return fail(
            r, i, format("rank %d sends %zu times to rank %d, so nothing comes", key.first, list.size(), r));
      }
      if (!check_pair(list[k], {r, i})) return false;
      (*partner)[r][i] = list[k].index;
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

bool FormChecker::check_pair(At send_at, At recv_at) {
  const Schedule &from = all_[send_at.rank], &to = all_[recv_at.rank];
  const Step &send = from.steps[send_at.index], &recv = to.steps[recv_at.index];
  const std::string meets = format("meets rank %d's step %d (round %u: %s), ", send_at.rank, send_at.index,
                                   static_cast<unsigned>(send.round), step_text(from, send).c_str());
  if (send.round != recv.round) return fail(recv_at.rank, recv_at.index, meets + "which is in another round");
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

}  // namespace pycomm
