// The network model: every message of every rank, or, above some size, rounds of some ranks.
#include "schedule/cost.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <set>
#include <vector>

namespace pycomm {

namespace {

// How a part is cut: `per_part` equal slices, or, when a part is smaller than a slice, `chunks_per_message`
// whole chunks of one step together.
struct Cut {
  double part_bytes;
  uint32_t per_part = 1;
  uint32_t chunks_per_message = UINT32_MAX;

  Cut(double part, double slice_bytes) : part_bytes(part) {
    if (slice_bytes <= 0) return;
    per_part = static_cast<uint32_t>(std::max(1.0, std::ceil(part / slice_bytes)));
    if (per_part > 1) {
      chunks_per_message = 1;
    } else if (part > 0) {
      const double whole = std::floor(slice_bytes / part);
      if (whole < static_cast<double>(UINT32_MAX)) chunks_per_message = static_cast<uint32_t>(whole);
    }
  }
  // Messages of a step, and the chunks and bytes in message i.
  uint32_t n_messages(const Step& s) const {
    const auto n = static_cast<uint32_t>(s.n_chunks);
    if (per_part > 1) return n * per_part;
    return n / chunks_per_message + (n % chunks_per_message != 0);
  }
  struct Message {
    uint32_t first_chunk, n_chunks, slice;
    double bytes;
  };
  Message message(const Step& s, uint32_t i) const {
    if (per_part > 1) return {i / per_part, 1, i % per_part, part_bytes / per_part};
    const uint32_t first = i * chunks_per_message;
    const uint32_t n = std::min(chunks_per_message, static_cast<uint32_t>(s.n_chunks) - first);
    return {first, n, 0, n * part_bytes};
  }
};

class Simulation {
 public:
  Simulation(std::vector<Schedule> schedules, const CostModel& model, double n_bytes)
      : all_(std::move(schedules)),
        model_(model),
        n_(static_cast<int>(all_.size())),
        cut_(n_bytes / all_[0].n_parts, model.slice_bytes),
        at_(n_),
        end_(n_),
        ready_(n_),
        out_free_(n_),
        in_free_(n_),
        reduce_free_(n_),
        inbox_(n_),
        queue_(n_) {
    for (int r = 0; r < n_; r++) ready_[r].assign(size_t{all_[r].n_chunks()} * cut_.per_part, 0.0);
  }

  Status run(double* seconds) {
    while (next_round()) {
      time_sends();
      for (int r = 0; r < n_; r++) {
        for (size_t i = at_[r]; i < end_[r]; i++) PYCOMM_RETURN_IF_ERROR(apply(r, all_[r].steps[i]));
      }
    }
    *seconds = last_;
    return Status();
  }

 private:
  bool next_round() {
    uint64_t round = UINT64_MAX;
    for (int r = 0; r < n_; r++) {
      at_[r] = end_[r];
      if (at_[r] < all_[r].steps.size()) round = std::min<uint64_t>(round, all_[r].steps[at_[r]].round);
    }
    for (int r = 0; r < n_; r++) {
      const std::vector<Step>& steps = all_[r].steps;
      while (end_[r] < steps.size() && steps[end_[r]].round == round) end_[r]++;
    }
    return round != UINT64_MAX;
  }

  double ready(int r, uint32_t chunk, const Cut::Message& m) const {
    double t = 0;
    for (uint32_t c = 0; c < m.n_chunks; c++) {
      t = std::max(t, ready_[r][size_t{chunk + m.first_chunk + c} * cut_.per_part + m.slice]);
    }
    return t;
  }
  void set_ready(int r, uint32_t chunk, const Cut::Message& m, double t) {
    for (uint32_t c = 0; c < m.n_chunks; c++)
      ready_[r][size_t{chunk + m.first_chunk + c} * cut_.per_part + m.slice] = t;
    last_ = std::max(last_, t);
  }

  // A rank's sends of this round, in list order; `message` is the next one.
  struct Queue {
    std::vector<uint32_t> sends;  // indices into inbox entries: see below
    std::vector<const Step*> steps;
    size_t step = 0;
    uint32_t message = 0;
  };
  struct Arrival {
    int from;
    size_t first;  // in arrivals_
    bool taken = false;
  };

