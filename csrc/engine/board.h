// The vote of one host in a shrink (engine/shrink.h), in shared memory: it outlives every process but the
// last.
//
// A *ballot* is round << 11 | rank of its proposer: no two proposers have the same one. The vote is Paxos'
// acceptor (Lamport, "Paxos made simple", 2001): the highest ballot *promised*, the highest one *accepted*
// with its value, and the value *decided*, once it is known. All ranks of the host vote through it, whoever
// of them is asked; it lies in the control block of the communicator's first rank of this host.
//
// No locks, so a rank that dies or stops at any instruction holds up nobody. The vote is one word, changed by
// compare-and-swap: promised, accepted, and the *slot* where the accepted value is. Each rank has two slots,
// which only it writes, and never the one to which the vote or the decision points; promised and accepted
// never fall. So who reads a slot and then finds the vote unchanged has read the value of that vote.
//
// Threads: those of one process take turns (Shrink's lock). Cost: a few cache lines a ballot.
#pragma once

#include <array>
#include <vector>

#include "engine/control.h"

namespace pycomm {

// Of ranks of a communicator.
struct RankSet {
  std::array<uint64_t, kShrinkWords> words{};

  bool has(int q) const { return (words[static_cast<size_t>(q) / 64] >> (q % 64) & 1) != 0; }
  void add(int q) { words[static_cast<size_t>(q) / 64] |= uint64_t{1} << (q % 64); }
  void add(const RankSet& other) {
    for (size_t i = 0; i < words.size(); i++) words[i] |= other.words[i];
  }
  bool operator==(const RankSet&) const = default;
};

class Board {
 public:
  static constexpr uint64_t kMaxRound = (uint64_t{1} << 15) - 1;

  // `controls`: of the communicator's ranks of this host, of which `self` is this one.
  Board(const std::vector<Control*>& controls, int self) : controls_(controls), self_(self) {}

  static uint64_t ballot(uint64_t round, int rank) { return round << 11 | static_cast<uint64_t>(rank); }
  static uint64_t round(uint64_t ballot) { return ballot >> 11; }

  enum class Said : uint8_t { kYes, kNo, kDecided };
  struct Answer {
    Said said;
    uint64_t ballot = 0;  // kYes to promise: the accepted one, 0 for none; kNo: the promised one
    RankSet value;        // accepted, or decided
  };
  // Not to accept anything below this ballot.
  Answer promise(uint64_t ballot);
  Answer accept(uint64_t ballot, const RankSet& value);
  void decide(const RankSet& value);
  bool decided(RankSet* value) const;

 private:
  ShrinkArea& area(size_t q) const { return controls_[q]->shrink; }
  ShrinkArea& shared() const { return area(0); }
  void read(uint64_t slot, RankSet* value) const;
  uint64_t write(const RankSet& value);  // into the slot of ours that is free

  const std::vector<Control*>& controls_;
  int self_;
};

}  // namespace pycomm
