// Communicators of several hosts, as threads over loopback: every collective by placement and size, groups,
// transfers, and what goes wrong. Written for `make tsan`; tests/python/test_hosts*.py has the many cases.
#include "engine/run_hosts.h"

namespace pycomm {
namespace {

const std::vector<std::vector<int>> kPlacements = {{0, 1}, {0, 1, 1}, {0, 0, 1, 1}, {0, 1, 0, 2, 2}};
// Nothing; less than ranks; sent at once (Rounds::kEagerBytes); many slices.
constexpr uint64_t kCounts[] = {0, 1, 97, 150'001};

// Small whole numbers, exact in any order of summation.
float value(int rank, uint64_t i) { return static_cast<float>((rank + 1) * static_cast<int>(i % 7 + 1)); }

float sum_at(int n, uint64_t i) { return static_cast<float>(n * (n + 1) / 2 * static_cast<int>(i % 7 + 1)); }

std::vector<float> filled(int rank, uint64_t from, uint64_t n) {
  std::vector<float> v(n);
  for (uint64_t i = 0; i < n; i++) v[i] = value(rank, from + i);
  return v;
}

Status call(TestRank& self, CallKind kind, uint64_t count, const std::vector<float>& in,
            std::vector<float>& out, int root = 0, const std::vector<uint64_t>& counts = {}) {
  Request request = request_of(kind, DType::kFloat32, ReduceOp::kSum, count, root);
  request.counts = counts;
  request.call.in = Buffer(const_cast<float*>(in.data()), in.size());
  request.call.out = Buffer(out.data(), out.size());
  PYCOMM_RETURN_IF_ERROR(self.comm->prepare(&request, nullptr));
  return self.comm->run(request, nullptr);
}

void expect_sums(const TestRank& self, const std::vector<float>& got, uint64_t from, const char* what) {
  for (uint64_t i = 0; i < got.size(); i++)
    ASSERT_EQ(got[i], sum_at(self.size, from + i)) << what << ", rank " << self.rank << ", element " << i;
}

void reductions(TestRank& self, uint64_t each) {
  const auto n = static_cast<uint64_t>(self.size), me = static_cast<uint64_t>(self.rank);
  const uint64_t count = each * n;
  const std::vector<uint64_t> counts(n, each);
  const std::vector<float> in = filled(self.rank, 0, count);
  std::vector<float> out(count);
  PYCOMM_ASSERT_OK(call(self, CallKind::kAllReduce, count, in, out));
  expect_sums(self, out, 0, "all_reduce");
  std::vector<float> part(each);
  PYCOMM_ASSERT_OK(call(self, CallKind::kReduceScatter, count, in, part, 0, counts));
  expect_sums(self, part, each * me, "reduce_scatter");
  for (int root = 0; root < self.size; root++) {
    std::vector<float> whole(root == self.rank ? count : 0);
    PYCOMM_ASSERT_OK(call(self, CallKind::kReduce, count, in, whole, root));
    expect_sums(self, whole, 0, "reduce");
  }
}

void movements(TestRank& self, uint64_t each) {
  const auto n = static_cast<uint64_t>(self.size), me = static_cast<uint64_t>(self.rank);
  const std::vector<uint64_t> counts(n, each);
  const auto expect_all = [&](const std::vector<float>& got, const char* what) {
    for (uint64_t i = 0; i < got.size(); i++)
      ASSERT_EQ(got[i], value(static_cast<int>(i / each), i)) << what << ", rank " << self.rank << ", " << i;
  };
  const std::vector<float> mine = filled(self.rank, each * me, each);
  std::vector<float> all(each * n);
  PYCOMM_ASSERT_OK(call(self, CallKind::kAllGather, each * n, mine, all, 0, counts));
  expect_all(all, "all_gather");
  for (int root = 0; root < self.size; root++) {
    const bool here = root == self.rank;
    std::vector<float> whole(here ? each * n : 0), part(each);
    PYCOMM_ASSERT_OK(call(self, CallKind::kGather, each * n, mine, whole, root, counts));
    expect_all(whole, "gather");
    PYCOMM_ASSERT_OK(call(self, CallKind::kScatter, each * n, whole, part, root, counts));
    ASSERT_EQ(part, mine) << "scatter, rank " << self.rank;
    std::vector<float> sent = here ? filled(root, 0, each) : std::vector<float>(each);
    PYCOMM_ASSERT_OK(call(self, CallKind::kBroadcast, each, here ? sent : std::vector<float>(), sent, root));
    ASSERT_EQ(sent, filled(root, 0, each)) << "broadcast, rank " << self.rank;
  }
  Request request = request_of(CallKind::kAllToAll, DType::kFloat32, ReduceOp::kSum, 0);
  const std::vector<float> blocks = filled(self.rank, 0, each * n);
  std::vector<float> got(each * n);
  request.send_counts = request.recv_counts = counts;
  request.call.in = Buffer(const_cast<float*>(blocks.data()), blocks.size());
  request.call.out = Buffer(got.data(), got.size());
  PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
  PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
  for (uint64_t i = 0; i < got.size(); i++)
    ASSERT_EQ(got[i], value(static_cast<int>(i / each), me * each + i % each)) << "all_to_all, " << i;
}

TEST(Hierarchy, EveryCollective) {
  for (const std::vector<int>& placement : kPlacements) {
    run_hosts(placement, [](TestRank& self) {
      for (const uint64_t count : kCounts) {
        reductions(self, count / 4);
        movements(self, count / 4);
        PYCOMM_ASSERT_OK(barrier(*self.comm));
      }
    });
  }
}

TEST(Hierarchy, SeveralConnectionsAndEncryption) {
  run_hosts({0, 1, 1}, [](TestRank& self) { reductions(self, 100'003); }, {.n_lanes = 3});
  run_hosts({0, 1}, [](TestRank& self) { movements(self, 50'003); }, {.n_lanes = 2, .encrypt = true});
}

TEST(Hierarchy, SendsWithoutCopies) {
  for (const auto& placement : {std::vector<int>{0, 1}, std::vector<int>{0, 1, 1, 2}}) {
    run_hosts(placement,
              [](TestRank& self) {
                for (int i = 0; i < 3; i++) reductions(self, 200'003);
                movements(self, 100'003);
              },
              {.zero_copy = ZeroCopy::Mode::kAlways});
  }
  // The kernel copies here, so the way changes in the middle of a message.
  run_hosts({0, 1}, [](TestRank& self) { reductions(self, 2'000'003); });
}

std::shared_ptr<Work> start_all_reduce(Communicator& comm, std::vector<float>& data) {
  auto request = std::make_unique<Request>(
      request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, data.size()));
  request->call.in = request->call.out = Buffer(data.data(), data.size());
  const Status s = comm.prepare(request.get(), nullptr);
  EXPECT_TRUE(s.ok()) << s.message();
  return comm.start(std::move(request));
}

Status await(const std::shared_ptr<Work>& work) {
  bool finished;
  return work->wait(-1, nullptr, &finished);
}

TEST(Hierarchy, CommunicatorsProgressSideBySide) {
  run_hosts({0, 0, 1, 1}, [](TestRank& self) {
    std::shared_ptr<Communicator> across, turned;
    PYCOMM_ASSERT_OK(self.comm->split(self.rank % 2, 0, 0, nullptr, &across));
    PYCOMM_ASSERT_OK(self.comm->split(0, -self.rank, 0, nullptr, &turned));
    ASSERT_EQ(across->size(), 2);
    ASSERT_EQ(turned->rank(), 3 - self.rank);
    for (int round = 0; round < 5; round++) {
      std::vector<float> a = filled(self.rank, 0, 40'000), b = filled(self.rank, 0, 100), c = a;
      std::vector<Communicator*> order = {across.get(), turned.get(), self.comm.get()};
      std::vector<std::vector<float>*> data = {&a, &b, &c};
      std::vector<std::shared_ptr<Work>> works(3);
      for (size_t i = 0; i < 3; i++) {  // each rank begins them in its own order
        const size_t at = (i + static_cast<size_t>(self.rank)) % 3;
        works[at] = start_all_reduce(*order[at], *data[at]);
      }
      for (const auto& work : works) PYCOMM_ASSERT_OK(await(work));
      for (uint64_t i = 0; i < a.size(); i++)
        ASSERT_EQ(a[i], value(self.rank % 2, i) + value(self.rank % 2 + 2, i));
      expect_sums(self, b, 0, "all, turned");
      expect_sums(self, c, 0, "all");
    }
    PYCOMM_ASSERT_OK(barrier(*self.comm));
  });
}

TEST(Hierarchy, SendAndRecvBesideCollectives) {
  run_hosts({0, 1, 1}, [](TestRank& self) {
    const int to = (self.rank + 1) % self.size, from = (self.rank + 2) % self.size;
    for (const uint64_t n : {uint64_t{0}, uint64_t{5}, uint64_t{200'000}}) {
      const std::vector<float> mine = filled(self.rank, 0, n);
      std::vector<float> got(n);
      const size_t n_bytes = n * sizeof(float);
      const auto sent = self.comm->p2p().send(to, 3, DType::kFloat32, mine.data(), n_bytes, kDeadlineS);
      const auto come =
          self.comm->p2p().recv(n == 5 ? -1 : from, 3, DType::kFloat32, got.data(), n_bytes, kDeadlineS);
      expect_usable(self, 70'000);
      PYCOMM_ASSERT_OK(self.comm->p2p().finish(sent, nullptr));
      PYCOMM_ASSERT_OK(self.comm->p2p().finish(come, nullptr));
      ASSERT_EQ(got, filled(from, 0, n));
      PYCOMM_ASSERT_OK(barrier(*self.comm));
    }
  });
}

TEST(Hierarchy, ARefusedCallIsToldToAllAndHarmsNothing) {
  run_hosts({0, 0, 1, 1}, [](TestRank& self) {
    for (int culprit = 0; culprit < self.size; culprit++) {
      for (const uint64_t n : {uint64_t{3}, uint64_t{1'500'000}}) {
        if (self.rank == culprit) {
          Request request;
          request.refusal = "a bad argument";
          PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
        } else {
          std::vector<float> v(n);
          const Status s = all_reduce(*self.comm, v.data(), n);
          ASSERT_EQ(s.code(), Code::kRefused) << s.message();
          ASSERT_NE(s.message().find(format("rank %d refused its call: a bad argument", culprit)),
                    std::string::npos)
              << s.message();
        }
        expect_usable(self);
      }
    }
  });
}

TEST(Hierarchy, CallsThatDifferFailOnAllRanks) {
  std::latch usable(3);
  run_hosts({0, 1, 1}, [&](TestRank& self) {
    expect_usable(self);
    usable.arrive_and_wait();  // rank 2's news may be faster than rank 1's last data
    std::vector<float> v(self.rank == 2 ? 5 : 4);
    const Status s = all_reduce(*self.comm, v.data(), v.size());
    ASSERT_EQ(s.code(), Code::kMismatch) << self.rank << ": " << s.message();
    ASSERT_EQ(barrier(*self.comm).code(), Code::kMismatch);
  });
}

TEST(Hierarchy, RootsThatDifferAreSeenWhereEachRankOnlySendsOrOnlyWaits) {
  for (const int first : {0, 1}) {
    run_hosts({0, 1}, [first](TestRank& self) {
      expect_usable(self);
      const std::vector<float> in = filled(self.rank, 0, 3);
      std::vector<float> out(3);
      Status s = call(self, CallKind::kReduce, 3, in, out, self.rank == 0 ? first : 1 - first);
      if (s.ok()) s = barrier(*self.comm);
      ASSERT_EQ(s.code(), Code::kMismatch) << self.rank << ": " << s.message();
    });
  }
}

TEST(Hierarchy, AbortAndCloseEndTheCallsOfAllRanks) {
  for (const bool abort : {true, false}) {
    std::latch usable(3), done(3);
    run_hosts({0, 1, 1}, [&, abort](TestRank& self) {
      expect_usable(self);
      usable.arrive_and_wait();  // an abort may also end a call that its own rank has done
      if (self.rank == 0) {
        if (abort)
          self.comm->abort("enough");
        else
          PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      } else {
        std::vector<float> v(100'000);
        Status s;
        while (s.ok()) s = all_reduce(*self.comm, v.data(), v.size());
        ASSERT_EQ(s.code(), abort ? Code::kClosed : Code::kPeerLost) << s.message();
        ASSERT_NE(s.message().find("rank 0"), std::string::npos) << s.message();
        ASSERT_NE(s.message().find(abort ? "enough" : "closed its communicator"), std::string::npos)
            << s.message();
      }
      done.arrive_and_wait();
    });
  }
}

}  // namespace
}  // namespace pycomm
