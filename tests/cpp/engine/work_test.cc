// Work and Completions: a call ends once, everybody who waits is told, and a listener of many works hears of
// them in the order in which they ended.
#include "engine/work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

namespace pycomm {
namespace {

constexpr double kDeadlineS = 30;

// What can be popped until stop() and emptiness.
std::vector<uint64_t> drain(Completions& completions) {
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; completions.pop(&id);) ids.push_back(id);
  return ids;
}

TEST(Work, EndsOnce) {
  Work work;
  EXPECT_FALSE(work.done());
  work.finish(Status::error(Code::kTimeout, "first"));
  work.finish(Status());
  EXPECT_TRUE(work.done());
  bool finished = false;
  const Status s = work.wait(0, nullptr, &finished);
  EXPECT_TRUE(finished);
  EXPECT_EQ(s.code(), Code::kTimeout);
  EXPECT_EQ(work.result().message(), "first");
}

TEST(Work, ManyThreadsWaitForOne) {
  Work work;
  std::vector<std::thread> threads;
  std::atomic<int> told{0};
  for (int t = 0; t < 4; t++) {
    threads.emplace_back([&] {
      bool finished = false;
      const Status s = work.wait(kDeadlineS, nullptr, &finished);
      told += finished && s.code() == Code::kPeerLost;
    });
  }
  work.finish(Status::error(Code::kPeerLost, "gone"));
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(told, 4);
}

TEST(Work, IsAnnouncedInTheOrderOfCompletion) {
  const auto completions = std::make_shared<Completions>();
  std::vector<Work> works(5);
  for (uint64_t i = 0; i < 5; i++) works[i].announce(completions, 100 + i);
  for (size_t i : {3, 0, 4, 1, 2}) works[i].finish(Status());
  completions->stop();
  EXPECT_EQ(drain(*completions), (std::vector<uint64_t>{103, 100, 104, 101, 102}));
}

TEST(Work, IsAnnouncedAtOnceWhenItHasEnded) {
  const auto completions = std::make_shared<Completions>();
  Work ended, pending;
  ended.finish(Status::error(Code::kClosed, "no"));
  pending.announce(completions, 1);
  ended.announce(completions, 2);
  uint64_t id = 0;
  ASSERT_TRUE(completions->pop(&id));
  EXPECT_EQ(id, 2u);
  pending.finish(Status());
  ASSERT_TRUE(completions->pop(&id));
  EXPECT_EQ(id, 1u);
}

TEST(Work, TellsEachOfItsListenersOnce) {
  const auto one = std::make_shared<Completions>(), other = std::make_shared<Completions>();
  Work work;
  work.announce(one, 1);
  work.announce(other, 2);
  work.announce(one, 3);
  work.finish(Status());
  work.finish(Status());
  one->stop();
  other->stop();
  EXPECT_EQ(drain(*one), (std::vector<uint64_t>{1, 3}));
  EXPECT_EQ(drain(*other), (std::vector<uint64_t>{2}));
}

// A listener may be gone by the time the work ends, and the work before its listener reads.
TEST(Work, KeepsItsListenerAlive) {
  std::weak_ptr<Completions> watched;
  {
    Work work;
    {
      const auto completions = std::make_shared<Completions>();
      watched = completions;
      work.announce(completions, 1);
    }
    EXPECT_FALSE(watched.expired());
    work.finish(Status());
    EXPECT_TRUE(watched.expired()) << "a work that has ended needs no listener";
  }
}

TEST(Completions, StopLetsWhatIsLeftBeReadFirst) {
  Completions completions;
  completions.push(1);
  completions.push(2);
  completions.stop();
  completions.push(3);  // a work that ends while the listener is being stopped
  EXPECT_EQ(drain(completions), (std::vector<uint64_t>{1, 2, 3}));
  uint64_t id = 7;
  EXPECT_FALSE(completions.pop(&id));
  EXPECT_EQ(id, 7u);
}

TEST(Completions, StopWakesEveryReader) {
  Completions completions;
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; t++) readers.emplace_back([&] { EXPECT_TRUE(drain(completions).empty()); });
  completions.stop();
  for (std::thread& t : readers) t.join();
}

// Works end on some threads while others announce them: every id comes out exactly once.
TEST(Completions, ManyThreadsLoseNothing) {
  constexpr size_t kWorks = 2000;
  const auto completions = std::make_shared<Completions>();
  std::vector<Work> works(kWorks);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 2; t++) {
    threads.emplace_back([&, t] {
      for (size_t i = t; i < kWorks; i += 2) works[i].finish(Status());
    });
    threads.emplace_back([&, t] {
      for (size_t i = t; i < kWorks; i += 2) works[i].announce(completions, i);
    });
  }
  std::vector<uint64_t> heard;
  for (uint64_t id = 0; heard.size() < kWorks && completions->pop(&id);) {
    ASSERT_TRUE(works[id].done()) << "announced before its end";
    heard.push_back(id);
  }
  for (std::thread& t : threads) t.join();
  completions->stop();
  EXPECT_TRUE(drain(*completions).empty());
  EXPECT_EQ(std::set<uint64_t>(heard.begin(), heard.end()).size(), kWorks);
}

}  // namespace
}  // namespace pycomm
