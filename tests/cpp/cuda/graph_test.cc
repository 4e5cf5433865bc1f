// Collectives over peer memory in CUDA graphs: captured once on every rank, replayed with new inputs, also
// between eager calls and other graphs. Inputs are whole numbers, so that sums in float64 are what every
// order of additions must give; all results of a replay are compared before the next one.
#include "cuda/captured_graph.h"
#include "cuda/peer_values.h"
#include "engine/cuda/streams.h"

namespace pycomm {
namespace {

#if defined(__SANITIZE_THREAD__)
const std::vector<int> kRanks = {2, 3};  // under that sanitizer a kernel takes tens of milliseconds
constexpr int kReplays = 4;
#else
const std::vector<int> kRanks = {2, 3, 8};
constexpr int kReplays = 20;
#endif

float value(int rank, size_t i, int round) {
  return static_cast<float>((static_cast<size_t>(rank) * 31 + i * 7 + static_cast<size_t>(round) * 53) %
                            401) -
         200.0f;
}
Bytes input(int rank, size_t n_elems, int round) {
  std::vector<float> v(n_elems);
  for (size_t i = 0; i < n_elems; ++i) v[i] = value(rank, i, round);
  Bytes bytes(n_elems * 4);
  std::memcpy(bytes.data(), v.data(), bytes.size());
  return bytes;
}

enum class What { kOneShot, kTwoShot, kReduceScatter, kAllGather, kBroadcast, kBroadcastTwoShot };
constexpr What kAll[] = {What::kOneShot,   What::kTwoShot,   What::kReduceScatter,
                         What::kAllGather, What::kBroadcast, What::kBroadcastTwoShot};
const char* name_of(What what) {
  switch (what) {
    case What::kOneShot: return "one_shot";
    case What::kTwoShot: return "two_shot";
    case What::kReduceScatter: return "reduce_scatter";
    case What::kAllGather: return "all_gather";
    case What::kBroadcast: return "broadcast";
    case What::kBroadcastTwoShot: return "broadcast_two_shot";
  }
  return "?";
}

// One collective on tensors that stay where they are: of 4 * n_elems bytes on each rank, or n times as much.
class Call {
 public:
  Call(PeerRank& self, What what, size_t n_elems, bool symmetric)
      : self_(self),
        what_(what),
        n_(n_elems),
        in_(self, n_in() * 4, 0, symmetric),
        out_(self, n_out() * 4, 0, symmetric) {}

  void set_input(int round) {
    in_.set(input(self_.rank, n_in(), round));
    out_.set(Bytes(n_out() * 4, 0xab));
    if (is_broadcast() && self_.rank == kRoot) out_.set(input(self_.rank, n_out(), round));
  }
  Status issue(cuda::Stream stream) const {
    PeerCollectives& comm = *self_.comm;
    switch (what_) {
      case What::kOneShot:
        return comm.all_reduce(in_.data(), out_.data(), n_, DType::kFloat32, ReduceOp::kSum, 1,
                               PeerWay::kOneShot, stream);
      case What::kTwoShot:
        return comm.all_reduce(in_.data(), out_.data(), n_, DType::kFloat32, ReduceOp::kAvg, self_.size,
                               PeerWay::kTwoShot, stream);
      case What::kReduceScatter:
        return comm.reduce_scatter(in_.data(), out_.data(), n_, DType::kFloat32, ReduceOp::kSum, 1, stream);
      case What::kAllGather: return comm.all_gather(in_.data(), out_.data(), n_ * 4, stream);
      case What::kBroadcast: return comm.broadcast(out_.data(), n_ * 4, kRoot, PeerWay::kOneShot, stream);
      case What::kBroadcastTwoShot:
        return comm.broadcast(out_.data(), n_ * 4, kRoot, PeerWay::kTwoShot, stream);
    }
    return {};
  }
  Status issue() const { return issue(self_.on()); }
  testing::AssertionResult is_right(int round) const {
    const Bytes got = out_.get();
    for (size_t i = 0; i < n_out(); ++i) {
      float v;
      std::memcpy(&v, &got[i * 4], 4);
      const auto wanted = static_cast<float>(expected(i, round));
      if (v == wanted) continue;
      return testing::AssertionFailure()
             << name_of(what_) << ", rank " << self_.rank << " of " << self_.size << ", round " << round
             << ", element " << i << ": " << v << " instead of " << wanted;
    }
    return testing::AssertionSuccess();
  }

