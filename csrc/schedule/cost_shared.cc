// The shared-memory model: what the engine touches and waits for, counted from the steps.
//
// The engine fuses a round's steps into one n-ary read for each chunk that outlives the round
// (engine/fuse.h), so here a chunk written in a round costs its distinct sources once and one write. Tiled:
// what peers read of the inputs is staged before (a read and a write), and an output that peers read is
// written twice, to the slot and to the tensor. Direct: a value that is made by a reduction and then sent is
// written straight to the receivers (a put), whose recv then costs nothing.
#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "schedule/cost.h"
#include "schedule/verify.h"

namespace pycomm {

namespace {

// Per chunk of one rank: how its value came to be, and who looks at it.
struct Place {
  bool sent = false;     // a peer reads it
  int64_t made_in = -1;  // the last round that wrote it
  bool by_reduction = false;
  int64_t last_read = -1;  // last round in which this rank reads or sends it
};

struct Count {
  double reads = 0, writes = 0;  // in parts
};

// Is what arrives at `receiver` from `sender` in this recv a put (direct protocol)? Only if the sender made
// it.
using Puts = std::vector<std::vector<bool>>;  // [rank][k-th send in list order]

std::vector<Place> look_at(const Schedule& s) {
  std::vector<Place> places(s.n_chunks());
  for (const Step& step : s.steps) {
    for (uint32_t c = 0; c < step.n_chunks; c++) {
      if (step.op() != StepOp::kRecv) places[step.src + c].last_read = static_cast<int64_t>(step.round);
      if (step.op() == StepOp::kSend) places[step.src + c].sent = true;
    }
  }
  return places;
}

class Counter {
 public:
  Counter(const std::vector<Schedule>& all, SharedProtocol protocol)
      : all_(all), direct_(protocol == SharedProtocol::kDirect), counts_(all.size()), puts_(all.size()) {}

  std::vector<Count> run() {
    for (const Schedule& s : all_) places_.push_back(look_at(s));
    for (const Schedule& s : all_) count_rank(s);
    if (direct_) return_puts();
    return std::move(counts_);
  }

 private:
  bool is_scratch(const Schedule& s, uint32_t chunk) const { return chunk >= s.n_in + s.n_out; }

  void count_rank(const Schedule& s) {
    std::vector<Place>& places = places_[s.rank];
    Count& n = counts_[s.rank];
    if (!direct_) {
      for (uint32_t c = 0; c < s.n_in; c++) {
        n.reads += places[c].sent;
        n.writes += places[c].sent;
      }
    }
    size_t i = 0;
    while (i < s.steps.size()) {
      const auto round = static_cast<int64_t>(s.steps[i].round);
      std::set<uint32_t> written;
      for (; i < s.steps.size() && static_cast<int64_t>(s.steps[i].round) == round; i++) {
        const Step& step = s.steps[i];
        for (uint32_t c = 0; c < step.n_chunks; c++) count_step(s, step, c, &places, &written);
      }
      for (uint32_t chunk : written) {
        const Place& p = places[chunk];
        if (is_scratch(s, chunk) && p.last_read <= round) continue;  // lives in registers
        n.writes += 1;
        if (!direct_ && p.sent && !is_scratch(s, chunk)) n.writes += 1;
        places[chunk].made_in = round;
      }
    }
  }

  void count_step(const Schedule& s, const Step& step, uint32_t c, std::vector<Place>* places,
                  std::set<uint32_t>* written) {
    Count& n = counts_[s.rank];
    const uint32_t src = step.src + c, dst = step.dst + c;
    const auto read_own = [&](uint32_t chunk) { n.reads += !written->contains(chunk); };
    switch (step.op()) {
      case StepOp::kSend:
        puts_[s.rank].push_back((*places)[src].made_in >= 0 && (*places)[src].by_reduction);
        return;
      case StepOp::kRecv: n.reads += 1; break;
      case StepOp::kCopy: read_own(src); break;
      case StepOp::kRecvReduce:
        n.reads += 1;
        read_own(src);
        break;
      case StepOp::kReduce:
        read_own(src);
        read_own(dst);
        break;
    }
    written->insert(dst);
    (*places)[dst].by_reduction = step.op() == StepOp::kRecvReduce || step.op() == StepOp::kReduce;
  }

  // A put moves the receiver's write to the sender and saves the receiver's read.
  void return_puts() {
    std::vector<size_t> k(all_.size());
    std::vector<std::vector<std::vector<bool>>> flags(all_.size(),
                                                      std::vector<std::vector<bool>>(all_.size()));
    for (const Schedule& s : all_) {
      for (const Step& step : s.steps) {
        if (step.op() != StepOp::kSend) continue;
        for (uint32_t c = 0; c < step.n_chunks; c++)
          flags[s.rank][step.peer].push_back(puts_[s.rank][k[s.rank]++]);
      }
    }
    std::vector<std::vector<size_t>> next(all_.size(), std::vector<size_t>(all_.size()));
    for (const Schedule& s : all_) {
      for (const Step& step : s.steps) {
        if (step.op() != StepOp::kRecv && step.op() != StepOp::kRecvReduce) continue;
        for (uint32_t c = 0; c < step.n_chunks; c++) {
          const size_t at = next[step.peer][s.rank]++;
          if (step.op() != StepOp::kRecv || !flags[step.peer][s.rank].at(at)) continue;
          counts_[s.rank].reads -= 1;
          counts_[s.rank].writes -= 1;
          counts_[step.peer].writes += 1;
        }
      }
    }
  }

  const std::vector<Schedule>& all_;
  const bool direct_;
  std::vector<Count> counts_;
  Puts puts_;
  std::vector<std::vector<Place>> places_;
};

}  // namespace

Status shared_work(const Algorithm& a, int n_ranks, int root, int n_chunks, double n_bytes,
                   SharedProtocol protocol, double tile_bytes, SharedWork* out) {
  if (n_ranks > kMaxVerifyRanks) {
    return Status::error(Code::kValue, format("cost: %d ranks on one node; up to %d can be predicted",
                                              n_ranks, kMaxVerifyRanks));
  }
  if (!(n_bytes >= 0) || !std::isfinite(n_bytes))
    return Status::error(Code::kValue, "cost: the number of bytes must be finite and not negative");
  if (protocol == SharedProtocol::kTiled && !(tile_bytes > 0))
    return Status::error(Code::kValue, format("cost: tile_bytes is %g, expected more than 0", tile_bytes));
  std::vector<Schedule> all(static_cast<size_t>(std::max(n_ranks, 1)));
  for (size_t r = 0; r < all.size(); r++) {
    PYCOMM_RETURN_IF_ERROR(build_schedule(a, static_cast<int>(r), n_ranks, root, n_chunks, &all[r]));
  }
  const double part = n_bytes / all[0].n_parts;
  Count busiest;
  for (const Count& c : Counter(all, protocol).run()) {
    if (c.reads + c.writes > busiest.reads + busiest.writes) busiest = c;
  }
  out->read_bytes = busiest.reads * part;
  out->written_bytes = busiest.writes * part;
  const double rounds = a.rounds(n_ranks, n_chunks == 0 ? a.default_n_chunks : n_chunks);
  const double tiles =
      protocol == SharedProtocol::kTiled ? std::max(1.0, std::ceil(n_bytes / tile_bytes)) : 1.0;
  out->syncs = n_ranks > 1 ? 1 + rounds * tiles : 0;  // 1: the head with the addresses
  return Status();
}

}  // namespace pycomm
