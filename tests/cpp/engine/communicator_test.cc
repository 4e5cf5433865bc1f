// The order of calls and the family of communicators: queue, threads, split.
#include <gtest/gtest.h>

#include <atomic>

#include "engine/run_ranks.h"
#include "schedule/catalog.h"

namespace pycomm {
namespace {

std::unique_ptr<Request> all_reduce_request(Communicator& comm, float* in, float* out, uint64_t n) {
  auto request =
      std::make_unique<Request>(request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, n));
  request->call.in = Buffer(in, n);
  request->call.out = Buffer(out, n);
  const Status s = comm.prepare(request.get(), nullptr);
  EXPECT_TRUE(s.ok()) << s.message();
  return request;
}

Status finish(const std::shared_ptr<Work>& work) {
  bool finished = false;
  Status s = work->wait(kDeadlineS, nullptr, &finished);
  EXPECT_TRUE(finished);
  return s;
}

// Each call reads what the one before it wrote, so any other order gives other numbers.
TEST(Queue, RunsInTheOrderOfTheCalls) {
  for (int n : {1, 2, 4}) {
    run_ranks(n, [n](TestRank& self) {
      constexpr int kCalls = 30;
      for (uint64_t len : {uint64_t{1}, uint64_t{5000}}) {
        std::vector<std::vector<float>> steps(kCalls + 1, std::vector<float>(len, -1));
        std::fill(steps[0].begin(), steps[0].end(), 1.0f);
        std::vector<std::shared_ptr<Work>> works;
        for (int i = 0; i < kCalls; i++) {
          float* const from = steps[static_cast<size_t>(i) / 10 * 10].data();  // ten calls share a source
          auto request = all_reduce_request(*self.comm, from, steps[static_cast<size_t>(i) + 1].data(), len);
          if (i % 7 == 6) {
            PYCOMM_ASSERT_OK(self.comm->run(*request, nullptr));  // behind the queue
            for (const auto& w : works) ASSERT_TRUE(w->done());
          } else {
            works.push_back(self.comm->start(std::move(request)));
          }
        }
        for (const auto& w : works) PYCOMM_ASSERT_OK(finish(w));
        float want = 1;
        for (int i = 0; i <= kCalls; i++) {
          if (i % 10 == 1) want *= static_cast<float>(n);
          for (float x : steps[static_cast<size_t>(i)]) ASSERT_EQ(x, want) << "call " << i;
        }
      }
    });
  }
}

TEST(Queue, AWaitMayEndBeforeTheWork) {
  std::atomic<bool> waited{false};
  run_ranks(2, [&](TestRank& self) {
    float x = 1;
    PYCOMM_ASSERT_OK(barrier(*self.comm));
    if (self.rank == 0) {
      const auto work = self.comm->start(all_reduce_request(*self.comm, &x, &x, 1));
      bool finished = true;
      PYCOMM_ASSERT_OK(work->wait(0.05, nullptr, &finished));
      EXPECT_FALSE(finished);
      EXPECT_FALSE(work->done());
      waited = true;
      PYCOMM_ASSERT_OK(finish(work));
    } else {
      while (!waited.load()) thread_yield();
      PYCOMM_ASSERT_OK(all_reduce(*self.comm, &x, 1));
    }
    EXPECT_EQ(x, 2);
  });
}

TEST(Queue, ErrorsArriveInTheWork) {
  run_ranks(2, [](TestRank& self) {
    float x = 1;
    if (self.rank == 0) {
      auto request = std::make_unique<Request>();
      request->refusal = "no";
      PYCOMM_ASSERT_OK(finish(self.comm->start(std::move(request))));
    } else {
      EXPECT_EQ(finish(self.comm->start(all_reduce_request(*self.comm, &x, &x, 1))).code(), Code::kRefused);
    }
    expect_usable(self);
  });
}

TEST(Queue, CloseFinishesWhatIsQueued) {
  run_ranks(2, [](TestRank& self) {
    std::vector<float> v(1000, 1.0f);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 10; i++)
      works.push_back(self.comm->start(all_reduce_request(*self.comm, v.data(), v.data(), v.size())));
    PYCOMM_ASSERT_OK(self.comm->close(nullptr));
    for (const auto& w : works) {
      EXPECT_TRUE(w->done());
      PYCOMM_ASSERT_OK(w->result());
    }
    for (float x : v) ASSERT_EQ(x, 1024);
    EXPECT_EQ(finish(self.comm->start(std::make_unique<Request>())).code(), Code::kClosed);
  });
}