 private:
  static constexpr int kRoot = 1;
  bool is_broadcast() const { return what_ == What::kBroadcast || what_ == What::kBroadcastTwoShot; }
  size_t n_in() const { return what_ == What::kReduceScatter ? n_ * static_cast<size_t>(self_.size) : n_; }
  size_t n_out() const { return what_ == What::kAllGather ? n_ * static_cast<size_t>(self_.size) : n_; }
  double expected(size_t i, int round) const {
    double sum = 0;
    const size_t at = what_ == What::kReduceScatter ? i + static_cast<size_t>(self_.rank) * n_ : i;
    for (int r = 0; r < self_.size; ++r) sum += static_cast<double>(value(r, at, round));
    switch (what_) {
      case What::kOneShot:
      case What::kReduceScatter: return sum;
      case What::kTwoShot: return sum / self_.size;
      case What::kAllGather: return static_cast<double>(value(static_cast<int>(i / n_), i % n_, round));
      case What::kBroadcast:
      case What::kBroadcastTwoShot: return static_cast<double>(value(kRoot, i, round));
    }
    return 0;
  }

  PeerRank& self_;
  const What what_;
  const size_t n_;
  const Tensor in_, out_;
};

class PeerGraph : public testing::TestWithParam<What> {};
INSTANTIATE_TEST_SUITE_P(Cuda, PeerGraph, testing::ValuesIn(kAll),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(PeerGraph, IsReplayedWithNewInputs) {
  for (const int n : kRanks) {
    for (const bool symmetric : {false, true}) {
      run_peers(n, small_options(), [&](PeerRank& self) {
        Call call(self, GetParam(), 203, symmetric);
        CapturedGraph graph;
        ASSERT_OK(graph.capture(self.stream, [&] { return call.issue(); }));
        for (int round = 0; round < kReplays; ++round) {
          call.set_input(round);
          ASSERT_OK(graph.replay(self.stream));
          ASSERT_OK(self.pass());
          ASSERT_TRUE(call.is_right(round)) << "in symmetric memory: " << symmetric;
        }
      });
      if (HasFailure()) return;
    }
  }
}

// Odd numbers of calls in between, so that a graph's call is now an even one of the rank's, now an odd one;
// and calls of other sizes, which have other numbers of blocks.
TEST_P(PeerGraph, IsReplayedBetweenEagerCalls) {
  for (const int n : kRanks) {
    run_peers(n, small_options(), [&](PeerRank& self) {
      const bool symmetric = self.rank % 2 == 1;  // ranks may differ
      Call captured(self, GetParam(), 180, symmetric), eager(self, GetParam(), 33, !symmetric);
      Call other(self, What::kTwoShot, 97, symmetric);
      CapturedGraph graph;
      eager.set_input(100);
      ASSERT_OK(eager.issue());
      ASSERT_OK(graph.capture(self.stream, [&] { return captured.issue(); }));
      for (int round = 0; round < kReplays; ++round) {
        captured.set_input(round);
        eager.set_input(round + 50);
        other.set_input(round + 70);
        ASSERT_OK(graph.replay(self.stream));
        if (round % 2 == 0) ASSERT_OK(eager.issue());
        if (round % 3 == 0) ASSERT_OK(other.issue());
        ASSERT_OK(self.pass());
        ASSERT_TRUE(captured.is_right(round));
        ASSERT_TRUE(round % 2 != 0 || eager.is_right(round + 50));
        ASSERT_TRUE(round % 3 != 0 || other.is_right(round + 70));
      }
    });
    if (HasFailure()) return;
  }
}

// Several calls in one graph, two graphs, and replays that nobody waits for in between.
TEST(PeerGraphs, HoldSeveralCallsAndFollowEachOther) {
  for (const int n : kRanks) {
    run_peers(n, small_options(), [&](PeerRank& self) {
      std::vector<std::unique_ptr<Call>> calls;
      for (const What what : kAll) calls.push_back(std::make_unique<Call>(self, what, 75, self.rank != 0));
      CapturedGraph all, some;
      ASSERT_OK(all.capture(self.stream, [&] {
        for (const auto& call : calls) PYCOMM_RETURN_IF_ERROR(call->issue());
        return Status();
      }));
      ASSERT_OK(some.capture(self.stream, [&] { return calls[1]->issue(); }));
      for (int round = 0; round < kReplays; ++round) {
        for (const auto& call : calls) call->set_input(round);
        for (int i = 0; i < round % 3; ++i) ASSERT_OK(some.replay(self.stream));
        ASSERT_OK(all.replay(self.stream));
        ASSERT_OK(some.replay(self.stream));
        ASSERT_OK(self.pass());
        for (const auto& call : calls) ASSERT_TRUE(call->is_right(round));
      }
    });
  }
}

TEST(PeerGraphs, MessagesLargerThanTheStaging) {
  for (const bool push : {false, true}) {
    PeerOptions options = small_options();
    options.half_bytes = 4096;
    options.push = push;
    run_peers(3, options, [&](PeerRank& self) {
      for (const What what : kAll) {
        Call call(self, what, 2301, false);
        CapturedGraph graph;
        ASSERT_OK(graph.capture(self.stream, [&] { return call.issue(); }));
        for (int round = 0; round < 3; ++round) {
          call.set_input(round);
          ASSERT_OK(graph.replay(self.stream));
          ASSERT_OK(self.pass());
          ASSERT_TRUE(call.is_right(round));
        }
      }
    });
  }
}

// As the engine does it: the caller captures a stream of its own, which the communication stream joins. In
// global mode, so between meetings of all ranks nobody does what that forbids.
TEST(PeerGraphs, TheCommunicationStreamJoinsTheCallersCapture) {
  run_peers(3, small_options(), [&](PeerRank& self) {
    Call call(self, What::kTwoShot, 120, false), last(self, What::kOneShot, 64, true);
    cudaStream_t caller = nullptr;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&caller, cudaStreamNonBlocking));
    const auto meet = [&] {
      std::vector<char> all(static_cast<size_t>(self.size));
      return self.exchange("", 1, all.data());
    };
    CapturedGraph graph;
    ASSERT_OK(meet());
    const Status captured = graph.capture(
        caller,
        [&]() -> Status {
          PYCOMM_RETURN_IF_ERROR(order_streams(caller, self.stream));
          PYCOMM_RETURN_IF_ERROR(call.issue());
          PYCOMM_RETURN_IF_ERROR(last.issue());
          PYCOMM_RETURN_IF_ERROR(order_streams(self.stream, caller));
          return meet();
        },
        cudaStreamCaptureModeGlobal);
    ASSERT_OK(meet());
    ASSERT_TRUE(captured.ok()) << captured.message();
    for (int round = 0; round < kReplays; ++round) {
      call.set_input(round);
      last.set_input(round + 5);
      ASSERT_OK(graph.replay(caller));
      ASSERT_CUDA(cudaStreamSynchronize(caller));
      ASSERT_OK(self.comm->failure());
      ASSERT_TRUE(call.is_right(round) && last.is_right(round + 5));
    }
    ASSERT_CUDA(cudaStreamDestroy(caller));
  });
}

// The caller launches the graph on a stream that has never waited for the communication stream, which is
// late.
TEST(PeerGraphs, ReplaysAndEagerCallsPassOneAfterAnother) {
  run_peers(3, small_options(), [&](PeerRank& self) {
    std::unique_ptr<cuda::DeviceStreams> streams;
    ASSERT_OK(cuda::DeviceStreams::make(self.device, &streams));
    const cudaStream_t comm = streams->comm();
    Call captured(self, What::kTwoShot, 110, false), first(self, What::kAllGather, 70, true);
    Call last(self, What::kOneShot, 90, false);
    const auto issue = [&](const Call& call) -> Status {
      PYCOMM_RETURN_IF_ERROR(streams->begin_operation("test"));
      PYCOMM_RETURN_IF_ERROR(call.issue(comm));
      return streams->end_operation("test");
    };
    CapturedGraph graph;
    ASSERT_OK(graph.capture(self.stream, [&]() -> Status {
      PYCOMM_RETURN_IF_ERROR(order_streams(self.stream, comm));
      PYCOMM_RETURN_IF_ERROR(issue(captured));
      return order_streams(comm, self.stream);
    }));
    for (int round = 0; round < kReplays; ++round) {
      first.set_input(round);
      captured.set_input(round + 1);
      last.set_input(round + 2);
      const auto be_late = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
      ASSERT_CUDA(cudaLaunchHostFunc(comm, be_late, nullptr));
      ASSERT_OK(issue(first));
      ASSERT_CUDA(cudaLaunchHostFunc(self.stream, be_late, nullptr));
      ASSERT_OK(graph.replay(self.stream));
      ASSERT_OK(issue(last));
      ASSERT_CUDA(cudaStreamSynchronize(comm));
      ASSERT_OK(self.pass());
      ASSERT_TRUE(first.is_right(round) && captured.is_right(round + 1) && last.is_right(round + 2));
    }
  });
}

TEST(PeerGraphs, ACaptureThatWasInvalidatedIsRefusedAndCostsNothing) {
  run_peers(2, small_options(), [&](PeerRank& self) {
    Call call(self, What::kTwoShot, 50, false);
    CapturedGraph graph;
    const Status s = graph.capture(self.stream, [&] {
      EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorStreamCaptureUnsupported);
      return call.issue();
    });
    EXPECT_EQ(s.code(), Code::kValue);
    EXPECT_EQ(s.message().find("all_reduce cannot be captured: an earlier call has invalidated the capture"),
              0u)
        << s.message();
    call.set_input(3);
    ASSERT_OK(call.issue());
    ASSERT_OK(self.pass());
    ASSERT_TRUE(call.is_right(3)) << "still usable";
  });
}

// A graph's replays are watched as well, and the rank that does not replay is named.
TEST(PeerGraphs, ARankThatDoesNotReplayIsNamed) {
  PeerOptions options = small_options();
  options.timeout_s = 0.3;
  run_peers(3, options, [&](PeerRank& self) {
    Call call(self, What::kOneShot, 50, false);
    CapturedGraph graph;
    ASSERT_OK(graph.capture(self.stream, [&] { return call.issue(); }));
    call.set_input(0);
    ASSERT_OK(graph.replay(self.stream));
    ASSERT_OK(self.pass());
    ASSERT_TRUE(call.is_right(0));
    std::vector<char> all(3);
    if (self.rank != 2) {
      ASSERT_OK(graph.replay(self.stream));
      const Status s = self.pass();
      EXPECT_TRUE(s.code() == Code::kTimeout || s.code() == Code::kPeerLost) << s.message();
      EXPECT_NE(s.message().find("rank 2"), std::string::npos) << s.message();
      ASSERT_OK(graph.replay(self.stream));  // ends at once
      ASSERT_CUDA(cudaStreamSynchronize(self.stream));
    }
    ASSERT_OK(self.exchange("", 1, all.data()));
  });
}

}  // namespace
}  // namespace pycomm
