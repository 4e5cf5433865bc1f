// Small calls that the progress thread leaves to whoever waits for them: run once, in order, also when nobody
// waits, when many do, and when something else wants them run at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "engine/run_ranks.h"

namespace pycomm {
namespace {

std::shared_ptr<Work> start_sum(Communicator& comm, float* data, uint64_t n = 1) {
  auto request =
      std::make_unique<Request>(request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, n));
  request->call.in = request->call.out = Buffer(data, n);
  const Status s = comm.prepare(request.get(), nullptr);
  EXPECT_TRUE(s.ok()) << s.message();
  return comm.start(std::move(request));
}

Status wait_for(const std::shared_ptr<Work>& work, double timeout_s = -1) {
  bool finished = false;
  Status s = work->wait(timeout_s, nullptr, &finished);
  EXPECT_TRUE(finished);
  return s;
}

TEST(Patience, WhoWaitsRunsIt) {
  for (int n : {1, 2, 3}) {
    run_ranks(n, [n](TestRank& self) {
      bool ran_here = false;
      for (int i = 0; i < 2000; i++) {  // a thread that is preempted for longer than the patience comes late
        float x = 1;
        const auto work = start_sum(*self.comm, &x);
        Status s;
        ran_here |= self.comm->run_here(*work, nullptr, &s);
        PYCOMM_ASSERT_OK(std::move(s));
        PYCOMM_ASSERT_OK(wait_for(work));
        ASSERT_EQ(x, static_cast<float>(n));
      }
      EXPECT_TRUE(ran_here);
    });
  }
}

TEST(Patience, ALargeCallIsTheThreadsEvenWhenThatIsLate) {
  run_ranks(2, [](TestRank& self) {
    const uint64_t n = kEagerBytes / sizeof(float) + 1;
    std::vector<float> x(n);
    for (int i = 0; i < 200; i++) {
      std::fill(x.begin(), x.end(), 1.0f);
      const auto work = start_sum(*self.comm, x.data(), n);
      Status s;
      ASSERT_FALSE(self.comm->run_here(*work, nullptr, &s));
      PYCOMM_ASSERT_OK(wait_for(work));
      ASSERT_EQ(x.back(), 2);
    }
  });
}

TEST(Patience, NobodyNeedsToWait) {
  std::atomic<int> ended{0};
  run_ranks(2, [&](TestRank& self) {
    for (int i = 1; i <= 20; i++) {
      float x = 1;
      const auto work = start_sum(*self.comm, &x);
      while (!work->done()) thread_yield();
      PYCOMM_ASSERT_OK(work->result());
      ended++;
      while (ended.load() < 2 * i) thread_yield();
      ASSERT_EQ(x, 2);
    }
  });
}

TEST(Patience, AListenerIsTold) {
  run_ranks(2, [](TestRank& self) {
    const auto completions = std::make_shared<Completions>();
    for (uint64_t i = 0; i < 50; i++) {
      float x = 1;
      const auto work = start_sum(*self.comm, &x);
      work->announce(completions, i);
      uint64_t id = ~uint64_t{0};
      ASSERT_TRUE(completions->pop(&id));
      EXPECT_EQ(id, i);
      ASSERT_EQ(x, 2);
    }
  });
}

TEST(Patience, ManyThreadsMayWait) {
  run_ranks(2, [](TestRank& self) {
    for (int i = 0; i < 50; i++) {
      float x = 1;
      const auto work = start_sum(*self.comm, &x);
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; t++) {
        threads.emplace_back([&] {
          PYCOMM_ASSERT_OK(wait_for(work));
          EXPECT_EQ(x, 2);
        });
      }
      for (std::thread& t : threads) t.join();
    }
  });
}

TEST(Patience, TheLaterOfTwoIsWaitedForFirst) {
  run_ranks(2, [](TestRank& self) {
    for (int i = 0; i < 50; i++) {
      float x = 1;
      const auto first = start_sum(*self.comm, &x), second = start_sum(*self.comm, &x);
      PYCOMM_ASSERT_OK(wait_for(second));
      EXPECT_TRUE(first->done());
      ASSERT_EQ(x, 4);
    }
  });
}

TEST(Patience, AWaitWithALimitLeavesTheCallToTheThread) {
  std::atomic<bool> waited{false};
  run_ranks(2, [&](TestRank& self) {
    float x = 1;
    if (self.rank == 0) {
      const auto work = start_sum(*self.comm, &x);
      bool finished = true;
      PYCOMM_ASSERT_OK(work->wait(0.02, nullptr, &finished));
      EXPECT_FALSE(finished);
      waited = true;
      PYCOMM_ASSERT_OK(wait_for(work));
    } else {
      while (!waited.load()) thread_yield();
      PYCOMM_ASSERT_OK(wait_for(start_sum(*self.comm, &x)));
    }
    EXPECT_EQ(x, 2);
  });
}

TEST(Patience, CloseDoesNotForgetIt) {
  run_ranks(2, [](TestRank& self) {
    float x = 1;
    const auto work = start_sum(*self.comm, &x);
    PYCOMM_ASSERT_OK(self.comm->close(nullptr));
    PYCOMM_ASSERT_OK(work->result());
    EXPECT_EQ(x, 2);
  });
}

// The waiter alone is interrupted; who asks the work afterwards, in whatever thread, hears of a failed call.
TEST(Patience, CtrlCOfTheWaiterIsNotTheWorks) {
  struct Pressed final : CallerHooks {
    void before_block() override {}
    Status poll() override { return Status::error(Code::kInterrupt, "interrupted"); }
  };
  run_ranks(2, [](TestRank& self) {
    bool ran_here = false;
    for (int i = 0; i < 5; i++) {
      std::shared_ptr<Communicator> child;
      PYCOMM_ASSERT_OK(self.comm->split(0, self.rank, 0, nullptr, &child));
      if (self.rank == 1) continue;  // makes no call
      float x = 1;
      const auto work = start_sum(*child, &x);
      Pressed hooks;
      Status s;
      if (child->run_here(*work, &hooks, &s)) {
        ran_here = true;
        EXPECT_EQ(s.code(), Code::kInterrupt);
        ASSERT_TRUE(work->done());
        EXPECT_EQ(work->result().code(), Code::kClosed);
        EXPECT_NE(work->result().message().find("interrupted (Ctrl-C)"), std::string::npos);
        EXPECT_EQ(wait_for(work).code(), Code::kClosed);
      }
      child->abort("the next one");
    }
    EXPECT_EQ(ran_here, self.rank == 0);
  });
}

TEST(Patience, AWaiterMayOutliveTheCommunicator) {
  run_ranks(2, [](TestRank& self) {
    for (int i = 0; i < 20; i++) {
      std::shared_ptr<Communicator> child;
      PYCOMM_ASSERT_OK(self.comm->split(0, self.rank, 0, nullptr, &child));
      float x = 1;
      const auto work = start_sum(*child, &x);
      std::thread waiter([&] { PYCOMM_ASSERT_OK(wait_for(work)); });
      child.reset();  // waits for the call; the waiter may be running it
      waiter.join();
      EXPECT_EQ(x, 2);
    }
  });
}

}  // namespace
}  // namespace pycomm
