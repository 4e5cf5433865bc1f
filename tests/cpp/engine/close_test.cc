// The end of a communicator: what is under way ends first, nobody is left waiting, and Ctrl-C ends a close
// that waits for a peer.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine/run_ranks.h"

namespace pycomm {
namespace {

// A caller that counts how often it was about to block, and is interrupted from the given time on.
class Hooks final : public CallerHooks {
 public:
  explicit Hooks(bool interrupted = false) : interrupted_(interrupted) {}
  void before_block() override { blocked_ = true; }
  Status poll() override { return interrupted_ ? Status::error(Code::kInterrupt, "Ctrl-C") : Status(); }
  bool blocked() const { return blocked_; }

 private:
  std::atomic<bool> blocked_{false};
  bool interrupted_;
};

template <class Condition>
void wait_until(Condition condition) {
  const double until = monotonic_s() + kDeadlineS;
  while (!condition()) {
    ASSERT_LT(monotonic_s(), until) << "waited in vain";
    thread_yield();
  }
}

std::unique_ptr<Request> add_up(Communicator& comm, std::vector<float>& v) {
  auto request =
      std::make_unique<Request>(request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, v.size()));
  request->call.in = request->call.out = Buffer(v.data(), v.size());
  const Status s = comm.prepare(request.get(), nullptr);
  EXPECT_TRUE(s.ok()) << s.message();
  return request;
}

// The last start comes after the communicator was closed.
void start_until_closed(Communicator& comm, std::vector<float>& v, std::vector<std::shared_ptr<Work>>* works,
                        std::atomic<int>* n_started) {
  for (bool open = true; open;) {
    open = !comm.closed();
    works->push_back(comm.start(add_up(comm, v)));
    ++*n_started;
  }
}

TEST(Close, WaitsForAnInlineCallOfAnotherThread) {
  for (uint64_t n : {uint64_t{1}, uint64_t{50000}}) {
    Hooks closer;  // of rank 0
    run_ranks(2, [&](TestRank& self) {
      std::vector<float> v(n, 1.0f);
      if (self.rank == 1) {
        wait_until([&] { return closer.blocked(); });
        PYCOMM_ASSERT_OK(all_reduce(*self.comm, v.data(), n));
        return;
      }
      std::jthread caller([&] { PYCOMM_ASSERT_OK(all_reduce(*self.comm, v.data(), n)); });
      wait_until([&] { return self.comm->group().last_call(0) != "no collective yet"; });  // it has begun
      PYCOMM_ASSERT_OK(self.comm->close(&closer));
      for (float x : v) ASSERT_EQ(x, 2) << "closed before the call had ended";
      EXPECT_EQ(barrier(*self.comm).code(), Code::kClosed);
      caller.join();
    });
  }
}

// start() against close(): a call is either refused as closed or served, and never lost.
TEST(Close, AgainstARacingStart) {
  for (int round = 0; round < 40; round++) {
    run_ranks(1, [&](TestRank& self) {
      std::vector<float> v(100, 1.0f);
      std::vector<std::shared_ptr<Work>> works;
      std::atomic<int> n_started{0};
      std::jthread starter([&] { start_until_closed(*self.comm, v, &works, &n_started); });
      wait_until([&] { return n_started.load() > round; });
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      starter.join();
      bool closed = false;
      for (const auto& w : works) {
        bool finished = false;
        const Status s = w->wait(kDeadlineS, nullptr, &finished);
        ASSERT_TRUE(finished) << "a work was lost";
        ASSERT_TRUE(s.ok() || s.code() == Code::kClosed) << s.message();
        ASSERT_FALSE(s.ok() && closed) << "served after one that came too late";
        closed = closed || !s.ok();
      }
      EXPECT_TRUE(closed);
    });
  }
}

TEST(Close, AgainstARacingStartOfEveryRank) {
  for (int round = 0; round < 10; round++) {
    run_ranks(3, [&](TestRank& self) {
      std::vector<float> v(1000, 0.0f);
      std::vector<std::shared_ptr<Work>> works;
      std::atomic<int> n_started{0};
      std::jthread starter([&] { start_until_closed(*self.comm, v, &works, &n_started); });
      wait_until([&] { return n_started.load() > round; });
      const double start = monotonic_s();
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      EXPECT_LT(monotonic_s() - start, 10);
      starter.join();
      // Ranks have queued different numbers of calls; those that miss a peer say so.
      for (const auto& w : works) {
        ASSERT_TRUE(w->done());
        const Code c = w->result().code();
        ASSERT_TRUE(c == Code::kOk || c == Code::kClosed || c == Code::kPeerLost) << w->result().message();
      }
    });
  }
}

TEST(Close, IsEndedByCtrlCWhileACallBlocks) {
  for (bool queued : {false, true}) {
    std::atomic<bool> over{false};
    run_ranks(2, [&](TestRank& self) {
      std::vector<float> v(500000, 1.0f);  // more tiles than rank 0 can have staged
      if (self.rank == 1) {                // alive, and silent until the other has closed
        wait_until([&] { return over.load(); });
        const Status s = all_reduce(*self.comm, v.data(), v.size());
        EXPECT_EQ(s.code(), Code::kClosed) << s.message();
        EXPECT_NE(s.message().find("rank 0"), std::string::npos) << s.message();
        EXPECT_NE(s.message().find("interrupted while closing (Ctrl-C)"), std::string::npos) << s.message();
        return;
      }
      Status inline_call;
      std::vector<std::shared_ptr<Work>> works;
      std::jthread caller;
      if (queued) {
        for (int i = 0; i < 3; i++) works.push_back(self.comm->start(add_up(*self.comm, v)));
      } else {
        caller = std::jthread([&] { inline_call = all_reduce(*self.comm, v.data(), v.size()); });
        wait_until([&] { return self.comm->group().last_call(0) != "no collective yet"; });
      }
      Hooks hooks(true);
      const double start = monotonic_s();
      EXPECT_EQ(self.comm->close(&hooks).code(), Code::kInterrupt);
      EXPECT_LT(monotonic_s() - start, 5);
      over = true;
      EXPECT_TRUE(self.comm->closed());
      if (caller.joinable()) caller.join();
      EXPECT_EQ(inline_call.code(), queued ? Code::kOk : Code::kClosed) << inline_call.message();
      for (const auto& w : works) {
        ASSERT_TRUE(w->done());
        EXPECT_EQ(w->result().code(), Code::kClosed) << w->result().message();
      }
      EXPECT_EQ(barrier(*self.comm).code(), Code::kClosed);
      PYCOMM_ASSERT_OK(self.comm->close(&hooks));  // again: nothing
    });
  }
}

TEST(Close, AnIdleCommunicatorAsksNobody) {
  run_ranks(2, [](TestRank& self) {
    expect_usable(self);
    Hooks hooks(true);
    PYCOMM_ASSERT_OK(self.comm->close(&hooks));
    EXPECT_FALSE(hooks.blocked());
  });
}

// Two threads close at once: both return, and both find it closed.
TEST(Close, FromTwoThreads) {
  for (int round = 0; round < 20; round++) {
    run_ranks(2, [](TestRank& self) {
      std::vector<float> v(1000, 1.0f);
      const auto work = self.comm->start(add_up(*self.comm, v));
      std::jthread other([&] {
        PYCOMM_ASSERT_OK(self.comm->close(nullptr));
        EXPECT_TRUE(self.comm->closed());
      });
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      EXPECT_TRUE(self.comm->closed());
      other.join();
      EXPECT_TRUE(work->done());
      PYCOMM_ASSERT_OK(work->result());
    });
  }
}

}  // namespace
}  // namespace pycomm
