// Point to point: matching by source and tag, sizes from nothing to many pipes full, both directions at once,
// and what becomes of transfers whose peer, size or communicator goes wrong.
#include "engine/p2p.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "engine/run_ranks.h"

namespace pycomm {
namespace {

using Works = std::vector<std::shared_ptr<Work>>;

std::shared_ptr<Work> isend(TestRank& self, int peer, int tag, const std::vector<int64_t>& v,
                            double timeout_s = kDeadlineS) {
  return self.comm->p2p().send(peer, tag, DType::kInt64, v.data(), v.size() * sizeof(int64_t), timeout_s);
}
std::shared_ptr<Work> irecv(TestRank& self, int peer, int tag, std::vector<int64_t>& v,
                            double timeout_s = kDeadlineS) {
  return self.comm->p2p().recv(peer, tag, DType::kInt64, v.data(), v.size() * sizeof(int64_t), timeout_s);
}
Status send(TestRank& self, int peer, int tag, const std::vector<int64_t>& v) {
  return self.comm->p2p().finish(isend(self, peer, tag, v), nullptr);
}
Status recv(TestRank& self, int peer, int tag, std::vector<int64_t>& v) {
  return self.comm->p2p().finish(irecv(self, peer, tag, v), nullptr);
}
Status wait_for(const std::shared_ptr<Work>& work) {
  bool finished = false;
  Status s = work->wait(kDeadlineS, nullptr, &finished);
  EXPECT_TRUE(finished);
  return s;
}

std::vector<int64_t> message(int from, int tag, size_t n) {
  std::vector<int64_t> v(n);
  for (size_t i = 0; i < n; i++) v[i] = from * 1000000 + tag * 1000 + static_cast<int64_t>(i % 1000);
  return v;
}

constexpr size_t kManyPipes = 200000;  // 1.6 MB: six times what a pipe holds

TEST(PointToPoint, EverySizeArrives) {
  run_ranks(2, [](TestRank& self) {
    int tag = 0;
    for (size_t n :
         {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, size_t{32768}, kManyPipes}) {
      tag++;
      for (int from = 0; from < 2; from++) {
        if (self.rank == from) {
          PYCOMM_ASSERT_OK(send(self, 1 - from, tag, message(from, tag, n)));
        } else {
          std::vector<int64_t> v(n, -1);
          PYCOMM_ASSERT_OK(recv(self, from, tag, v));
          ASSERT_EQ(v, message(from, tag, n));
        }
      }
    }
  });
}

TEST(PointToPoint, TagsInTheOtherOrderEvenWhenLarge) {
  run_ranks(2, [](TestRank& self) {
    if (self.rank == 0) {
      for (int tag = 0; tag < 5; tag++) PYCOMM_ASSERT_OK(send(self, 1, tag, message(0, tag, kManyPipes)));
    } else {
      for (int tag = 4; tag >= 0; tag--) {
        std::vector<int64_t> v(kManyPipes);
        PYCOMM_ASSERT_OK(recv(self, 0, tag, v));
        ASSERT_EQ(v, message(0, tag, kManyPipes));
      }
    }
  });
}

TEST(PointToPoint, OneTagKeepsItsOrder) {
  run_ranks(2, [](TestRank& self) {
    for (int i = 0; i < 300; i++) {
      std::vector<int64_t> v(static_cast<size_t>(1 + i % 40), i);
      if (self.rank == 0) {
        PYCOMM_ASSERT_OK(send(self, 1, 9, v));
      } else {
        std::vector<int64_t> got(v.size());
        PYCOMM_ASSERT_OK(recv(self, 0, 9, got));
        ASSERT_EQ(got, v);
      }
    }
  });
}

TEST(PointToPoint, AnySourceSaysWhoSent) {
  run_ranks(4, [](TestRank& self) {
    constexpr int kEach = 25;
    if (self.rank != 0) {
      for (int i = 0; i < kEach; i++) PYCOMM_ASSERT_OK(send(self, 0, 3, message(self.rank, i, 100)));
      return;
    }
    std::vector<int> got(4);
    for (int i = 0; i < 3 * kEach; i++) {
      std::vector<int64_t> v(100);
      const auto work = irecv(self, -1, 3, v);
      PYCOMM_ASSERT_OK(self.comm->p2p().finish(work, nullptr));
      ASSERT_TRUE(work->source >= 1 && work->source <= 3);
      // In order from each source.
      ASSERT_EQ(v, message(work->source, got[static_cast<size_t>(work->source)]++, 100));
    }
    EXPECT_EQ(got, (std::vector<int>{0, kEach, kEach, kEach}));
  });
}

TEST(PointToPoint, LargeMessagesInBothDirectionsAtOnce) {
  for (bool background : {false, true}) {
    run_ranks(3, [background](TestRank& self) {
      const int right = (self.rank + 1) % 3, left = (self.rank + 2) % 3;
      for (int round = 0; round < 3; round++) {
        const auto out = message(self.rank, round, kManyPipes);
        std::vector<int64_t> from_left(kManyPipes), from_right(kManyPipes);
        const Works works = {isend(self, right, round, out), isend(self, left, round, out),
                             irecv(self, left, round, from_left), irecv(self, right, round, from_right)};
        if (background) self.comm->p2p().in_background();
        for (const auto& w : works)
          PYCOMM_ASSERT_OK(background ? wait_for(w) : self.comm->p2p().finish(w, nullptr));
        ASSERT_EQ(from_left, message(left, round, kManyPipes));
        ASSERT_EQ(from_right, message(right, round, kManyPipes));
      }
    });
  }
}

// A blocking send on both sides does not deadlock either: what nobody asked for yet is kept by the receiver.
TEST(PointToPoint, BlockingSendsThatCross) {
  run_ranks(2, [](TestRank& self) {
    PYCOMM_ASSERT_OK(send(self, 1 - self.rank, 1, message(self.rank, 1, kManyPipes)));
    std::vector<int64_t> v(kManyPipes);
    PYCOMM_ASSERT_OK(recv(self, 1 - self.rank, 1, v));
    ASSERT_EQ(v, message(1 - self.rank, 1, kManyPipes));
  });
}

TEST(PointToPoint, ToOneself) {
  run_ranks(2, [](TestRank& self) {
    for (size_t n : {size_t{0}, size_t{10}, kManyPipes}) {
      const auto out = message(self.rank, 2, n);
      std::vector<int64_t> v(n);
      const auto work = isend(self, self.rank, 2, out);
      PYCOMM_ASSERT_OK(recv(self, self.rank, 2, v));
      PYCOMM_ASSERT_OK(self.comm->p2p().finish(work, nullptr));
      ASSERT_EQ(v, out);
    }
  });
}

TEST(PointToPoint, AFloodOfSends) {
  run_ranks(2, [](TestRank& self) {
    constexpr int kFlood = 1000;
    const int peer = 1 - self.rank;
    std::vector<std::vector<int64_t>> out, in;
    Works works;
    for (int i = 0; i < kFlood; i++) {
      out.push_back(message(self.rank, i, static_cast<size_t>(i * 7 % 501)));
      in.emplace_back(out.back().size());
    }
    for (int i = 0; i < kFlood; i++) works.push_back(isend(self, peer, i % 5, out[static_cast<size_t>(i)]));
    self.comm->p2p().in_background();
    // Recvs are posted in an order of their own among tags, in order within each.
    for (int tag = 4; tag >= 0; tag--) {
      for (int i = tag; i < kFlood; i += 5)
        works.push_back(irecv(self, peer, tag, in[static_cast<size_t>(i)]));
    }
    self.comm->p2p().in_background();
    for (const auto& w : works) PYCOMM_ASSERT_OK(wait_for(w));
    for (int i = 0; i < kFlood; i++) {
      ASSERT_EQ(in[static_cast<size_t>(i)], message(peer, i, in[static_cast<size_t>(i)].size())) << i;
    }
  });
}

TEST(PointToPoint, BesideCollectivesAndFromTwoThreads) {
  run_ranks(2, [](TestRank& self) {
    const int peer = 1 - self.rank;
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; t++) {
      threads.emplace_back([&self, peer, t] {
        for (int i = 0; i < 30; i++) {
          const auto out = message(self.rank, i, 9000);
          std::vector<int64_t> in(9000);
          const auto sent = isend(self, peer, t, out);
          PYCOMM_ASSERT_OK(recv(self, peer, t, in));
          PYCOMM_ASSERT_OK(self.comm->p2p().finish(sent, nullptr));
          ASSERT_EQ(in, message(peer, i, 9000));
        }
      });
    }
    for (int i = 0; i < 100; i++) expect_usable(self, 1000);
    for (std::thread& t : threads) t.join();
  });
}

TEST(PointToPoint, AMessageOfAnotherSizeOrTypeIsAMismatch) {
  for (bool early : {false, true}) {
    for (bool size : {false, true}) {
      run_ranks(2, [&](TestRank& self) {
        std::vector<int64_t> v(size && self.rank == 1 ? 99 : 100);
        if (self.rank == 0) {
          PYCOMM_ASSERT_OK(send(self, 1, 4, v));
          PYCOMM_ASSERT_OK(send(self, 1, 5, v));
          return;
        }
        if (early) {  // the message lies here already when the recv is posted
          std::vector<int64_t> other(100);
          PYCOMM_ASSERT_OK(recv(self, 0, 5, other));
        }
        const DType dtype = size ? DType::kInt64 : DType::kFloat64;
        const auto work = self.comm->p2p().recv(0, 4, dtype, v.data(), v.size() * 8, kDeadlineS);
        const Status s = self.comm->p2p().finish(work, nullptr);
        EXPECT_EQ(s.code(), Code::kMismatch) << s.message();
        const char* want = size ? "expects 792 bytes of int64, the message has 800 bytes of int64"
                                : "expects 800 bytes of float64, the message has 800 bytes of int64";
        EXPECT_NE(s.message().find(want), std::string::npos) << s.message();
      });
    }
  }
}

TEST(PointToPoint, ARecvThatNobodyServesTimesOut) {
  for (bool background : {false, true}) {
    std::atomic<bool> over{false};
    run_ranks(2, [&](TestRank& self) {
      if (self.rank == 1) {
        while (!over.load()) thread_yield();
        return;
      }
      std::vector<int64_t> v(10);
      const double start = monotonic_s();
      const auto work = irecv(self, 1, 6, v, 0.3);
      if (background) self.comm->p2p().in_background();
      const Status s = background ? wait_for(work) : self.comm->p2p().finish(work, nullptr);
      EXPECT_EQ(s.code(), Code::kTimeout) << s.message();
      EXPECT_NE(s.message().find("rank 1"), std::string::npos) << s.message();
      EXPECT_NE(s.message().find("tag 6"), std::string::npos) << s.message();
      EXPECT_LT(monotonic_s() - start, 5);
      over = true;
    });
  }
}

TEST(PointToPoint, APeerThatLeavesIsNamedAndItsLastWordsCount) {
  run_ranks(2, [](TestRank& self) {
    if (self.rank == 1) {
      PYCOMM_ASSERT_OK(send(self, 0, 1, message(1, 1, 50)));  // fits the pipe, so it is done at once
      return;                                                 // closes
    }
    while (self.comm->group().control(1).state.word.load() != static_cast<uint64_t>(RankState::kLeft))
      thread_yield();
    std::vector<int64_t> v(50), never(50);
    PYCOMM_ASSERT_OK(recv(self, 1, 1, v));
    ASSERT_EQ(v, message(1, 1, 50));
    const Status s = recv(self, 1, 2, never);
    EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
    EXPECT_NE(s.message().find("closed its communicator"), std::string::npos) << s.message();
  });
}

// Transfers that are under way when the communicator is closed or aborted end with an error, not in a crash,
// whoever moves the data at that moment.
TEST(PointToPoint, CloseAndAbortInTheMiddleOfLargeMessages) {
  for (int round = 0; round < 12; round++) {
    std::atomic<int> ended{0};
    run_ranks(2, [&](TestRank& self) {
      const int peer = 1 - self.rank;
      std::vector<std::vector<int64_t>> out(8, std::vector<int64_t>(kManyPipes, 1)), in(8, out[0]);
      Works works;
      for (size_t i = 0; i < 8; i++) {
        works.push_back(isend(self, peer, static_cast<int>(i), out[i]));
        works.push_back(irecv(self, peer, static_cast<int>(i), in[i]));
      }
      std::thread helper([&] {
        // Both move data at once.
        for (const auto& w : works) {
          if (!self.comm->p2p().finish(w, nullptr).ok()) return;
        }
      });
      std::thread killer([&] {
        const double until = monotonic_s() + 0.0002 * round;
        while (monotonic_s() < until) thread_yield();
        if (self.rank == round % 2) self.comm->abort("stop it");
      });
      if (round % 3 == 0) self.comm->p2p().in_background();
      Status last;
      for (const auto& w : works) {
        Status s = self.comm->p2p().finish(w, nullptr);
        if (!s.ok()) last = std::move(s);
      }
      helper.join();
      killer.join();
      if (!last.ok()) {
        EXPECT_TRUE(last.code() == Code::kClosed || last.code() == Code::kPeerLost) << last.message();
      }
      ended.fetch_add(1);
      while (ended.load() < 2) thread_yield();
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      for (const auto& w : works) EXPECT_TRUE(w->done());
    });
  }
}

TEST(PointToPoint, PendingTransfersEndWithTheCommunicator) {
  run_ranks(2, [](TestRank& self) {
    std::vector<int64_t> v(100), big(kManyPipes);
    const Works works = {irecv(self, 1 - self.rank, 1, v), isend(self, 1 - self.rank, 2, big),
                         irecv(self, self.rank, 3, v)};
    if (self.rank == 0) self.comm->p2p().in_background();
    PYCOMM_ASSERT_OK(self.comm->close(nullptr));
    for (const auto& w : works) {
      ASSERT_TRUE(w->done());
      const Code c = w->result().code();
      // Rank 0's background thread may have seen that rank 1 left before it was closed itself.
      EXPECT_TRUE(c == Code::kClosed || c == Code::kPeerLost) << w->result().message();
    }
  });
}

}  // namespace
}  // namespace pycomm
