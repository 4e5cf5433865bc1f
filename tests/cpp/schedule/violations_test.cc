// Schedules that break one rule each, by hand: the verifier must name that step and that rule.
#include <gtest/gtest.h>

#include "schedule/builder.h"
#include "schedule/catalog_params.h"
#include "schedule/verify.h"

namespace pycomm {
namespace {

// What the verifier says, e.g. "rank 1, step 0 (round 0: send in[0] to rank 0): …".
std::string verdict(const std::vector<Schedule>& all, Collective c, bool in_place = false,
                    bool deterministic = false) {
  const Proof p = verify_schedules(all, {c, 0, in_place, deterministic});
  return p.ok ? "proved" : p.violation.text();
}

#define EXPECT_SAYS(verdict_, where, what)                 \
  do {                                                     \
    const std::string said = (verdict_);                   \
    EXPECT_EQ(said.rfind((where), 0), 0u) << said;         \
    EXPECT_NE(said.find(what), std::string::npos) << said; \
  } while (0)

// Two ranks, one part, all_reduce by exchange: rank r sends its input, and adds what comes to its own.
Builder pair_builder(int rank) {
  Builder b(rank, 2, 0, 1);
  b.add_in(0);
  b.add_out(0);
  return b;
}

std::vector<Schedule> exchange() {
  std::vector<Schedule> all;
  for (int r = 0; r < 2; r++) {
    Builder b = pair_builder(r);
    b.send(0, 1 - r, b.in(0));
    b.recv_reduce(0, 1 - r, b.in(0), b.out(0), side(r, 1 - r));
    all.push_back(b.finish());
  }
  return all;
}

constexpr Collective kAR = Collective::kAllReduce;

TEST(Violation, NoneInTheExchange) { EXPECT_EQ(verdict(exchange(), kAR, false, true), "proved"); }

TEST(Violation, InPlaceTheExchangeWritesWhatItSends) {
  EXPECT_SAYS(verdict(exchange(), kAR, true), "rank 0, step 1 (round 0: out[0] = in[0] + (from rank 1))",
              "writes out[0] while it is being sent");
}

TEST(Violation, Form) {
  auto all = exchange();
  all[0].steps[0].op_bits = 6;
  EXPECT_SAYS(verdict(all, kAR), "rank 0, step 0 (round 0: op 6)", "this op does not exist");
  all = exchange();
  all[1].steps[0].round = 3;
  EXPECT_SAYS(verdict(all, kAR), "rank 1, step 1 ", "rounds must not fall");
  all = exchange();
  all[1].steps[0].n_chunks = 0;
  EXPECT_SAYS(verdict(all, kAR), "rank 1, step 0 ", "covers no chunk");
  for (uint64_t peer : {1u, 2u}) {
    all = exchange();
    all[1].steps[0].peer = peer;
    EXPECT_SAYS(verdict(all, kAR), "rank 1, step 0 ", "is not another rank of 2");
  }
  all = exchange();
  all[0].steps[0].src = 2;
  EXPECT_SAYS(verdict(all, kAR), "rank 0, step 0 ", "reads chunks that do not exist");
  all = exchange();
  all[0].steps[1].dst = 0xffffffff;
  EXPECT_SAYS(verdict(all, kAR), "rank 0, step 1 ", "writes chunks that do not exist");
  all = exchange();
  all[0].steps[1].dst = 0;
  EXPECT_SAYS(verdict(all, kAR), "rank 0, step 1 ", "writes to an input");
}

TEST(Violation, Head) {
  auto all = exchange();
  std::swap(all[0], all[1]);
  EXPECT_SAYS(verdict(all, kAR), "rank 0: ", "the schedule says rank 1 of 2, expected rank 0 of 2");
  all = exchange();
  all[1].n_parts = 2;
  EXPECT_SAYS(verdict(all, kAR), "rank 1: ", "the vector is cut into 2 parts, expected 1");
  all = exchange();
  all[1].part.pop_back();
  EXPECT_SAYS(verdict(all, kAR), "rank 1: ", "part[] has 1 entries, expected 2");
  all = exchange();
  all[1].part[1] = 9;
  EXPECT_SAYS(verdict(all, kAR), "rank 1: ", "a chunk holds part 9 of 1");
  EXPECT_SAYS(verdict(exchange(), Collective::kAllGather), "rank 0: ", "is cut into 1 parts, expected 2");
  EXPECT_SAYS(verdict(exchange(), Collective::kBroadcast), "rank 1: ", "has 1 input chunks, expected 0");
  EXPECT_SAYS(verdict({}, kAR), "0 ranks", "can be verified");
  const Proof p = verify_schedules(exchange(), {kAR, 5, false, false});
  EXPECT_EQ(p.violation.text(), "root 5 is not a rank of 2");
}

TEST(Violation, Pairing) {
  auto all = exchange();
  all[0].steps.erase(all[0].steps.begin());
  EXPECT_SAYS(verdict(all, kAR), "rank 1, step 1 ", "rank 0 sends 0 times to rank 1, so nothing comes");
  all = exchange();
  all[0].steps.pop_back();
  EXPECT_SAYS(verdict(all, kAR), "rank 1, step 0 ", "rank 0 does not receive it");
  all = exchange();
  all[1].steps[1].round = 1;
  EXPECT_SAYS(verdict(all, kAR), "rank 1, step 1 ", "which is in another round");
}

TEST(Violation, PairsOfUnlikeParts) {
  const Algorithm& ring = algorithm(kAR, "ring");
  auto all = build_all(ring, 4, 0, 0);
  all[2].steps[0].src = 0;  // ranks send part `rank` first
  EXPECT_SAYS(verdict(all, kAR), "rank 3, step 1 ", "part 0 goes into a place for part 2");
  all = build_all(ring, 4, 0, 0);
  all[2].steps[0].n_chunks = 2;
  EXPECT_SAYS(verdict(all, kAR), "rank 3, step 1 ", "of another length");
  all = build_all(ring, 4, 0, 0);
  all[2].steps[1].src = 0;
  EXPECT_SAYS(verdict(all, kAR), "rank 2, step 1 ", "moves part 0 into a place for part 1");
}

// rank 0's steps are given, rank 1 is as in the exchange.
template <class Fn>
std::vector<Schedule> with_rank_0(Fn steps) {
  auto all = exchange();
  Builder b = pair_builder(0);
  b.add_scratch(0);
  steps(&b);
  all[0] = b.finish();
  return all;
}

TEST(Violation, NeverWritten) {
  const auto sends = with_rank_0([](Builder* b) {
    b->send(0, 1, b->scratch(0));
    b->recv(0, 1, b->out(0));
  });
  EXPECT_SAYS(verdict(sends, kAR), "rank 0, step 0 ", "sends s0[0], which was never written");
  const auto reads = with_rank_0([](Builder* b) {
    b->send(0, 1, b->in(0));
    b->recv(0, 1, b->out(0));
    b->reduce(1, b->scratch(0), b->out(0));
  });
  EXPECT_SAYS(verdict(reads, kAR), "rank 0, step 2 ", "reads s0[0], which was never written");
  const auto adds = with_rank_0([](Builder* b) {
    b->send(0, 1, b->in(0));
    b->recv(0, 1, b->scratch(0));
    b->reduce(1, b->in(0), b->out(0));
  });
  EXPECT_SAYS(verdict(adds, kAR), "rank 0, step 2 ", "adds to out[0], which was never written");
  const auto leaves = with_rank_0([](Builder* b) {
    b->send(0, 1, b->in(0));
    b->recv(0, 1, b->scratch(0));
  });
  EXPECT_SAYS(verdict(leaves, kAR), "rank 0: ", "out[0] is never written");
}

TEST(Violation, CountedTwiceOrNotAtAll) {
  const auto twice = with_rank_0([](Builder* b) {
    b->send(0, 1, b->in(0));
    b->recv_reduce(0, 1, b->in(0), b->out(0), Src::kLeft);
    b->reduce(1, b->in(0), b->out(0));
  });
  EXPECT_SAYS(verdict(twice, kAR), "rank 0, step 2 ", "counts rank 0's input of part 0 twice");
  const auto without = with_rank_0([](Builder* b) {
    b->send(0, 1, b->in(0));
    b->recv(0, 1, b->out(0));
  });
  EXPECT_SAYS(verdict(without, kAR), "rank 0, step 1 ", "out[0] ends as 1, without rank 0's input");
}

TEST(Violation, OrderOfASum) {
  auto all = exchange();
  all[1].steps[1].op_bits ^= 8;
  EXPECT_SAYS(verdict(all, kAR), "rank 1, step 1 ", "ends as (1+0), but on another rank as (0+1)");
  all[0].steps[1].op_bits ^= 8;
  EXPECT_EQ(verdict(all, kAR), "proved");
  EXPECT_SAYS(verdict(all, kAR, false, true), "rank 0, step 1 ",
              "ends as (1+0), the canonical tree is (0+1)");
}

TEST(Violation, FirstStepIsNamed) {
  auto all = build_all(algorithm(kAR, "ring"), 8, 0, 0);
  all[3].steps[9].op_bits = 7;
  all[3].steps[4].n_chunks = 0;
  all[6].steps[0].n_chunks = 0;
  EXPECT_SAYS(verdict(all, kAR), "rank 3, step 4 ", "covers no chunk");
}

TEST(Violation, ClosedForms) {
  Algorithm a = algorithm(kAR, "ring");
  a.rounds = [](int n, int) { return 2 * n - 3; };
  EXPECT_SAYS(verify(a, 4, 0, 0, false, nullptr).message(), "all_reduce/ring with 4 ranks",
              "takes 6 rounds, the closed form says 5");
  a = algorithm(kAR, "ring");
  a.max_parts_sent = [](int n, int) -> int64_t { return n; };
  EXPECT_SAYS(verify(a, 4, 0, 0, false, nullptr).message(), "all_reduce/ring with 4 ranks",
              "the busiest rank sends 6 parts, the closed form says 4");
}

}  // namespace
}  // namespace pycomm
