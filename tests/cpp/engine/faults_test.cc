// When things go wrong: refused calls leave the communicator usable on every rank, everything else ends it on
// every rank, with an error that names the culprit, in bounded time.
#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "engine/run_ranks.h"

namespace pycomm {
namespace {

Request refusal(const std::string& why) {
  Request request;
  request.refusal = why;
  return request;
}

// One call of a kind and size that all ranks derive from `seed`; `fill` sets the expected values.
Status call_something(TestRank& self, unsigned seed, bool* checked) {
  std::mt19937 random(seed);
  const uint64_t sizes[] = {1, 5, 300, 3000, 20000};
  const uint64_t n = sizes[random() % 5];
  const unsigned kind = random() % 4;
  *checked = true;
  if (kind == 0) return barrier(*self.comm);
  if (kind == 1) {
    Request request = request_of(CallKind::kAllToAll, DType::kInt64, ReduceOp::kSum, 0);
    request.send_counts.assign(static_cast<size_t>(self.size), n);
    request.recv_counts = request.send_counts;
    std::vector<int64_t> in(n * static_cast<uint64_t>(self.size), self.rank), out(in.size(), -1);
    request.call.in = Buffer(in.data(), in.size());
    request.call.out = Buffer(out.data(), out.size());
    PYCOMM_RETURN_IF_ERROR(self.comm->prepare(&request, nullptr));
    PYCOMM_RETURN_IF_ERROR(self.comm->run(request, nullptr));
    for (size_t i = 0; i < out.size(); i++) *checked = *checked && out[i] == static_cast<int64_t>(i / n);
    return Status();
  }
  const Guarded<float> v(n, kind == 2 ? &self : nullptr);
  for (uint64_t i = 0; i < n; i++) v[i] = static_cast<float>(self.rank + 1);
  Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, n);
  request.call.in = request.call.out = Buffer(v.data(), n);
  const char* names[] = {"direct", "ring", "one_shot", "halving_doubling"};
  PYCOMM_RETURN_IF_ERROR(self.comm->prepare(&request, names[random() % 4]));
  request.call.tile_bytes = random() % 2 == 0 ? 4096 : 16384;
  PYCOMM_RETURN_IF_ERROR(self.comm->run(request, nullptr));
  const auto want = static_cast<float>(self.size * (self.size + 1) / 2);
  for (uint64_t i = 0; i < n; i++) *checked = *checked && v[i] == want;
  return Status();
}

TEST(Refused, EveryRankIsToldWhoAndWhy) {
  for (int n : {1, 2, 3, 8}) {
    run_ranks(n, [](TestRank& self) {
      for (uint64_t count : {uint64_t{1}, uint64_t{300}, uint64_t{300000}}) {
        for (int who = 0; who < self.size; who++) {
          if (self.rank == who) {
            Request request = refusal("its tensor has a bad shape");
            PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
          } else {
            std::vector<float> v(count);
            const Status s = all_reduce(*self.comm, v.data(), count);
            ASSERT_EQ(s.code(), Code::kRefused) << s.message();
            const std::string want = format("rank %d refused its call: its tensor has a bad shape", who);
            ASSERT_NE(s.message().find(want), std::string::npos) << s.message();
          }
        }
        expect_usable(self);
      }
    });
  }
}

// Long bursts: which ranks refuse changes from call to call, so ranks that refuse run ahead of those that
// have staged tiles in vain. Every rank's outcome is known: refused if anybody else refused, else served.
TEST(Refused, InBurstsFromDifferentRanks) {
  for (int n : {2, 3, 5}) {
    run_ranks(n, [n](TestRank& self) {
      std::mt19937 random(static_cast<unsigned>(n));
      for (unsigned call = 0; call < 250; call++) {
        const unsigned style = random() % 4;
        std::vector<bool> refuses(static_cast<size_t>(n));
        for (int q = 0; q < n; q++) {
          const bool lot = random() % 2 == 0;
          refuses[static_cast<size_t>(q)] = style == 0   ? false
                                            : style == 1 ? q == static_cast<int>(call / 7) % n
                                                         : lot;
        }
        int refusing = 0;
        for (bool b : refuses) refusing += b;
        if (refuses[static_cast<size_t>(self.rank)]) {
          Request request = refusal(format("reason %u of rank %d", call, self.rank));
          PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
          continue;
        }
        bool right = false;
        const Status s = call_something(self, call, &right);
        if (refusing == 0) {
          ASSERT_TRUE(s.ok()) << "call " << call << ": " << s.message();
          ASSERT_TRUE(right) << "call " << call << " on rank " << self.rank;
          continue;
        }
        ASSERT_EQ(s.code(), Code::kRefused) << "call " << call << ": " << s.message();
        ASSERT_NE(s.message().find(format("reason %u of rank ", call)), std::string::npos) << s.message();
      }
      expect_usable(self, 5000);
    });
  }
}

// What no rank can serve is an error of the same kind on all of them, and costs the communicator nothing.
TEST(Refused, WhatPrepareSays) {
  run_ranks(1, [](TestRank& self) {
    Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kBand, 1);
    EXPECT_EQ(self.comm->prepare(&request, nullptr).code(), Code::kValue);
    request = request_of(CallKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, 1, 1);
    EXPECT_EQ(self.comm->prepare(&request, nullptr).code(), Code::kValue);
    request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 1);
    const Status s = self.comm->prepare(&request, "rings");
    EXPECT_EQ(s.code(), Code::kValue);
    EXPECT_NE(s.message().find("ring"), std::string::npos) << s.message();
    request.deterministic = true;
    EXPECT_EQ(self.comm->prepare(&request, "ring").code(), Code::kValue);
  });
}