TEST(Queue, AbortEndsAllOfIt) {
  run_ranks(2, [](TestRank& self) {
    std::vector<float> v(1000, 1.0f);
    if (self.rank == 1) {
      // Alive and silent until the other has given up.
      while (self.comm->group().control(0).state.word.load() != static_cast<uint64_t>(RankState::kFailed))
        thread_yield();
      return;
    }
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 5; i++)
      works.push_back(self.comm->start(all_reduce_request(*self.comm, v.data(), v.data(), v.size())));
    const double start = monotonic_s();
    self.comm->abort("enough");
    for (const auto& w : works) {
      const Status s = finish(w);
      EXPECT_EQ(s.code(), Code::kClosed);
      EXPECT_NE(s.message().find("enough"), std::string::npos) << s.message();
    }
    EXPECT_LT(monotonic_s() - start, 5);
  });
}

// Two threads of every rank call at once. The calls are alike, so any order of them serves both.
TEST(Threads, TwoAtOnceAreServedOneAfterTheOther) {
  for (int n : {1, 2, 3}) {
    run_ranks(n, [](TestRank& self) {
      std::vector<std::thread> threads;
      for (int t = 0; t < 2; t++) {
        threads.emplace_back([&] {
          for (int i = 0; i < 100; i++) {
            std::vector<float> v(700, static_cast<float>(self.rank + 1));
            if (i % 4 == 3) {
              PYCOMM_ASSERT_OK(
                  finish(self.comm->start(all_reduce_request(*self.comm, v.data(), v.data(), v.size()))));
            } else {
              PYCOMM_ASSERT_OK(all_reduce(*self.comm, v.data(), v.size()));
            }
            for (float x : v) ASSERT_EQ(x, static_cast<float>(self.size * (self.size + 1) / 2));
          }
        });
      }
      for (std::thread& t : threads) t.join();
    });
  }
}

TEST(Split, ByColorAndKey) {
  run_ranks(5, [](TestRank& self) {
    // Even and odd ranks, in reverse order.
    std::shared_ptr<Communicator> child;
    PYCOMM_ASSERT_OK(self.comm->split(self.rank % 2, -self.rank, 0, nullptr, &child));
    ASSERT_NE(child, nullptr);
    const bool even = self.rank % 2 == 0;
    EXPECT_EQ(child->size(), even ? 3 : 2);
    EXPECT_EQ(child->rank(), even ? (4 - self.rank) / 2 : (3 - self.rank) / 2);
    // Who am I among them: rank 0 of the child tells its parent's rank.
    float told = static_cast<float>(self.rank);
    Request request = request_of(CallKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, 1);
    if (child->rank() == 0) request.call.in = Buffer(&told, 1);
    request.call.out = Buffer(&told, 1);
    PYCOMM_ASSERT_OK(child->prepare(&request, nullptr));
    PYCOMM_ASSERT_OK(child->run(request, nullptr));
    EXPECT_EQ(told, even ? 4 : 3);
    // Parent and child at once, from two threads.
    std::thread other([&] {
      for (int i = 0; i < 50; i++) {
        std::vector<float> v(3000, 1.0f);
        PYCOMM_ASSERT_OK(all_reduce(*child, v.data(), v.size()));
        for (float x : v) ASSERT_EQ(x, static_cast<float>(child->size()));
      }
    });
    for (int i = 0; i < 50; i++) expect_usable(self, 100);
    other.join();
  });
}

TEST(Split, EqualKeysKeepTheOrderAndNegativeColorsStayOut) {
  run_ranks(4, [](TestRank& self) {
    const size_t before = self.arena().bytes_in_use();
    std::shared_ptr<Communicator> child;
    PYCOMM_ASSERT_OK(self.comm->split(self.rank == 1 ? -1 : 7, 0, 0, nullptr, &child));
    if (self.rank == 1) {
      EXPECT_EQ(child, nullptr);
      EXPECT_EQ(self.arena().bytes_in_use(), before);
    } else {
      ASSERT_NE(child, nullptr);
      EXPECT_EQ(child->size(), 3);
      EXPECT_EQ(child->rank(), self.rank == 0 ? 0 : self.rank - 1);
      float x = 1;
      PYCOMM_ASSERT_OK(all_reduce(*child, &x, 1));
      EXPECT_EQ(x, 3);
    }
    expect_usable(self);
  });
}

