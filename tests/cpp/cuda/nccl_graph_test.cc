// What goes over NCCL, in CUDA graphs: schedules with all their tiles on two streams, and NCCL's own
// collectives, captured once on every rank and replayed with new inputs, also between eager calls. Inputs are
// whole numbers whose sums float16 holds, so that sums in float64 are what every order of additions must
// give.
#include <gtest/gtest.h>

#include "cuda/captured_graph.h"
#include "cuda/nccl_worker.h"
#include "engine/cuda/nccl_native.h"

namespace pycomm {
namespace {

using cuda::NativeCall;
using cuda::RoundsCall;

#if defined(__SANITIZE_THREAD__)
const std::vector<int> kGraphRanks = {2, 3};  // under that sanitizer a kernel takes tens of milliseconds
constexpr int kReplays = 2;
constexpr size_t kCodes = 20;
#else
const std::vector<int> kGraphRanks = {2, 3, 8};
constexpr int kReplays = 20;
constexpr size_t kCodes = 70;  // two tiles
#endif

double value(int rank, size_t i, int round) {
  return static_cast<double>((static_cast<size_t>(rank) * 5 + i * 7 + static_cast<size_t>(round) * 11) % 41) -
         20;
}

Status failed(const NcclRank& me, const std::string& what) {
  return Status::error(Code::kSystem, format("rank %d of %d: %s", me.rank, me.n, what.c_str()));
}

// Float32 vectors in device memory, read and written on streams, since nothing else may be used in a capture.
class Vector {
 public:
  explicit Vector(size_t n) : n_(n) {
    if (cudaMalloc(reinterpret_cast<void**>(&data_), n * 4 + 4) != cudaSuccess) std::abort();
  }
  ~Vector() { (void)cudaFree(data_); }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;

  float* data() const { return data_; }
  Status set(int rank, int round) const {
    std::vector<float> v(n_);
    for (size_t i = 0; i < n_; i++) v[i] = static_cast<float>(value(rank, i, round));
    return checked(cudaMemcpy(data_, v.data(), n_ * 4, cudaMemcpyHostToDevice), "set");
  }
  template <class Expected>
  Status is(const NcclRank& me, const char* what, int round, const Expected& expected) const {
    std::vector<float> v(n_);
    PYCOMM_RETURN_IF_ERROR(checked(cudaMemcpy(v.data(), data_, n_ * 4, cudaMemcpyDeviceToHost), "get"));
    for (size_t i = 0; i < n_; i++) {
      const auto wanted = static_cast<float>(expected(i));
      if (v[i] == wanted) continue;
      return failed(me, format("%s, round %d, element %zu: %g instead of %g", what, round, i,
                               static_cast<double>(v[i]), static_cast<double>(wanted)));
    }
    return Status();
  }

 private:
  const size_t n_;
  float* data_ = nullptr;
};

double sum_of(int n, size_t i, int round) {
  double sum = 0;
  for (int r = 0; r < n; r++) sum += value(r, i, round);
  return sum;
}

// An all_reduce of a catalog's algorithm, out of place.
struct Rounds {
  Rounds(NcclRank& rank, cuda::DeviceStreams& s, const char* algorithm, size_t n_elems, size_t slice_bytes)
      : me(rank),
        streams(s),
        name(algorithm),
        n(n_elems),
        in(n_elems),
        out(n_elems),
        rounds(rank.comm, s, slice_bytes) {
    call.in = in.data();
    call.out = out.data();
    call.count = n_elems;
    call.dtype = DType::kFloat32;
  }
  ~Rounds() { (void)cudaFree(scratch); }

  Status prepare() {
    PYCOMM_RETURN_IF_ERROR(
        make_round_plan(*find_algorithm(Collective::kAllReduce, name), me.rank, me.n, 0, 0, false, &plan));
    call.plan = &plan;
    size_t n_scratch = 0;
    PYCOMM_RETURN_IF_ERROR(rounds.scratch_bytes(call, &n_scratch));
    return checked(cudaMalloc(&scratch, n_scratch + 256), "scratch");
  }
  Status set(int round) const {
    PYCOMM_RETURN_IF_ERROR(in.set(me.rank, round));
    return out.set(0, 1000);
  }
  // On the communication stream, in the order of the caller's.
  Status issue(cudaStream_t caller) {
    PYCOMM_RETURN_IF_ERROR(order_streams(caller, streams.comm()));
    PYCOMM_RETURN_IF_ERROR(rounds.run(call, scratch, me.patience));
    return order_streams(streams.comm(), caller);
  }
  Status is_right(int round) const {
    return out.is(me, name, round, [&](size_t i) { return sum_of(me.n, i, round); });
  }

