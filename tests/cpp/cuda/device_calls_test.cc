// Every collective on device tensors, by every way that there is, against the CPU's kernels.
#include <numeric>

#include "cuda/device_ranks.h"
#include "cuda/nccl_inputs.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv

namespace pycomm {

int run_as_rank(const char*) { return 1; }  // no test here starts processes

namespace {

struct What {
  Collective collective;
  std::string way;  // "": its own choice
  DType dtype;
  ReduceOp op;
  int n, root;
  std::vector<uint64_t> counts;
  bool in_place = false;

  std::string text() const {
    return format("%s/%s %s %s, %d ranks, root %d, %zu elements%s", collective_name(collective), way.c_str(),
                  dtype_name(dtype), reduce_op_name(op), n, root,
                  static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), uint64_t{0})),
                  in_place ? ", in place" : "");
  }
};

void check(DeviceRank& self, const What& w, const Numbers& x) {
  const auto r = static_cast<size_t>(self.rank);
  const uint64_t total = std::accumulate(w.counts.begin(), w.counts.end(), uint64_t{0});
  const size_t size = dtype_size(w.dtype);
  const size_t before = size * std::accumulate(w.counts.begin(), w.counts.begin() + self.rank, uint64_t{0});
  const bool in_part = w.collective == Collective::kAllGather || w.collective == Collective::kGather;
  const bool out_part = w.collective == Collective::kReduceScatter || w.collective == Collective::kScatter;
  OnStream in(self.stream, x.in[r], 4);
  OnStream out(self.stream, x.out[r].size(), 8);
  Request request = self.request(static_cast<CallKind>(w.collective), w.dtype, w.op, total, w.root);
  std::byte *from = in.data(), *to = out.data();
  OnStream both(self.stream, total * size);  // in place: the whole vector, with this rank's part in it
  if (w.in_place) {
    Bytes whole(total * size, 0x11);
    std::copy(x.in[r].begin(), x.in[r].end(),
              whole.begin() + static_cast<std::ptrdiff_t>(in_part ? before : 0));
    both.put(whole);
    from = both.data() + (in_part ? before : 0);
    to = both.data() + (out_part ? before : 0);
  }
  request.call.in = Buffer(from, x.in[r].size() / size);
  request.call.out = Buffer(to, x.out[r].size() / size);
  if (has_parts(w.collective)) request.counts = w.counts;
  if (w.op == ReduceOp::kPremulSum) request.call.scalar = factor(self.rank);
  const Status s = self.call(&request, w.way.empty() ? nullptr : w.way.c_str());
  ASSERT_TRUE(s.ok()) << "rank " << self.rank << ": " << w.text() << ": " << s.message();
  Bytes got = w.in_place ? both.get() : out.get();
  if (w.in_place) {
    got = Bytes(got.begin() + static_cast<std::ptrdiff_t>(out_part ? before : 0),
                got.begin() + static_cast<std::ptrdiff_t>((out_part ? before : 0) + x.out[r].size()));
  }
  EXPECT_TRUE(same(w.dtype, got, x.out[r])) << "rank " << self.rank << ": " << w.text();
}

class DeviceCalls : public testing::TestWithParam<int> {};