  // Puts the round's messages on the ports in the order in which they could start.
  void time_sends() {
    arrivals_.clear();
    for (int r = 0; r < n_; r++) inbox_[r].clear();
    using Next = std::pair<double, int>;
    std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
    for (int r = 0; r < n_; r++) {
      Queue& q = queue_[r];
      q = {};
      for (size_t i = at_[r]; i < end_[r]; i++) {
        const Step& s = all_[r].steps[i];
        if (s.op() != StepOp::kSend) continue;
        q.steps.push_back(&s);
        q.sends.push_back(static_cast<uint32_t>(arrivals_.size()));
        inbox_[s.peer].push_back({r, arrivals_.size()});
        arrivals_.resize(arrivals_.size() + cut_.n_messages(s));
      }
      if (!q.steps.empty()) next.push({earliest(r), r});
    }
    while (!next.empty()) {
      const auto [could, r] = next.top();
      next.pop();
      Queue& q = queue_[r];
      const Step& s = *q.steps[q.step];
      const auto peer = static_cast<int>(s.peer);
      const LinkCost& link = model_.link(r, peer);
      const Cut::Message m = cut_.message(s, q.message);
      const double end = std::max(could, in_free_[peer]) + link.alpha_s + m.bytes * link.beta_s_per_byte;
      out_free_[r] = in_free_[peer] = end;
      arrivals_[q.sends[q.step] + q.message] = end;
      last_ = std::max(last_, end);
      if (++q.message == cut_.n_messages(s)) {
        q.message = 0;
        q.step++;
      }
      if (q.step < q.steps.size()) next.push({earliest(r), r});
    }
  }
  double earliest(int r) const {
    const Queue& q = queue_[r];
    const Step& s = *q.steps[q.step];
    return std::max(out_free_[r], ready(r, s.src, cut_.message(s, q.message)));
  }

  // Senders were visited in rank order, so a receiver's inbox is sorted by sender.
  Arrival* take(int r, int from) {
    auto it = std::lower_bound(inbox_[r].begin(), inbox_[r].end(), from,
                               [](const Arrival& a, int rank) { return a.from < rank; });
    while (it != inbox_[r].end() && it->from == from && it->taken) ++it;
    if (it == inbox_[r].end() || it->from != from) return nullptr;
    it->taken = true;
    return &*it;
  }

  Status apply(int r, const Step& s) {
    const StepOp op = s.op();
    if (op == StepOp::kSend) return Status();
    const bool receives = op == StepOp::kRecv || op == StepOp::kRecvReduce;
    const Arrival* arrival = receives ? take(r, static_cast<int>(s.peer)) : nullptr;
    if (receives && arrival == nullptr) {
      return Status::error(Code::kSchedule,
                           format("rank %d receives from rank %u in round %u, which sends nothing", r,
                                  static_cast<unsigned>(s.peer), static_cast<unsigned>(s.round)));
    }
    const uint32_t n = cut_.n_messages(s);
    for (uint32_t i = 0; i < n; i++) {
      const Cut::Message m = cut_.message(s, i);
      double t = receives ? arrivals_[arrival->first + i] : 0.0;
      if (op != StepOp::kRecv) t = std::max(t, ready(r, s.src, m));
      if (op == StepOp::kReduce) t = std::max(t, ready(r, s.dst, m));
      if (op == StepOp::kReduce || op == StepOp::kRecvReduce) {
        t = std::max(t, reduce_free_[r]) + m.bytes * model_.gamma_s_per_byte;
        reduce_free_[r] = t;
      }
      set_ready(r, s.dst, m, t);
    }
    return Status();
  }