using Change = std::function<void(Request&)>;

// Rank 1 makes another valid call than the others: MismatchError everywhere, both calls in the message.
TEST(Mismatch, IsRaisedOnAllRanks) {
  const std::vector<std::pair<const char*, Change>> changes = {
      {"count 301", [](Request& r) { r.call.sig.count = 301; }},
      {"op max", [](Request& r) { r.call.sig.op = ReduceOp::kMax; }},
      {"int32", [](Request& r) { r.call.sig.dtype = DType::kInt32; }},
      {"reduce", [](Request& r) { r.call.sig.kind = CallKind::kReduce; }},
      {"barrier", [](Request& r) { r.call.sig.kind = CallKind::kBarrier; }},
      {"count 100000", [](Request& r) { r.call.sig.count = 100000; }},
  };
  for (const auto& [what, change] : changes) {
    for (bool large : {false, true}) {
      run_ranks(3, [&, what = what, change = change](TestRank& self) {
        SCOPED_TRACE(what);
        const uint64_t n = large ? 40000 : 300;
        std::vector<float> v(100000);
        Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, n);
        if (self.rank == 1) change(request);
        request.call.in = request.call.out = Buffer(v.data(), request.call.sig.count);
        PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
        const double start = monotonic_s();
        const Status s = self.comm->run(request, nullptr);
        EXPECT_LT(monotonic_s() - start, 5);
        ASSERT_EQ(s.code(), Code::kMismatch) << s.message();
        EXPECT_NE(s.message().find(what), std::string::npos) << s.message();
        EXPECT_NE(s.message().find("rank 1"), std::string::npos) << s.message();
        // Failed for good, with the same words.
        EXPECT_TRUE(self.comm->group().failed());
        const Status again = barrier(*self.comm);
        EXPECT_EQ(again.code(), Code::kMismatch);
        EXPECT_EQ(again.message(), s.message());
      });
    }
  }
}

TEST(Mismatch, OfRootAlgorithmAndCounts) {
  for (int what = 0; what < 3; what++) {
    run_ranks(2, [what](TestRank& self) {
      std::vector<float> v(64);
      const CallKind kind = what == 2   ? CallKind::kAllGather
                            : what == 1 ? CallKind::kAllReduce
                                        : CallKind::kBroadcast;
      Request request = request_of(kind, DType::kFloat32, ReduceOp::kSum, 64);
      if (what == 0) request.call.sig.root = self.rank;
      if (what == 2)
        request.counts = self.rank == 0 ? std::vector<uint64_t>{32, 32} : std::vector<uint64_t>{31, 33};
      request.call.in = request.call.out = Buffer(v.data(), 64);
      PYCOMM_ASSERT_OK(self.comm->prepare(&request, what == 1 && self.rank == 0 ? "ring" : nullptr));
      const Status s = self.comm->run(request, nullptr);
      ASSERT_EQ(s.code(), Code::kMismatch) << s.message();
    });
  }
}