TEST_P(DeviceCalls, EveryCollectiveByEveryWay) {
  const int n = GetParam();
  run_device_ranks(n, [n](DeviceRank& self) {
    std::mt19937_64 rng(static_cast<uint64_t>(n));  // the same on all ranks
    for (int k = 0; k < kNumCollectives; k++) {
      const auto c = static_cast<Collective>(k);
      std::vector<std::string> ways{""};
      for (const uint8_t way :
           self.comm->device() != nullptr ? self.comm->device()->ways(c) : std::vector<uint8_t>()) {
        ways.emplace_back(device_way_name(way));
      }
      for (const std::string& way : ways) {
        const bool uneven = way != "nccl" || c != Collective::kReduceScatter;
        for (const uint64_t each : {uint64_t{1}, uint64_t{1000}}) {
          What w{c, way, DType::kFloat32, ReduceOp::kSum, n, n - 1, {}};
          for (int q = 0; q < n; q++) w.counts.push_back(each + (uneven && q % 2 == 1 ? 3 : 0));
          for (const bool in_place : {false, true}) {
            w.in_place = in_place;
            check(self, w, make_numbers(c, n, w.root, w.dtype, w.op, true, w.counts, rng));
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

TEST_P(DeviceCalls, EveryDtypeAndOperation) {
  const int n = GetParam();
  run_device_ranks(n, [n](DeviceRank& self) {
    std::mt19937_64 rng(77);
    for (int t = 0; t < kNumDTypes; t++) {
      const auto dtype = static_cast<DType>(t);
      if (n == 1 && dtype == DType::kBool)
        continue;  // the inputs are bytes of any value, which are kept then
      for (const ReduceOp op : operations_of(dtype)) {
        const std::vector<uint64_t> counts(static_cast<size_t>(n), 37);
        const What w{Collective::kAllReduce, "", dtype, op, n, 0, counts};
        check(self, w, make_numbers(w.collective, n, 0, dtype, op, true, counts, rng));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

TEST_P(DeviceCalls, Nothing) {
  const int n = GetParam();
  run_device_ranks(n, [n](DeviceRank& self) {
    std::mt19937_64 rng(1);
    for (int k = 0; k < kNumCollectives; k++) {
      const What w{static_cast<Collective>(k),
                   "",
                   DType::kFloat32,
                   ReduceOp::kSum,
                   n,
                   0,
                   std::vector<uint64_t>(static_cast<size_t>(n), 0)};
      check(self, w, make_numbers(w.collective, n, 0, w.dtype, w.op, true, w.counts, rng));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceCalls, testing::Range(1, 9));

TEST(DeviceCalls, AllToAllWithUnevenSizes) {
  run_device_ranks(3, [](DeviceRank& self) {
    const auto count = [](int from, int to) { return static_cast<uint64_t>((from + 1) * 10 + to * 3); };
    const auto value = [](int from, int to, uint64_t i) {
      return static_cast<float>(from * 10000 + to * 1000) + static_cast<float>(i);
    };
    std::vector<float> in, want;
    Request r = self.request(CallKind::kAllToAll, DType::kFloat32, ReduceOp::kSum, 0);
    for (int q = 0; q < 3; q++) {
      r.send_counts.push_back(count(self.rank, q));
      r.recv_counts.push_back(count(q, self.rank));
      for (uint64_t i = 0; i < count(self.rank, q); i++) in.push_back(value(self.rank, q, i));
      for (uint64_t i = 0; i < count(q, self.rank); i++) want.push_back(value(q, self.rank, i));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(in.data());
    OnStream a(self.stream, Bytes(bytes, bytes + 4 * in.size()));
    OnStream b(self.stream, 4 * want.size());
    r.call.in = Buffer(a.data(), in.size());
    r.call.out = Buffer(b.data(), want.size());
    PYCOMM_ASSERT_OK(self.call(&r));
    const Bytes got = b.get();
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size()), 0) << "rank " << self.rank;
  });
}

// A bucket of many tensors, some of them empty, is one call.
TEST(DeviceCalls, TensorsInPieces) {
  run_device_ranks(3, [](DeviceRank& self) {
    for (const char* way : {"peer", "nccl", "ring"}) {
      std::vector<std::unique_ptr<OnStream>> tensors;
      std::vector<Segment> segments;
      uint64_t total = 0;
      for (const uint64_t n : {5, 0, 1000, 3, 129}) {
        std::vector<float> v(n);
        for (uint64_t i = 0; i < n; i++)
          v[i] = static_cast<float>(self.rank + 1) * static_cast<float>(total + i);
        const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
        tensors.push_back(std::make_unique<OnStream>(self.stream, Bytes(bytes, bytes + 4 * n), 4 * (n % 3)));
        segments.push_back({tensors.back()->data(), n});
        total += n;
      }
      Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kAvg, total);
      r.call.in = r.call.out = Buffer(segments, 4);
      PYCOMM_ASSERT_OK(self.call(&r, way));
      uint64_t at = 0;
      for (const auto& t : tensors) {
        const Bytes got = t->get();
        const auto* v = reinterpret_cast<const float*>(got.data());
        for (uint64_t i = 0; i < got.size() / 4; i++, at++)
          ASSERT_FLOAT_EQ(v[i], 2.0f * static_cast<float>(at)) << way << " rank " << self.rank << " " << at;
      }
    }
  });
}

// Many calls are issued before the first has ended; scratch, events and turns are used again and again.
TEST(DeviceCalls, AsynchronousCallsFollowEachOther) {
  run_device_ranks(2, [](DeviceRank& self) {
    constexpr int kCalls = 40;
    std::vector<std::unique_ptr<OnStream>> tensors;
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < kCalls; i++) {
      const std::vector<float> v(100, static_cast<float>(i + self.rank));
      const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
      tensors.push_back(std::make_unique<OnStream>(self.stream, Bytes(bytes, bytes + 400)));
      auto r =
          std::make_unique<Request>(self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 100));
      r->call.in = r->call.out = Buffer(tensors.back()->data(), 100);
      PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), i % 3 == 0 ? "nccl" : i % 3 == 1 ? "peer" : "ring"));
      works.push_back(self.comm->start(std::move(r)));
    }
    for (int i = 0; i < kCalls; i++) {
      bool finished = false;
      PYCOMM_ASSERT_OK(works[static_cast<size_t>(i)]->wait(-1, nullptr, &finished));
      ASSERT_NE(works[static_cast<size_t>(i)]->end(), nullptr);
      PYCOMM_ASSERT_OK(works[static_cast<size_t>(i)]->end()->order(self.stream));
      const Bytes got = tensors[static_cast<size_t>(i)]->get();
      EXPECT_EQ(*reinterpret_cast<const float*>(got.data()), static_cast<float>(2 * i + 1)) << i;
      EXPECT_TRUE(works[static_cast<size_t>(i)]->done());
    }
  });
}

// Whether memory of the caller's stream may be used again as soon as nobody holds it: not where another
// stream waits for the call.
TEST(DeviceCalls, AnEndKnowsWhetherTheCallersStreamWaitsForIt) {
  run_device_ranks(2, [](DeviceRank& self) {
    cudaStream_t other = nullptr;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    OnStream t(self.stream, Bytes(400));
    auto r = std::make_unique<Request>(sum_of(self, Buffer(t.data(), 100)));
    PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), nullptr));
    const auto work = self.comm->start(std::move(r));
    bool finished = false;
    PYCOMM_ASSERT_OK(work->wait(-1, nullptr, &finished));
    PYCOMM_ASSERT_OK(work->end()->order(other));
    EXPECT_FALSE(work->end()->is_ordered());
    PYCOMM_ASSERT_OK(work->end()->order(self.stream));
    EXPECT_TRUE(work->end()->is_ordered());
    ASSERT_CUDA(cudaStreamSynchronize(other));
    ASSERT_CUDA(cudaStreamDestroy(other));
  });
}

// The communicators of a device share its stream; two threads that call at once are served in turn.
TEST(DeviceCalls, SeveralCommunicators) {
  run_device_ranks(4, [](DeviceRank& self) {
    std::shared_ptr<Communicator> pair, all;
    PYCOMM_ASSERT_OK(self.comm->split(self.rank / 2, 0, 0, nullptr, &pair));
    PYCOMM_ASSERT_OK(self.comm->split(0, 0, 0, nullptr, &all));
    for (int i = 0; i < 10; i++) {
      for (Communicator* comm : {pair.get(), all.get(), self.comm.get()}) {
        const std::vector<float> v(50, static_cast<float>(self.rank));
        const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
        OnStream t(self.stream, Bytes(bytes, bytes + 200));
        Request r = self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 50);
        r.call.in = r.call.out = Buffer(t.data(), 50);
        PYCOMM_ASSERT_OK(comm->prepare(&r, i % 2 == 0 ? "nccl" : "peer"));
        PYCOMM_ASSERT_OK(comm->run(r, nullptr));
        const Bytes got = t.get();
        const float want = comm != pair.get() ? 6 : self.rank < 2 ? 1 : 5;
        ASSERT_EQ(*reinterpret_cast<const float*>(got.data()), want) << "rank " << self.rank;
      }
    }
    for (auto& c : {pair, all}) PYCOMM_ASSERT_OK(c->close(nullptr));
  });
}

// Where PCIe is between GPUs peers' memory is written to, and not read, with the same results.
TEST(DeviceCalls, PushedOverPcie) {
  const ScopedEnv pcie("CUDA_ON_CPU_NATIVE_ATOMICS", "0");
  run_device_ranks(3, [](DeviceRank& self) {
    std::mt19937_64 rng(8);
    for (const char* way : {"peer_one_shot", "peer_two_shot"}) {
      for (const Collective c : {Collective::kAllReduce, Collective::kBroadcast}) {
        const What w{c, way, DType::kFloat32, ReduceOp::kSum, 3, 1, {1000, 1000, 1000}};
        check(self, w, make_numbers(c, 3, w.root, w.dtype, w.op, true, w.counts, rng));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    EXPECT_NE(self.comm->device()->describe().find("peers' memory: yes, written to"), std::string::npos);
  });
}

#if defined(__SANITIZE_THREAD__)
constexpr int kSums = 60;
#else
constexpr int kSums = 300;
#endif

// Threads of every rank call at once, over one communicator. The calls are alike, so any order serves them.
void sum_often(const DeviceRank& self) {
  const std::vector<float> v(50, static_cast<float>(self.rank + 1));
  const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
  OnStream tensor(self.stream, 200);
  for (int i = 0; i < kSums; i++) {
    tensor.put(Bytes(bytes, bytes + 200));
    auto r =
        std::make_unique<Request>(self.request(CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 50));
    r->call.in = r->call.out = Buffer(tensor.data(), 50);
    PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), "peer"));
    if (i % 3 == 2) {
      const auto work = self.comm->start(std::move(r));
      bool finished = false;
      PYCOMM_ASSERT_OK(work->wait(-1, nullptr, &finished));
      PYCOMM_ASSERT_OK(work->end()->order(self.stream));
    } else {
      PYCOMM_ASSERT_OK(self.comm->run(*r, nullptr));
    }
    const Bytes got = tensor.get();
    ASSERT_EQ(*reinterpret_cast<const float*>(got.data()), 3.0f) << i;
  }
}

TEST(DeviceCalls, SeveralThreadsAreServedOneAfterTheOther) {
  run_device_ranks(2, [](DeviceRank& self) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; t++) {
      threads.emplace_back([&self] {
        DeviceRank own = self;
        ASSERT_CUDA(cudaSetDevice(self.rank));
        ASSERT_CUDA(cudaStreamCreateWithFlags(&own.stream, cudaStreamNonBlocking));
        sum_often(own);
        ASSERT_CUDA(cudaStreamDestroy(own.stream));
      });
    }
    for (std::thread& t : threads) t.join();
  });
}

// The canonical tree, whatever the way: the bits of the CPU engine on the same numbers.
TEST(DeviceCalls, DeterministicAsOnTheCpu) {
  run_device_ranks(5, [](DeviceRank& self) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const uint64_t n : {1, 1000, 9001}) {
        std::mt19937_64 rng(n * 8 + static_cast<uint64_t>(self.rank));
        const Bytes mine = make_input(dtype, ReduceOp::kSum, false, n, rng);
        Bytes host = mine;
        Request cpu = request_of(CallKind::kAllReduce, dtype, ReduceOp::kSum, n);
        cpu.deterministic = true;
        cpu.call.in = cpu.call.out = Buffer(host.data(), n);
        PYCOMM_ASSERT_OK(self.comm->prepare(&cpu, nullptr));
        PYCOMM_ASSERT_OK(self.comm->run(cpu, nullptr));
        for (const char* way : {"", "peer_one_shot", "peer_two_shot", "direct", "halving_doubling"}) {
          OnStream t(self.stream, mine);
          Request r = self.request(CallKind::kAllReduce, dtype, ReduceOp::kSum, n);
          r.deterministic = true;
          r.call.in = r.call.out = Buffer(t.data(), n);
          PYCOMM_ASSERT_OK(self.call(&r, *way == 0 ? nullptr : way));
          EXPECT_EQ(t.get(), host) << way << " " << dtype_name(dtype) << " " << n << ", rank " << self.rank;
        }
      }
    }
  });
}

}  // namespace
}  // namespace pycomm
