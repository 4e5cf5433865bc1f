// Waiting: no wake-up is lost whatever the policy, and a wait that cannot succeed ends when its client says
// so.
#include "transport/futex.h"

#include <gtest/gtest.h>
#include <time.h>

#include <thread>

namespace pycomm {
namespace {

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Counts how often a slice ran out: a lost wake-up shows as a whole slice slept.
class Client final : public WaitClient {
 public:
  explicit Client(int limit = 1 << 30) : limit_(limit) {}
  void before_block() override { blocked++; }
  Status check(int) override {
    return ++slices > limit_ ? Status::error(Code::kTimeout, "too many slices") : Status();
  }
  int blocked = 0;
  int slices = 0;

 private:
  int limit_;
};

class PingPong : public testing::TestWithParam<std::tuple<WaitPolicy, Half>> {};

// 10,000 round trips (fewer, but 1,000 at least, where other programs take the cores away at every yield). A
// sleeper that is never woken shows as a whole slice of 100 ms slept; a slow machine may still eat up a few.
TEST_P(PingPong, LosesNoWakeUp) {
  constexpr uint64_t kTurns = 10000;
  const auto [policy_, half_] = GetParam();
  const WaitPolicy policy = policy_;
  const Half half = half_;
  const int shift = half == Half::kHigh ? 32 : 0;
  Flag ping{}, pong{}, ping_sleepers{}, pong_sleepers{};
  Client here, there;
  uint64_t data = 0;  // ordinary memory, handed over by the flags
  bool last = false;
  std::thread other([&] {
    bool stop = false;
    for (uint64_t i = 1; !stop; i++) {
      const Status s = wait(
          ping.word, half, ping_sleepers, [&](uint64_t w) { return w >> shift >= i; }, policy, there, 0);
      ASSERT_TRUE(s.ok());
      ASSERT_EQ(data, 2 * i - 1);
      data++;
      stop = last;
      publish(pong.word, i << shift, half, pong_sleepers);
    }
  });
  const double end = now_s() + 4;
  for (uint64_t i = 1; !last; i++) {
    data++;
    last = i == kTurns || (i >= 1000 && now_s() > end);
    publish(ping.word, i << shift, half, ping_sleepers);
    const Status s = wait(
        pong.word, half, pong_sleepers, [&](uint64_t w) { return w >> shift >= i; }, policy, here, 1);
    EXPECT_TRUE(s.ok());
    EXPECT_EQ(data, 2 * i);
  }
  other.join();
  EXPECT_LE(here.slices + there.slices, 20) << "wake-ups were lost";
  EXPECT_EQ(ping_sleepers.word.load() + pong_sleepers.word.load(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Policies, PingPong,
                         testing::Combine(testing::Values(WaitPolicy{0, 0}, WaitPolicy{20, 8},
                                                          WaitPolicy{1000, 0}),
                                          testing::Values(Half::kLow, Half::kHigh)),
                         [](const auto& info) {
                           const WaitPolicy& p = std::get<0>(info.param);
                           return format("polls%dyields%d%s", p.polls, p.yields,
                                         std::get<1>(info.param) == Half::kLow ? "low" : "high");
                         });

TEST(Wait, SeveralSleepersAreAllWoken) {
  Flag flag{}, sleepers{};
  Client clients[4];
  std::vector<std::thread> threads;
  for (Client& c : clients) {
    threads.emplace_back([&] {
      const Status s = wait(
          flag.word, Half::kLow, sleepers, [](uint64_t w) { return w == 1; }, {0, 0}, c, 0);
      EXPECT_TRUE(s.ok());
    });
  }
  while (sleepers.word.load() < 4) thread_yield();
  publish(flag.word, 1, Half::kLow, sleepers);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(sleepers.word.load(), 0u);
}

TEST(Wait, EndsWhenTheClientSaysSo) {
  Flag flag{}, sleepers{};
  Client client(2);
  const double start = now_s();
  const Status s = wait(
      flag.word, Half::kLow, sleepers, [](uint64_t w) { return w != 0; }, {20, 8}, client, 0);
  EXPECT_EQ(s.code(), Code::kTimeout);
  EXPECT_EQ(client.blocked, 1);
  EXPECT_GE(now_s() - start, 0.9 * 0.001 * 3 * kSliceMs);
  EXPECT_LT(now_s() - start, 5);
}

TEST(Wait, WhatIsReadyAlreadyNeverBlocks) {
  Flag flag{}, sleepers{};
  flag.word = 5;
  Client client;
  EXPECT_TRUE(wait(
                  flag.word, Half::kLow, sleepers, [](uint64_t w) { return w == 5; }, {1, 0}, client, 0)
                  .ok());
  EXPECT_EQ(client.blocked, 0);
}

TEST(Wait, TheOtherHalfDoesNotWake) {
  Flag flag{};
  flag.word = uint64_t{3} << 32;
  const double start = now_s();
  futex_sleep(flag.word, Half::kLow, 0, 50);  // low half equals: sleeps its time
  EXPECT_GE(now_s() - start, 0.045);
  futex_sleep(flag.word, Half::kHigh, 0, 5000);  // high half differs: returns at once
  EXPECT_LT(now_s() - start, 4);
}

TEST(WaitPolicy, GivesTheCoreAwayWhereRanksOutnumberCores) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_GT(WaitPolicy::choose(1).polls, WaitPolicy::choose(usable_cores() + 1).polls);
  EXPECT_GT(WaitPolicy::choose(usable_cores() + 1).yields, 0);
}

}  // namespace
}  // namespace pycomm
