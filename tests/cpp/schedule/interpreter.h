// A second opinion on schedules, sharing nothing with the verifier: runs them on numbers.
//
// Memory is one array of numbers per rank, one number per place. A round sends what places held before it and
// then applies all steps in list order. `Number` is int64_t for exact sums, float where the order of a sum
// shows in its bits. The schedules must be well formed (indices in range, sends and recvs paired).
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "schedule/catalog.h"

namespace pycomm {

template <class Number>
class Interpreter {
 public:
  // input(rank, part) gives the numbers to start from.
  template <class Fn>
  Interpreter(const std::vector<Schedule>& all, bool in_place, Fn input) : all_(all) {
    for (const Schedule& s : all) {
      std::vector<size_t> at(s.n_chunks());
      std::vector<Number> cells(s.n_chunks(), Number{-77});  // a value that no sum should contain
      for (size_t c = 0; c < at.size(); c++) at[c] = c;
      for (size_t i = 0; i < s.n_in; i++) {
        for (size_t o = s.n_in; in_place && o < s.n_in + s.n_out; o++) {
          if (s.part[i] == s.part[o]) at[o] = i;
        }
        cells[i] = input(s.rank, s.part[i]);
      }
      at_.push_back(std::move(at));
      cells_.push_back(std::move(cells));
    }
  }

  void run() {
    uint64_t last = 0;
    for (const Schedule& s : all_) {
      for (const Step& step : s.steps) last = std::max<uint64_t>(last, step.round);
    }
    for (uint64_t round = 0; round <= last; round++) run_round(round);
  }

  Number out(int rank, uint32_t i) const {
    const auto r = static_cast<size_t>(rank);
    return cells_[r][at_[r][all_[r].out(i)]];
  }

 private:
  void run_round(uint64_t round) {
    std::map<std::pair<size_t, size_t>, std::deque<Number>> wires;
    for (size_t r = 0; r < all_.size(); r++) {
      for (const Step& s : all_[r].steps) {
        if (s.round != round || s.op() != StepOp::kSend) continue;
        for (size_t c = 0; c < s.n_chunks; c++) wires[{r, s.peer}].push_back(cells_[r][at_[r][s.src + c]]);
      }
    }
    for (size_t r = 0; r < all_.size(); r++) {
      for (const Step& s : all_[r].steps) {
        if (s.round != round || s.op() == StepOp::kSend) continue;
        for (size_t c = 0; c < s.n_chunks; c++) apply(r, s, c, &wires[{s.peer, r}]);
      }
    }
  }

  void apply(size_t r, const Step& s, size_t c, std::deque<Number>* wire) {
    Number& dst = cells_[r][at_[r][s.dst + c]];
    Number incoming{};
    if (s.op() == StepOp::kRecv || s.op() == StepOp::kRecvReduce) {
      incoming = wire->front();
      wire->pop_front();
    }
    if (s.op() == StepOp::kRecv) {
      dst = incoming;
      return;
    }
    const Number src = cells_[r][at_[r][s.src + c]];
    if (s.op() == StepOp::kCopy) dst = src;
    if (s.op() == StepOp::kReduce) dst = s.src_left() ? src + dst : dst + src;
    if (s.op() == StepOp::kRecvReduce) dst = s.src_left() ? src + incoming : incoming + src;
  }

  const std::vector<Schedule>& all_;
  std::vector<std::vector<size_t>> at_;     // [rank][chunk] -> cell
  std::vector<std::vector<Number>> cells_;  // [rank][cell]
};

// "" when every output is what the collective promises for int64 inputs, else what is wrong.
inline std::string wrong_result(const std::vector<Schedule>& all, Collective collective, int root,
                                bool in_place) {
  const int n = static_cast<int>(all.size());
  const auto input = [](int rank, uint32_t part) {
    return (int64_t{rank} + 1) * 1'000'003 + int64_t{part} * 7919 + (int64_t{rank} * rank * (part + 1)) % 101;
  };
  Interpreter<int64_t> run(all, in_place, input);
  run.run();
  for (int r = 0; r < n; r++) {
    const Schedule& s = all[static_cast<size_t>(r)];
    for (uint32_t o = 0; o < s.n_out; o++) {
      const uint32_t part = s.part[s.out(o)];
      int64_t expected = 0;
      switch (collective) {
        case Collective::kAllReduce:
        case Collective::kReduceScatter:
        case Collective::kReduce:
          for (int q = 0; q < n; q++) expected += input(q, part);
          break;
        case Collective::kAllGather:
        case Collective::kGather: expected = input(static_cast<int>(part), part); break;
        case Collective::kBroadcast:
        case Collective::kScatter: expected = input(root, part); break;
      }
      const int64_t got = run.out(r, o);
      if (got == expected) continue;
      return "rank " + std::to_string(r) + " out[" + std::to_string(part) + "] is " + std::to_string(got) +
             ", expected " + std::to_string(expected);
    }
  }
  return "";
}

}  // namespace pycomm
