// One schedule under way between hosts, with all that must live as long as it does.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "engine/rounds.h"

namespace pycomm {

struct Flight {
  Flight(Remote& r, const Schedule& schedule, std::vector<uint64_t> given, std::vector<int> ranks)
      : remote(r), counts(std::move(given)), members(std::move(ranks)) {
    task.schedule = &schedule;
    task.members = members;
    task.counts = counts;
  }
  ~Flight() {  // without it
    if (rounds == nullptr) return;
    const auto lock = remote.net().lock();
    if (!rounds->done()) remote.end(false);  // left by a failure: nothing may be told of messages here
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  void begin() {  // with the Net's lock
    rounds = std::make_unique<Rounds>(remote, task);
    rounds->start();
  }
  bool done() const { return rounds->done(); }

  Remote& remote;
  std::vector<uint64_t> counts;
  std::vector<int> members;
  std::vector<std::byte> input;  // of a call in place whose algorithm is not: what leaves must stay as it is
  Rounds::Task task;
  std::unique_ptr<Rounds> rounds;
};

}  // namespace pycomm