TEST(Timeout, NamesTheRankThatDidNotCome) {
  for (uint64_t n : {uint64_t{1}, uint64_t{100000}}) {
    std::atomic<int> ended{0};
    run_ranks(3, [&](TestRank& self) {
      expect_usable(self);
      if (self.rank == 1) {
        while (ended.load() < 2) thread_yield();
        // The late rank learns what happened to the others; a call that needs nothing more of them than what
        // they have left there already may still succeed, the next cannot.
        std::vector<float> v(n);
        Status s = all_reduce(*self.comm, v.data(), n);
        if (s.ok() && n == 1) s = barrier(*self.comm);
        EXPECT_EQ(s.code(), Code::kTimeout) << s.message();
        return;
      }
      std::vector<float> v(n);
      const double start = monotonic_s();
      const Status s = all_reduce(*self.comm, v.data(), n, 0.4);
      const double took = monotonic_s() - start;
      ended.fetch_add(1);
      EXPECT_EQ(s.code(), Code::kTimeout);
      EXPECT_NE(s.message().find("for rank 1 (host "), std::string::npos) << s.message();
      EXPECT_NE(s.message().find("its last collective was all_reduce"), std::string::npos) << s.message();
      EXPECT_GE(took, 0.35);
      EXPECT_LT(took, 5);
    });
  }
}

TEST(Abort, FromAnotherThreadEndsABlockedCallAndThePeers) {
  std::atomic<bool> over{false};
  run_ranks(3, [&](TestRank& self) {
    std::vector<float> v(50000);
    if (self.rank == 2) {  // lives, but calls too late
      while (!over.load()) thread_yield();
      const Status s = all_reduce(*self.comm, v.data(), v.size());
      EXPECT_EQ(s.code(), Code::kClosed) << s.message();
      return;
    }
    std::thread aborter;
    const double start = monotonic_s();
    if (self.rank == 0) {
      aborter = std::thread([&] {
        while (monotonic_s() - start < 0.15) thread_yield();
        self.comm->abort("the test says so");
      });
    }
    const Status s = all_reduce(*self.comm, v.data(), v.size());
    EXPECT_LT(monotonic_s() - start, 5);
    EXPECT_EQ(s.code(), Code::kClosed) << s.message();
    EXPECT_NE(s.message().find("the test says so"), std::string::npos) << s.message();
    if (aborter.joinable()) aborter.join();
    if (self.rank == 1) over = true;
  });
}

TEST(Close, APeerThatClosedIsNamed) {
  run_ranks(3, [](TestRank& self) {
    expect_usable(self);
    if (self.rank == 2) {
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      EXPECT_EQ(barrier(*self.comm).code(), Code::kClosed);
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));  // again: nothing
      return;
    }
    std::vector<float> v(50000);
    const double start = monotonic_s();
    const Status s = all_reduce(*self.comm, v.data(), v.size());
    EXPECT_LT(monotonic_s() - start, 5);
    EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
    EXPECT_NE(s.message().find("rank 2"), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("closed its communicator"), std::string::npos) << s.message();
  });
}

TEST(Close, ThePartingWordReachesWhoeverWaits) {
  run_ranks(2, [](TestRank& self) {
    expect_usable(self);
    if (self.rank == 1) {
      PYCOMM_ASSERT_OK(self.comm->close(nullptr, INFINITY, "out of data"));
      self.comm->abort("too late");  // by another thread: what was said stands
      return;
    }
    std::vector<float> v(50000);
    const Status s = all_reduce(*self.comm, v.data(), v.size());
    EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
    EXPECT_NE(s.message().find("closed its communicator: out of data; its last collective"),
              std::string::npos)
        << s.message();
  });
}

// Who closes right after his last call must not take the result away from slower peers.
TEST(Close, RightAfterACallHarmsNobody) {
  for (int round = 0; round < 20; round++) {
    run_ranks(4, [&](TestRank& self) {
      const Guarded<float> v(20000, round % 2 == 0 ? &self : nullptr);
      for (uint64_t i = 0; i < v.size(); i++) v[i] = 1;
      PYCOMM_ASSERT_OK(all_reduce(*self.comm, v.data(), v.size()));
      for (uint64_t i = 0; i < v.size(); i++) ASSERT_EQ(v[i], 4);
    });
  }
}

}  // namespace
}  // namespace pycomm