  NcclRank& me;
  cuda::DeviceStreams& streams;
  const char* name;
  const size_t n;
  Vector in, out;
  cuda::NcclRounds rounds;
  cuda::RoundPlan plan;
  RoundsCall call;
  void* scratch = nullptr;
};

struct Setting {
  const char* name;
  const char* algorithm;
  size_t n_elems, slice_bytes;
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }
class NcclRoundsGraph : public testing::TestWithParam<Setting> {};

#if defined(__SANITIZE_THREAD__)
const Setting kSettings[] = {{"ring", "ring", 60, 4096}, {"ring_of_two_tiles", "ring", 60, 64}};
#else
const Setting kSettings[] = {{"ring", "ring", 150, 4096},
                             {"ring_of_two_tiles", "ring", 150, 128},
                             {"ring_of_many_tiles", "ring", 250, 64},
                             {"direct", "direct", 90, 64},
                             {"halving_doubling", "halving_doubling", 90, 64},
                             {"double_tree", "double_tree", 90, 64}};
#endif
INSTANTIATE_TEST_SUITE_P(Nccl, NcclRoundsGraph, testing::ValuesIn(kSettings),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(NcclRoundsGraph, IsReplayedWithNewInputsAndBetweenEagerCalls) {
  const Setting& x = GetParam();
  for (const int n : kGraphRanks) {
    run_nccl_ranks(n, [&](NcclRank& me) -> Status {
      std::unique_ptr<cuda::DeviceStreams> streams;
      PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(me.rank, &streams));
      Rounds captured(me, *streams, x.algorithm, x.n_elems, x.slice_bytes);
      Rounds eager(me, *streams, x.algorithm, x.n_elems / 2, x.slice_bytes);
      PYCOMM_RETURN_IF_ERROR(captured.prepare());
      PYCOMM_RETURN_IF_ERROR(eager.prepare());
      PYCOMM_RETURN_IF_ERROR(captured.set(0));
      PYCOMM_RETURN_IF_ERROR(captured.issue(me.stream));  // so that NCCL has connected
      CapturedGraph graph;
      PYCOMM_RETURN_IF_ERROR(graph.capture(me.stream, [&] { return captured.issue(me.stream); }));
      if (!ends(me.stream)) return failed(me, "the eager call does not end");
      Status wrong = captured.is_right(0);
      for (int round = 1; round <= kReplays; round++) {
        PYCOMM_RETURN_IF_ERROR(captured.set(round));
        PYCOMM_RETURN_IF_ERROR(eager.set(round + 50));
        if (round % 3 == 0) PYCOMM_RETURN_IF_ERROR(eager.issue(me.stream));
        PYCOMM_RETURN_IF_ERROR(graph.replay(me.stream));
        if (round % 3 == 1) PYCOMM_RETURN_IF_ERROR(eager.issue(me.stream));
        if (!ends(me.stream)) return failed(me, format("round %d does not end", round));
        if (wrong.ok()) wrong = captured.is_right(round);
        if (wrong.ok() && round % 3 != 2) wrong = eager.is_right(round + 50);
      }
      return wrong;
    });
  }
}

// Codes with error feedback: a replay leaves what an eager call leaves, in the result and in the residual.
TEST(NcclGraph, CodesAndTheirResidualsAreThoseOfEagerCalls) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    constexpr size_t kCount = kCodes;
    std::unique_ptr<cuda::DeviceStreams> streams;
    PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(me.rank, &streams));
    Rounds captured(me, *streams, "direct", kCount, 256), eager(me, *streams, "direct", kCount, 256);
    const Vector residual(kCount), other(kCount);
    for (Rounds* r : {&captured, &eager}) {
      r->call.codes = DType::kInt8;
      r->call.residual = r == &captured ? residual.data() : other.data();
      PYCOMM_RETURN_IF_ERROR(r->prepare());
      PYCOMM_RETURN_IF_ERROR(checked(cudaMemset(r->call.residual, 0, kCount * 4), "memset"));
    }
    PYCOMM_RETURN_IF_ERROR(eager.set(0));
    PYCOMM_RETURN_IF_ERROR(eager.issue(me.stream));  // so that NCCL has connected
    if (!ends(me.stream)) return failed(me, "the first call does not end");
    PYCOMM_RETURN_IF_ERROR(checked(cudaMemset(other.data(), 0, kCount * 4), "memset"));
    CapturedGraph graph;
    PYCOMM_RETURN_IF_ERROR(graph.capture(me.stream, [&] { return captured.issue(me.stream); }));
    for (int round = 0; round < kReplays; round++) {
      PYCOMM_RETURN_IF_ERROR(captured.set(round));
      PYCOMM_RETURN_IF_ERROR(eager.set(round));
      PYCOMM_RETURN_IF_ERROR(graph.replay(me.stream));
      PYCOMM_RETURN_IF_ERROR(eager.issue(me.stream));
      if (!ends(me.stream)) return failed(me, format("round %d does not end", round));
      std::vector<float> a(2 * kCount), b(2 * kCount);
      for (const auto& [to, from, kept] : {std::tuple{&a, captured.out.data(), residual.data()},
                                           std::tuple{&b, eager.out.data(), other.data()}}) {
        PYCOMM_RETURN_IF_ERROR(
            checked(cudaMemcpy(to->data(), from, kCount * 4, cudaMemcpyDeviceToHost), "get"));
        PYCOMM_RETURN_IF_ERROR(
            checked(cudaMemcpy(to->data() + kCount, kept, kCount * 4, cudaMemcpyDeviceToHost), "get"));
      }
      if (std::memcmp(a.data(), b.data(), a.size() * 4) != 0)
        return failed(me, format("round %d differs", round));
    }
    return Status();
  });
}

