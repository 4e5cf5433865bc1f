// What is called beside the catalog: coalesced buffers, all_to_all(v), barrier, and more calls than a number
// holds.
#include <gtest/gtest.h>

#include <atomic>

#include "engine/run_ranks.h"

namespace pycomm {
namespace {

// Several pieces of memory as one vector: uneven, empty, adjacent, and alike on no two ranks.
TEST(Coalesced, ManyPiecesAreOneVector) {
  for (int n : {1, 2, 3, 5}) {
    run_ranks(n, [](TestRank& self) {
      const std::vector<std::vector<uint64_t>> layouts = {
          {5, 0, 1000, 1, 33, 4000, 7}, {3000, 46, 0, 2000}, {5046}, {1, 1, 1, 5043}, {17, 17, 5012}};
      for (size_t round = 0; round < 2 * layouts.size(); round++) {
        const auto& layout = layouts[(round + static_cast<size_t>(self.rank)) % layouts.size()];
        const bool in_place = round % 2 == 0;
        constexpr uint64_t kCount = 5046;
        std::vector<std::unique_ptr<Guarded<float>>> pieces, outs;
        std::vector<Segment> in, out;
        uint64_t at = 0;
        for (uint64_t len : layout) {
          pieces.push_back(std::make_unique<Guarded<float>>(len, at % 2 == 0 ? &self : nullptr));
          outs.push_back(std::make_unique<Guarded<float>>(len, nullptr));
          for (uint64_t i = 0; i < len; i++)
            (*pieces.back())[i] = static_cast<float>((at + i) % 11 + self.rank);
          in.push_back({reinterpret_cast<std::byte*>(pieces.back()->data()), len});
          out.push_back({reinterpret_cast<std::byte*>(outs.back()->data()), len});
          at += len;
        }
        ASSERT_EQ(at, kCount);
        Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, kCount);
        request.call.in = Buffer(in, sizeof(float));
        request.call.out = in_place ? request.call.in : Buffer(out, sizeof(float));
        PYCOMM_ASSERT_OK(self.comm->prepare(&request, round % 3 == 0 ? "ring" : nullptr));
        request.call.tile_bytes = 4096;
        PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
        at = 0;
        const auto& result = in_place ? pieces : outs;
        for (const auto& piece : result) {
          for (uint64_t i = 0; i < piece->size(); i++, at++) {
            const auto want =
                static_cast<float>(static_cast<int>(at % 11) * self.size + self.size * (self.size - 1) / 2);
            ASSERT_EQ((*piece)[i], want) << "rank " << self.rank << " element " << at;
          }
        }
      }
    });
  }
}

TEST(Coalesced, NeighboursBecomeOnePiece) {
  std::vector<float> v(100);
  const auto at = [&](size_t i) { return reinterpret_cast<std::byte*>(v.data() + i); };
  const Buffer one({{at(0), 10}, {at(10), 0}, {at(10), 40}, {at(50), 50}}, sizeof(float));
  EXPECT_TRUE(one.single());
  EXPECT_EQ(one.n_elems(), 100u);
  EXPECT_EQ(one.data(), at(0));
  const Buffer two({{at(0), 10}, {at(20), 5}, {at(25), 5}}, sizeof(float));
  ASSERT_FALSE(two.single());
  EXPECT_EQ(two.n_elems(), 20u);
  uint64_t run = 0;
  EXPECT_EQ(two.locate(9, sizeof(float), &run), at(9));
  EXPECT_EQ(run, 1u);
  EXPECT_EQ(two.locate(10, sizeof(float), &run), at(20));
  EXPECT_EQ(run, 10u);
  EXPECT_EQ(two.locate(17, sizeof(float), &run), at(27));
  EXPECT_EQ(run, 3u);
  const Buffer none(std::vector<Segment>(), sizeof(float));
  EXPECT_EQ(none.n_elems(), 0u);
  EXPECT_EQ(none.data(), nullptr);
}

// Segments of a bucket that lies in the arena are one piece there, so the direct protocol serves them.
TEST(Coalesced, AdjacentPiecesInTheArenaGoDirect) {
  run_ranks(3, [](TestRank& self) {
    const Guarded<float> bucket(9000, &self);
    for (uint64_t i = 0; i < bucket.size(); i++) bucket[i] = static_cast<float>(i % 13);
    std::vector<Segment> pieces;
    for (uint64_t at = 0; at < bucket.size(); at += 3000)
      pieces.push_back({reinterpret_cast<std::byte*>(bucket.data() + at), 3000});
    Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, bucket.size());
    request.call.in = request.call.out = Buffer(pieces, sizeof(float));
    ASSERT_TRUE(request.call.in.single());
    PYCOMM_ASSERT_OK(self.comm->prepare(&request, "direct"));
    PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
    for (uint64_t i = 0; i < bucket.size(); i++) ASSERT_EQ(bucket[i], 3 * static_cast<float>(i % 13));
  });
}

// Element i of what q sends to p.
int64_t letter(int q, int p, uint64_t i) { return q * 1000003 + p * 1009 + static_cast<int64_t>(i); }