TEST(Split, ChildrenOfChildrenOutliveAndOutdieTheirParents) {
  run_ranks(8, [](TestRank& self) {
    std::shared_ptr<Communicator> half, quarter, one;
    PYCOMM_ASSERT_OK(self.comm->split(self.rank / 4, self.rank, 0, nullptr, &half));
    PYCOMM_ASSERT_OK(half->split(half->rank() / 2, half->rank(), 0, nullptr, &quarter));
    PYCOMM_ASSERT_OK(quarter->split(quarter->rank(), 0, 0, nullptr, &one));
    EXPECT_EQ(half->size(), 4);
    EXPECT_EQ(quarter->size(), 2);
    EXPECT_EQ(one->size(), 1);
    half.reset();  // a parent may go first
    for (int i = 0; i < 20; i++) {
      std::vector<float> v(4000, static_cast<float>(self.rank));
      PYCOMM_ASSERT_OK(all_reduce(*quarter, v.data(), v.size()));
      const int low = self.rank / 2 * 2;
      for (float x : v) ASSERT_EQ(x, static_cast<float>(low + low + 1));
    }
    quarter->abort("a child fails alone");
    float x = 5;
    PYCOMM_ASSERT_OK(all_reduce(*one, &x, 1));
    EXPECT_EQ(x, 5);
    expect_usable(self);
  });
}

TEST(Split, ARefusedSplitLeavesNothingBehind) {
  run_ranks(2, [](TestRank& self) {
    const size_t before = self.arena().bytes_in_use();
    if (self.rank == 0) {
      Request request;
      request.refusal = "no";
      PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
    } else {
      std::shared_ptr<Communicator> child;
      EXPECT_EQ(self.comm->split(0, 0, 0, nullptr, &child).code(), Code::kRefused);
      EXPECT_EQ(child, nullptr);
    }
    EXPECT_EQ(self.arena().bytes_in_use(), before);
    expect_usable(self);
  });
}

// new_group hashes its list of ranks into `plan`: lists that differ are told apart before anybody goes on.
TEST(Split, APlanThatDiffersIsAMismatchOnAllRanksAndLeavesNothingBehind) {
  for (int who = 0; who < 3; who++) {
    run_ranks(3, [who](TestRank& self) {
      const size_t before = self.arena().bytes_in_use();
      const int64_t plan = self.rank == who ? 17 : -4;
      const int64_t color = self.rank == 2 ? -1 : 0;
      std::shared_ptr<Communicator> child;
      const Status s = self.comm->split(color, 0, plan, nullptr, &child);
      ASSERT_EQ(s.code(), Code::kMismatch) << s.message();
      const std::string culprits = format("rank 0 and rank %d gave different lists", std::max(who, 1));
      EXPECT_NE(s.message().find(culprits), std::string::npos) << s.message();
      EXPECT_EQ(child, nullptr);
      EXPECT_EQ(self.arena().bytes_in_use(), before);
      EXPECT_EQ(barrier(*self.comm).message(), s.message());
    });
  }
}

// 2^16 + 1000 tiles: positions count on from call to call, whatever the size of a call.
TEST(Large, MoreTilesThanFitIn16Bits) {
  constexpr size_t kTile = 4096, kBytes = kTile * ((size_t{1} << 16) + 1000);
  run_ranks(2, [&](TestRank& self) {
    uint8_t one_shot = 0;
    PYCOMM_ASSERT_OK(algorithm_index(CallKind::kAllReduce, "one_shot", &one_shot));
    PYCOMM_ASSERT_OK(
        self.comm->selector().set_table(CallKind::kAllReduce, {{~uint64_t{0}, one_shot, one_shot, kTile}}));
    std::vector<uint8_t> data(kBytes);
    for (size_t i = 0; i < kBytes; i++)
      data[i] = static_cast<uint8_t>(i * 7 + static_cast<size_t>(self.rank));
    Request request = request_of(CallKind::kAllReduce, DType::kUInt8, ReduceOp::kMax, kBytes);
    request.call.in = request.call.out = Buffer(data.data(), kBytes);
    PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
    for (int round = 0; round < 2; round++) PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
    size_t wrong = 0;
    for (size_t i = 0; i < kBytes; i++)
      wrong += data[i] != std::max(static_cast<uint8_t>(i * 7), static_cast<uint8_t>(i * 7 + 1));
    EXPECT_EQ(wrong, 0u);
  });
}

}  // namespace
}  // namespace pycomm
