#include "engine/board.h"

namespace pycomm {

namespace {
struct Vote {
  uint64_t promised = 0, accepted = 0, slot = 0;

  static Vote of(uint64_t word) { return {word >> 38, word >> 12 & 0x3ffffff, word & 0xfff}; }
  uint64_t word() const { return promised << 38 | accepted << 12 | slot; }
};
static_assert(2 * kShrinkWords * 64 <= 4096, "a slot's number has 12 bits");
}  // namespace

void Board::read(uint64_t slot, RankSet* value) const {
  const auto& from = area(slot / 2).values[slot % 2];
  for (size_t i = 0; i < kShrinkWords; i++) value->words[i] = from[i].load(std::memory_order_acquire);
}

uint64_t Board::write(const RankSet& value) {
  const Vote now = Vote::of(shared().vote.load());
  const uint64_t first = 2 * static_cast<uint64_t>(self_);
  const uint64_t slot = now.accepted != 0 && now.slot == first ? first + 1 : first;
  auto& to = area(static_cast<size_t>(self_)).values[slot % 2];
  for (size_t i = 0; i < kShrinkWords; i++) to[i].store(value.words[i], std::memory_order_release);
  return slot;
}

bool Board::decided(RankSet* value) const {
  const uint64_t at = shared().decided.load();
  if (at == 0) return false;
  read(at - 1, value);
  return true;
}

void Board::decide(const RankSet& value) {
  uint64_t none = 0;
  if (shared().decided.load() == 0) shared().decided.compare_exchange_strong(none, write(value) + 1);
}

Board::Answer Board::promise(uint64_t ballot) {
  for (;;) {
    Answer answer{Said::kDecided, 0, {}};
    if (decided(&answer.value)) return answer;
    uint64_t word = shared().vote.load();
    Vote vote = Vote::of(word);
    if (ballot < vote.promised) return {Said::kNo, vote.promised, {}};
    answer = {Said::kYes, vote.accepted, {}};
    if (vote.accepted != 0) read(vote.slot, &answer.value);
    vote.promised = ballot;
    if (shared().vote.compare_exchange_strong(word, vote.word())) return answer;
  }
}

Board::Answer Board::accept(uint64_t ballot, const RankSet& value) {
  for (;;) {
    Answer answer{Said::kDecided, 0, {}};
    if (decided(&answer.value)) return answer;
    uint64_t word = shared().vote.load();
    const Vote vote = Vote::of(word);
    if (ballot < vote.promised) return {Said::kNo, vote.promised, {}};
    if (vote.accepted == ballot) return {Said::kYes, ballot, {}};  // a rank beside us was asked, too
    const uint64_t slot = write(value);
    if (shared().vote.compare_exchange_strong(word, Vote{ballot, ballot, slot}.word()))
      return {Said::kYes, ballot, {}};
  }
}

}  // namespace pycomm