// NCCL's own, four of them in one graph.
TEST(NcclGraph, NativeCollectives) {
  constexpr size_t kCount = 37;
  for (const int n : kGraphRanks) {
    run_nccl_ranks(n, [&](NcclRank& me) -> Status {
      const auto ranks = static_cast<size_t>(n), r = static_cast<size_t>(me.rank);
      const Vector in(kCount * ranks), sum(kCount), part(kCount), all(kCount * ranks), from_root(kCount);
      const auto native = [&](Collective collective, const void* src, void* dst, size_t count) {
        NativeCall c;
        c.collective = collective;
        c.in = src;
        c.out = dst;
        c.count = count;
        c.dtype = DType::kFloat32;
        c.root = n - 1;
        return run_native(me.comm, me.stream, c, me.patience);
      };
      const auto issue = [&]() -> Status {
        PYCOMM_RETURN_IF_ERROR(native(Collective::kAllReduce, in.data(), sum.data(), kCount));
        PYCOMM_RETURN_IF_ERROR(native(Collective::kReduceScatter, in.data(), part.data(), kCount * ranks));
        PYCOMM_RETURN_IF_ERROR(native(Collective::kAllGather, part.data(), all.data(), kCount * ranks));
        return native(Collective::kBroadcast, in.data(), from_root.data(), kCount);
      };
      // Cold: NCCL connects while it is captured, which this mode of capture allows.
      CapturedGraph graph;
      PYCOMM_RETURN_IF_ERROR(graph.capture(me.stream, issue));
      Status wrong;
      for (int round = 0; round < kReplays; round++) {
        PYCOMM_RETURN_IF_ERROR(in.set(me.rank, round));
        for (const Vector* v : {&sum, &part, &all, &from_root}) PYCOMM_RETURN_IF_ERROR(v->set(0, 1000));
        PYCOMM_RETURN_IF_ERROR(round % 4 == 3 ? issue() : graph.replay(me.stream));
        if (!ends(me.stream)) return failed(me, format("round %d does not end", round));
        const auto check = [&](const Vector& v, const char* what, const auto& expected) {
          if (wrong.ok()) wrong = v.is(me, what, round, expected);
        };
        check(sum, "all_reduce", [&](size_t i) { return sum_of(n, i, round); });
        check(part, "reduce_scatter", [&](size_t i) { return sum_of(n, i + r * kCount, round); });
        check(all, "all_gather", [&](size_t i) { return sum_of(n, i, round); });
        check(from_root, "broadcast", [&](size_t i) { return value(n - 1, i, round); });
      }
      return wrong;
    });
  }
}