  const std::vector<Schedule> all_;
  const CostModel model_;
  const int n_;
  const Cut cut_;
  std::vector<size_t> at_, end_;            // this round's steps of each rank
  std::vector<std::vector<double>> ready_;  // [rank][chunk * per_part + slice]: since when it holds its value
  std::vector<double> out_free_, in_free_, reduce_free_;
  std::vector<std::vector<Arrival>> inbox_;  // this round, by receiver
  std::vector<Queue> queue_;                 // this round, by sender
  std::vector<double> arrivals_;             // this round, by message
  double last_ = 0;
};

// The ranks whose rounds stand for all: both ends, the root's surroundings, powers of two and their
// neighbours (trees), and those on both sides of a border between nodes.
std::set<int> representatives(int n, int root, int per_node) {
  std::set<int> ranks;
  const auto around = [&](int64_t r) {
    for (int64_t d = -1; d <= 1; d++) ranks.insert(static_cast<int>(((r + d) % n + n) % n));
  };
  around(0);
  around(root);
  around(n / 2);
  for (int64_t p = 1; p < n; p *= 2) around(root + p);
  const int p = static_cast<int>(std::exp2(std::floor(std::log2(n))));
  around(2 * (n - p));  // where pairs end (builder.h, Fold)
  if (per_node > 0 && per_node < n) around(per_node);
  return ranks;
}

struct RoundTime {
  double send = 0, recv = 0, reduce = 0;
  bool seen = false;  // some rank has steps in this round
};

// Adds one rank's rounds into the slowest of each round.
void slowest_rounds(const Schedule& s, const CostModel& model, const Cut& cut,
                    std::vector<RoundTime>* slowest) {
  size_t i = 0;
  while (i < s.steps.size()) {
    const uint64_t round = s.steps[i].round;
    RoundTime t;
    for (; i < s.steps.size() && s.steps[i].round == round; i++) {
      const Step& step = s.steps[i];
      const double bytes = static_cast<double>(step.n_chunks) * cut.part_bytes;
      const LinkCost& link = model.link(s.rank, static_cast<int>(step.peer));
      const double travel = cut.n_messages(step) * link.alpha_s + bytes * link.beta_s_per_byte;
      switch (step.op()) {
        case StepOp::kSend: t.send += travel; break;
        case StepOp::kRecv: t.recv += travel; break;
        case StepOp::kRecvReduce: t.recv += travel; [[fallthrough]];
        case StepOp::kReduce: t.reduce += bytes * model.gamma_s_per_byte; break;
        case StepOp::kCopy: break;
      }
    }
    if (slowest->size() <= round) slowest->resize(round + 1);
    RoundTime& max = (*slowest)[round];
    max = {std::max(max.send, t.send), std::max(max.recv, t.recv), std::max(max.reduce, t.reduce), true};
  }
}

Status check_model(double n_bytes, int n_ranks, const CostModel& m) {
  const auto bad = [](double x) { return !(x >= 0) || !std::isfinite(x); };
  const char* what = nullptr;
  if (bad(n_bytes)) what = "the number of bytes";
  if (bad(m.in_node.alpha_s) || bad(m.between.alpha_s)) what = "alpha";
  if (bad(m.in_node.beta_s_per_byte) || bad(m.between.beta_s_per_byte)) what = "beta";
  if (bad(m.gamma_s_per_byte)) what = "gamma";
  if (bad(m.slice_bytes)) what = "slice_bytes";
  if (what != nullptr)
    return Status::error(Code::kValue, format("cost: %s must be finite and not negative", what));
  if (m.ranks_per_node < 0)
    return Status::error(Code::kValue,
                         format("cost: ranks_per_node is %d, expected 0 or more", m.ranks_per_node));
  if (n_ranks > kMaxCostRanks) {
    return Status::error(Code::kValue,
                         format("cost: %d ranks; up to %d can be predicted", n_ranks, kMaxCostRanks));
  }
  return Status();
}

Status check_slices(double part_bytes, double slice_bytes) {
  if (slice_bytes > 0 && part_bytes / slice_bytes > static_cast<double>(kMaxSlicesPerPart)) {
    return Status::error(Code::kValue,
                         format("cost: slices of %.0f bytes cut a part of %.0f bytes into more than "
                                "%lld; use larger slices",
                                slice_bytes, part_bytes, static_cast<long long>(kMaxSlicesPerPart)));
  }
  return Status();
}

}  // namespace

const char* cost_method_name(CostMethod m) {
  switch (m) {
    case CostMethod::kSimulated: return "simulated";
    case CostMethod::kStreamed: return "streamed";
  }
  return "?";
}

Status simulate_cost(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
                     const CostModel& model, double* seconds) {
  PYCOMM_RETURN_IF_ERROR(check_model(n_bytes, n_ranks, model));
  std::vector<Schedule> schedules(static_cast<size_t>(std::max(n_ranks, 1)));
  for (size_t r = 0; r < schedules.size(); r++) {
    PYCOMM_RETURN_IF_ERROR(build_schedule(a, static_cast<int>(r), n_ranks, root, n_chunks, &schedules[r]));
  }
  PYCOMM_RETURN_IF_ERROR(check_slices(n_bytes / schedules[0].n_parts, model.slice_bytes));
  return Simulation(std::move(schedules), model, n_bytes).run(seconds);
}

Status stream_cost(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
                   const CostModel& model, double* seconds) {
  PYCOMM_RETURN_IF_ERROR(check_model(n_bytes, n_ranks, model));
  Schedule s;
  PYCOMM_RETURN_IF_ERROR(build_schedule(a, 0, n_ranks, root, n_chunks, &s));
  PYCOMM_RETURN_IF_ERROR(check_slices(n_bytes / s.n_parts, model.slice_bytes));
  const Cut cut(n_bytes / s.n_parts, model.slice_bytes);
  std::set<int> ranks = representatives(n_ranks, root, model.ranks_per_node);
  PYCOMM_RETURN_IF_ERROR(build_schedule(a, root, n_ranks, root, n_chunks, &s));
  if (static_cast<int64_t>(s.steps.size() + s.n_chunks()) * n_ranks <= kMaxSimulatedSteps) {
    for (int r = 0; r < n_ranks; r++) ranks.insert(ranks.end(), r);
  }
  std::vector<RoundTime> slowest;
  for (int r : ranks) {
    PYCOMM_RETURN_IF_ERROR(build_schedule(a, r, n_ranks, root, n_chunks, &s));
    slowest_rounds(s, model, cut, &slowest);
  }
  // A round in which none of these ranks does anything (a long chain) is like the one before.
  for (size_t i = 1; i < slowest.size(); i++) {
    if (!slowest[i].seen) slowest[i] = slowest[i - 1];
  }
  // Whole messages are reduced after they have come; slices while the next ones travel.
  double total = 0;
  for (const RoundTime& t : slowest) {
    const double travel = std::max(t.send, t.recv);
    total += cut.per_part > 1 ? std::max(travel, t.reduce) : travel + t.reduce;
  }
  *seconds = total;
  return Status();
}

Status predict(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
               const CostModel& model, Cost* out) {
  PYCOMM_RETURN_IF_ERROR(check_model(n_bytes, n_ranks, model));
  Schedule s;
  PYCOMM_RETURN_IF_ERROR(build_schedule(a, root, n_ranks, root, n_chunks, &s));
  const int depth = n_chunks == 0 ? a.default_n_chunks : n_chunks;
  const double part = n_bytes / s.n_parts;
  out->rounds = a.rounds(n_ranks, depth);
  out->max_bytes_sent = static_cast<double>(a.max_parts_sent(n_ranks, depth)) * part;
  const double slices = model.slice_bytes > 0 ? std::max(1.0, part / model.slice_bytes) : 1.0;
  const double work = static_cast<double>(s.steps.size()) * n_ranks * slices;
  const bool whole = n_ranks <= kMaxSimulatedRanks && work <= static_cast<double>(kMaxSimulatedSteps);
  out->method = whole ? CostMethod::kSimulated : CostMethod::kStreamed;
  return whole ? simulate_cost(a, n_ranks, root, n_chunks, n_bytes, model, &out->seconds)
               : stream_cost(a, n_ranks, root, n_chunks, n_bytes, model, &out->seconds);
}

}  // namespace pycomm