void all_to_all(TestRank& self, const std::function<uint64_t(int, int)>& size_of) {
  const int n = self.size, r = self.rank;
  Request request = request_of(CallKind::kAllToAll, DType::kInt64, ReduceOp::kSum, 0);
  std::vector<int64_t> in, want;
  for (int q = 0; q < n; q++) {
    request.send_counts.push_back(size_of(r, q));
    request.recv_counts.push_back(size_of(q, r));
    for (uint64_t i = 0; i < size_of(r, q); i++) in.push_back(letter(r, q, i));
    for (uint64_t i = 0; i < size_of(q, r); i++) want.push_back(letter(q, r, i));
  }
  const Guarded<int64_t> from(in.size(), r % 2 == 0 ? &self : nullptr), to(want.size(), nullptr);
  for (size_t i = 0; i < in.size(); i++) from[i] = in[i];
  request.call.in = Buffer(from.data(), from.size());
  request.call.out = Buffer(to.data(), to.size());
  PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
  PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
  for (size_t i = 0; i < want.size(); i++) ASSERT_EQ(to[i], want[i]) << "rank " << r << " element " << i;
}

TEST(AllToAll, EvenUnevenAndWithZeros) {
  for (int n : {1, 2, 3, 4, 5, 8}) {
    run_ranks(n, [](TestRank& self) {
      const int n = self.size;
      const std::vector<std::function<uint64_t(int, int)>> shapes = {
          [](int, int) { return uint64_t{0}; },
          [](int, int) { return uint64_t{1}; },
          [](int, int) { return uint64_t{1009}; },
          [](int from, int to) { return static_cast<uint64_t>(from * 3 + to * 5) % 7; },
          [](int from, int to) { return from == to ? uint64_t{0} : uint64_t{300}; },
          [](int from, int to) { return from == to ? uint64_t{300} : uint64_t{0}; },
          // several tiles for one pair, one or none for the others
          [n](int from, int to) {
            return from == n - 1 && to == 0 ? uint64_t{150001} : static_cast<uint64_t>(to);
          },
          [](int from, int) { return static_cast<uint64_t>(from) * 9000; },
      };
      for (int round = 0; round < (n <= 3 ? 2 : 1); round++) {
        for (size_t i = 0; i < shapes.size(); i++) {
          SCOPED_TRACE(format("n %d, shape %zu", n, i));
          all_to_all(self, shapes[i]);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
      expect_usable(self);
    });
  }
}

TEST(AllToAll, SizesThatDoNotMeetFailOnAllRanks) {
  run_ranks(3, [](TestRank& self) {
    Request request = request_of(CallKind::kAllToAll, DType::kFloat32, ReduceOp::kSum, 0);
    request.send_counts.assign(3, 10);
    request.recv_counts.assign(3, 10);
    if (self.rank == 1) request.recv_counts[2] = 11;
    std::vector<float> in(30), out(self.rank == 1 ? 31 : 30);
    request.call.in = Buffer(in.data(), in.size());
    request.call.out = Buffer(out.data(), out.size());
    PYCOMM_ASSERT_OK(self.comm->prepare(&request, nullptr));
    const Status s = self.comm->run(request, nullptr);
    if (self.rank == 1) {
      EXPECT_EQ(s.code(), Code::kMismatch);
      EXPECT_NE(s.message().find("rank 2 sends 10 elements to rank 1, which expects 11"), std::string::npos)
          << s.message();
    }
    // Whoever legally returned early is told by the next call.
    const Status next = barrier(*self.comm);
    EXPECT_EQ(next.code(), Code::kMismatch) << next.message();
  });
}

// Nobody leaves a barrier before the last has entered.
TEST(Barrier, HoldsEverybodyBack) {
  for (int n : {1, 2, 4, 8}) {
    std::atomic<int> entered{0};
    run_ranks(n, [&](TestRank& self) {
      for (int round = 1; round <= 50; round++) {
        entered.fetch_add(1);
        PYCOMM_ASSERT_OK(barrier(*self.comm));
        ASSERT_GE(entered.load(), round * n);
      }
    });
  }
}

// Call numbers have 16 bits: the 65,536th call must not confuse the ranks, be it tiny, tiled or refused.
TEST(CallNumbers, WrapAround) {
  run_ranks(2, [](TestRank& self) {
    std::vector<float> v(2000);
    for (int call = 0; call < 66200; call++) {
      const bool near_the_end = call > 65530 && call < 65560;
      if (near_the_end && call % 3 == 0) {
        std::fill(v.begin(), v.end(), static_cast<float>(call % 100 + self.rank));
        Request request = request_of(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, v.size());
        request.call.in = request.call.out = Buffer(v.data(), v.size());
        PYCOMM_ASSERT_OK(self.comm->prepare(&request, "direct"));
        request.call.tile_bytes = 1024;
        PYCOMM_ASSERT_OK(self.comm->run(request, nullptr));
        for (float x : v) ASSERT_EQ(x, static_cast<float>(2 * (call % 100) + 1)) << "call " << call;
      } else {
        float x = static_cast<float>(call % 1000 + self.rank);
        PYCOMM_ASSERT_OK(all_reduce(*self.comm, &x, 1));
        ASSERT_EQ(x, static_cast<float>(2 * (call % 1000) + 1)) << "call " << call;
      }
    }
  });
}

}  // namespace
}  // namespace pycomm
