// all_gather and broadcast over peer memory: closed forms, 1 to 8 ranks, every alignment, tensors that are
// staged, in place, or used where they lie.
#include "cuda/peer_values.h"

namespace pycomm {
namespace {

struct How {
  size_t off_in = 0, off_out = 0;
  bool symmetric_in = false, symmetric_out = false;
  bool in_place = false;
};

void check_all_gather(PeerRank& self, size_t n_bytes, const How& how, uint64_t seed) {
  Bytes want;
  for (int r = 0; r < self.size; ++r) {
    const Bytes part = input_of(r, n_bytes, seed);
    want.insert(want.end(), part.begin(), part.end());
  }
  const Bytes mine = input_of(self.rank, n_bytes, seed);
  const size_t my_part = static_cast<size_t>(self.rank) * n_bytes;
  const Tensor in(self, mine, how.off_in, how.symmetric_in);
  Bytes before(want.size(), 0);
  if (how.in_place)
    std::copy(mine.begin(), mine.end(), before.begin() + static_cast<std::ptrdiff_t>(my_part));
  const Tensor out(self, before, how.off_out, how.symmetric_out);
  const char* const from = how.in_place ? out.data() + my_part : in.data();
  ASSERT_OK(self.comm->all_gather(from, out.data(), n_bytes, self.on()));
  ASSERT_OK(self.pass());
  ASSERT_EQ(out.get(), want) << "rank " << self.rank << " of " << self.size << ", " << n_bytes
                             << " bytes, misaligned by " << how.off_in << " and " << how.off_out;
}

void check_broadcast(PeerRank& self, size_t n_bytes, int root, PeerWay way, size_t off, bool symmetric,
                     uint64_t seed) {
  const Bytes want = input_of(root, n_bytes, seed);
  const Tensor data(self, self.rank == root ? want : Bytes(n_bytes, 0), off, symmetric);
  ASSERT_OK(self.comm->broadcast(data.data(), n_bytes, root, way, self.on()));
  ASSERT_OK(self.pass());
  ASSERT_EQ(data.get(), want) << "rank " << self.rank << " of " << self.size << ", root " << root << ", "
                              << n_bytes << " bytes, way " << static_cast<int>(way) << ", misaligned by "
                              << off << ", symmetric " << symmetric;
}

class PeerCopy : public testing::TestWithParam<bool> {};  // push?
INSTANTIATE_TEST_SUITE_P(Cuda, PeerCopy, testing::Bool(),
                         [](const auto& info) { return info.param ? "pushed" : "pulled"; });

TEST_P(PeerCopy, AllGather) {
  PeerOptions options = small_options();
  options.push = GetParam();
  for (int n = 1; n <= cuda::kMaxPeers; ++n) {
    run_peers(n, options, [&](PeerRank& self) {
      const bool odd = self.rank % 2 == 1;
      for (const How& how :
           {How{}, How{0, 0, true, true, true}, How{0, 0, odd, !odd, false}, How{3, 5, false, true, false},
            How{8, 4, odd, false, false}, How{0, 2, true, false, false}}) {
        for (size_t n_bytes : {size_t{0}, size_t{1}, size_t{16}, size_t{100}, size_t{1536}, size_t{3001}}) {
          if (n != 3 && n_bytes != 100) continue;
          ASSERT_NO_FATAL_FAILURE(check_all_gather(self, n_bytes, how, n_bytes));
        }
      }
    });
  }
}

TEST_P(PeerCopy, Broadcast) {
  PeerOptions options = small_options();
  options.push = GetParam();
  for (int n = 1; n <= cuda::kMaxPeers; ++n) {
    run_peers(n, options, [&](PeerRank& self) {
      for (int root = 0; root < n; root += 3) {
        for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
          for (size_t n_bytes : {size_t{0}, size_t{1}, size_t{40}, size_t{1024}, size_t{2999}}) {
            if (n != 3 && n_bytes != 1024) continue;
            const auto off = static_cast<size_t>(self.rank % 3 * 2);
            ASSERT_NO_FATAL_FAILURE(check_broadcast(self, n_bytes, root, way, off, false, n_bytes));
            ASSERT_NO_FATAL_FAILURE(
                check_broadcast(self, n_bytes, root, way, 0, self.rank != 1, n_bytes + 1));
          }
        }
      }
    });
  }
}

TEST_P(PeerCopy, MessagesLargerThanTheStaging) {
  PeerOptions options = small_options();
  options.half_bytes = 4096;
  options.push = GetParam();
  for (const int n : {2, 5}) {
    run_peers(n, options, [&](PeerRank& self) {
      ASSERT_NO_FATAL_FAILURE(check_all_gather(self, 20001, {}, 5));
      ASSERT_NO_FATAL_FAILURE(check_all_gather(self, 20016, {0, 0, true, true, true}, 6));
      for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
        ASSERT_NO_FATAL_FAILURE(check_broadcast(self, 20001, 1, way, 0, false, 7));
        ASSERT_NO_FATAL_FAILURE(check_broadcast(self, 20001, 1, way, 0, true, 8));
      }
    });
  }
}

// Without the host in between, so that a rank that runs ahead meets what the others still read. Gathers of
// three blocks, in whose staging the broadcasts between, of one block, have slices where other blocks' data
// was.
TEST_P(PeerCopy, CallsOneAfterAnother) {
  PeerOptions options = small_options();
  options.push = GetParam();
  run_peers(3, options, [&](PeerRank& self) {
    constexpr size_t kGathered = 1500, kSpread = 1200, kCalls = 60;
    const auto root_of = [](size_t call) { return static_cast<int>(call / 2 % 3); };
    std::vector<std::unique_ptr<Tensor>> ins, outs;
    for (size_t i = 0; i < kCalls; ++i) {
      ins.push_back(std::make_unique<Tensor>(self, input_of(self.rank, kGathered, i), 0, i % 3 == 0));
      const bool is_root = i % 2 == 0 && self.rank == root_of(i);
      outs.push_back(std::make_unique<Tensor>(
          self, is_root ? input_of(self.rank, kSpread, i) : Bytes(i % 2 ? 3 * kGathered : kSpread, 0), 0,
          false));
    }
    for (size_t i = 0; i < kCalls; ++i) {
      if (i % 2) {
        ASSERT_OK(self.comm->all_gather(ins[i]->data(), outs[i]->data(), kGathered, self.on()));
        // An input is the caller's again as soon as the stream has passed, whatever peers are doing.
        ASSERT_CUDA(cudaMemsetAsync(ins[i]->data(), 0xcd, kGathered, self.stream));
      } else {
        ASSERT_OK(self.comm->broadcast(outs[i]->data(), kSpread, root_of(i), PeerWay::kTwoShot, self.on()));
      }
    }
    ASSERT_OK(self.pass());
    for (size_t i = 0; i < kCalls; ++i) {
      Bytes want;
      for (int r = 0; r < 3; ++r) {
        if (i % 2 == 0 && r != root_of(i)) continue;
        const Bytes part = input_of(r, i % 2 ? kGathered : kSpread, i);
        want.insert(want.end(), part.begin(), part.end());
      }
      ASSERT_EQ(outs[i]->get(), want) << "call " << i << " on rank " << self.rank;
    }
  });
}

}  // namespace
}  // namespace pycomm