TEST(NcclGraph, RoundsAreNotCapturedBeforeNcclHasConnected) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    std::unique_ptr<cuda::DeviceStreams> streams;
    PYCOMM_RETURN_IF_ERROR(cuda::DeviceStreams::make(me.rank, &streams));
    Rounds call(me, *streams, "ring", 60, 64);
    PYCOMM_RETURN_IF_ERROR(call.prepare());
    CapturedGraph graph;
    const Status s = graph.capture(me.stream, [&] { return call.issue(me.stream); });
    EXPECT_EQ(s.code(), Code::kValue);
    EXPECT_EQ(
        s.message(),
        format("all_reduce/ring over NCCL cannot be captured: rank %d has not sent to rank %d yet, and NCCL "
               "connects at the first message; make the same call once before the capture, on all ranks",
               me.rank, 1 - me.rank));
    PYCOMM_RETURN_IF_ERROR(call.set(1));
    PYCOMM_RETURN_IF_ERROR(call.issue(me.stream));
    if (!ends(me.stream)) return failed(me, "still usable, but it does not end");
    PYCOMM_RETURN_IF_ERROR(call.is_right(1));
    return graph.capture(me.stream, [&] { return call.issue(me.stream); });
  });
}

TEST(NcclGraph, ConnectingInAGlobalCaptureFailsAsNcclsManualSays) {
  run_nccl_ranks(1, [](NcclRank& me) -> Status {
    const Vector v(10);
    NativeCall call;
    call.in = call.out = v.data();
    call.count = 10;
    call.dtype = DType::kFloat32;
    CapturedGraph graph;
    const Status s = graph.capture(
        me.stream, [&] { return run_native(me.comm, me.stream, call, me.patience); },
        cudaStreamCaptureModeGlobal);
    EXPECT_NE(s.message().find("make the same call once before the capture"), std::string::npos)
        << s.message();
    (void)cudaGetLastError();
    return me.comm.abort();
  });
}

TEST(NcclGraph, ACommunicatorEndsAfterItsGraphs) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    const Vector v(10);
    NativeCall call;
    call.in = call.out = v.data();
    call.count = 10;
    call.dtype = DType::kFloat32;
    CapturedGraph graph;
    PYCOMM_RETURN_IF_ERROR(
        graph.capture(me.stream, [&] { return run_native(me.comm, me.stream, call, me.patience); }));
    EXPECT_EQ(me.comm.finalize({0.2, {}}).code(), Code::kTimeout) << "a graph may still run its operations";
    graph.reset();
    return me.comm.abort();  // what is left after a call that failed; it returns, since no graph is left
  });
}

// Whether a call is replayed is to be the same on all ranks.
TEST(NcclGraph, AReplayAgainstAnEagerCallIsFoundOut) {
  run_nccl_ranks(2, [](NcclRank& me) -> Status {
    const Vector v(10);
    NativeCall call;
    call.in = call.out = v.data();
    call.count = 10;
    call.dtype = DType::kFloat32;
    const auto issue = [&] { return run_native(me.comm, me.stream, call, me.patience); };
    CapturedGraph graph;
    PYCOMM_RETURN_IF_ERROR(v.set(me.rank, 0));
    PYCOMM_RETURN_IF_ERROR(graph.capture(me.stream, issue));
    const Status issued = me.rank == 0 ? graph.replay(me.stream) : issue();
    EXPECT_TRUE(issued.ok() || me.rank == 1) << issued.message();  // from 2.24 on the group may end with it
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (me.comm.async_error().ok() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_FALSE(me.comm.async_error().ok());
    graph.reset();
    return me.comm.abort();
  });
}

}  // namespace
}  // namespace pycomm
