// Lists of tensors are packed where peers reach them, as far as there is room, with the same bits.
#include "cuda/captured_graph.h"
#include "cuda/device_ranks.h"
#include "cuda/nccl_inputs.h"
#include "cuda/nccl_ranks.h"  // ScopedEnv
#include "engine/cuda/device_context.h"

namespace pycomm {
namespace {

// A vector in pieces, at odd addresses and of odd lengths, one of them empty.
class Pieces {
 public:
  Pieces(cudaStream_t stream, size_t size, uint64_t n_elems) {
    const uint64_t most = n_elems / 3 + 1;
    for (uint64_t at = 0; at < n_elems || tensors_.size() < 2;) {
      const uint64_t n = tensors_.size() == 1 ? 0 : std::min(n_elems - at, most);
      tensors_.push_back(std::make_unique<OnStream>(stream, n * size, size * (tensors_.size() % 3)));
      segments_.push_back({tensors_.back()->data(), n});
      at += n;
    }
    size_ = size;
  }
  void put(const Bytes& contents) {
    auto at = contents.begin();
    for (const auto& t : tensors_) {
      const auto end = at + static_cast<std::ptrdiff_t>(t->size());
      t->put(Bytes(at, end));
      at = end;
    }
  }
  Bytes get() const {
    Bytes all;
    for (const auto& t : tensors_) {
      const Bytes part = t->get();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  Buffer buffer() const { return Buffer(segments_, size_); }

 private:
  size_t size_ = 0;
  std::vector<std::unique_ptr<OnStream>> tensors_;
  std::vector<Segment> segments_;
};

struct What {
  CallKind kind = CallKind::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint64_t n = 0;
  const char* way = "peer_two_shot";
  bool in_place = true;

  std::string text() const {
    return format("%s/%s %s %s of %zu%s", call_kind_name(kind), way, dtype_name(dtype), reduce_op_name(op),
                  static_cast<size_t>(n), in_place ? ", in place" : "");
  }
};

Request request_of(const DeviceRank& self, const What& w) {
  Request r = self.request(w.kind, w.dtype, w.op, w.n, 0);
  r.deterministic = true;
  if (w.op == ReduceOp::kPremulSum) r.call.scalar = 0.75;
  return r;
}

// The CPU engine's bits are the expected ones.
void check(DeviceRank& self, const What& w, uint64_t seed) {
  std::mt19937_64 rng(seed * 8 + static_cast<uint64_t>(self.rank));
  const Bytes mine = make_input(w.dtype, w.op, false, w.n, rng);
  Bytes host = mine;
  Request cpu = request_of(self, w);
  cpu.call.device = -1;
  cpu.call.in = cpu.call.out = Buffer(host.data(), w.n);
  PYCOMM_ASSERT_OK(self.comm->prepare(&cpu, nullptr));
  PYCOMM_ASSERT_OK(self.comm->run(cpu, nullptr));
  Pieces in(self.stream, dtype_size(w.dtype), w.n), out(self.stream, dtype_size(w.dtype), w.n);
  in.put(mine);
  Request r = request_of(self, w);
  r.call.in = in.buffer();
  r.call.out = w.in_place ? in.buffer() : out.buffer();
  const Status s = self.call(&r, w.way);
  ASSERT_TRUE(s.ok()) << w.text() << ": " << s.message();
  EXPECT_TRUE(same(w.dtype, w.in_place ? in.get() : out.get(), host))
      << "rank " << self.rank << ": " << w.text();
}

bool has_scratch(const DeviceRank& self) {
  std::shared_ptr<cuda::DeviceContext> context;
  EXPECT_TRUE(cuda::DeviceContext::get(self.device, &context).ok());
  return context->has_scratch(1);
}

// A tensor of somebody else's, filled on a stream of its own.
class Bystander {
 public:
  Bystander(size_t n_bytes, cudaStream_t stream) : n_bytes_(n_bytes), stream_(stream) {}
  Status take(const DeviceRank& self) {
    PYCOMM_RETURN_IF_ERROR(self.comm->device()->allocate(n_bytes_, stream_, nullptr, &block_));
    return checked(cudaMemsetAsync(block_->data(), 0x5a, n_bytes_, stream_), "cudaMemsetAsync");
  }
  void expect_untouched() const {
    Bytes now(n_bytes_);
    ASSERT_CUDA(cudaMemcpyAsync(now.data(), block_->data(), n_bytes_, cudaMemcpyDeviceToHost, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    EXPECT_TRUE(now == Bytes(n_bytes_, 0x5a));
  }

 private:
  size_t n_bytes_;
  cudaStream_t stream_;
  std::unique_ptr<DeviceBlock> block_;
};

// Nothing is packed into scratch: all of it lies where peers reach it.
TEST(DevicePacking, ListsHaveTheSameBitsWhereverTheyArePacked) {
  for (const char* bytes : {"1048576", "0"}) {
    const ScopedEnv arena("PYCOMM_DEVICE_ARENA", bytes);
    run_device_ranks(3, [&](DeviceRank& self) {
      uint64_t seed = 1;
      for (const char* way : {"peer_one_shot", "peer_two_shot"}) {
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
          for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
            for (const uint64_t n : {7, 3001}) {
              check(self, {CallKind::kAllReduce, dtype, op, n, way, true}, seed++);
              check(self, {CallKind::kAllReduce, dtype, op, n, way, false}, seed++);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
        check(self, {CallKind::kBroadcast, DType::kInt16, ReduceOp::kSum, 3001, way, true}, seed++);
      }
      EXPECT_EQ(has_scratch(self), std::string(bytes) == "0") << bytes;
      // Multiplied first: into scratch, in any case.
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
        check(self, {CallKind::kAllReduce, dtype, ReduceOp::kPremulSum, 3001}, seed++);
    });
  }
}

// Ranks find room or not, each for itself.
TEST(DevicePacking, RanksMayDiffer) {
  run_device_ranks(3, [](DeviceRank& self) {
    check(self, {.n = 11}, 1);
    std::unique_ptr<DeviceBlock> all;
    if (self.rank == 1) {
      for (size_t n = 2 << 20; n > 1000 && all == nullptr; n -= 1000)
        (void)self.comm->device()->allocate(n, self.stream, nullptr, &all);
      ASSERT_NE(all, nullptr);
    }
    check(self, {.n = 4000}, 2);
    EXPECT_EQ(has_scratch(self), self.rank == 1);
  });
}

// While the calls before are not even begun: each has a block of its own, until half is taken.
TEST(DevicePacking, GrowsUnderWayAndLeavesHalf) {
  const ScopedEnv arena("PYCOMM_DEVICE_ARENA", "65536");
  run_device_ranks(2, [](DeviceRank& self) {
    check(self, {.n = 11}, 1);  // makes the device
    constexpr uint64_t kSizes[] = {100, 500, 2000, 4000, 7000, 10'000, 50};
    Latch latch;
    latch.close(self.stream);
    std::vector<std::unique_ptr<Pieces>> lists;
    std::vector<std::shared_ptr<Work>> works;
    cudaStream_t other = nullptr;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    std::vector<std::unique_ptr<Bystander>> others;
    const auto add = [&](size_t n_bytes) {
      others.push_back(std::make_unique<Bystander>(n_bytes, other));
      PYCOMM_ASSERT_OK(others.back()->take(self));
    };
    for (const uint64_t n : kSizes) {
      std::vector<float> v(n);
      for (uint64_t i = 0; i < n; i++) v[i] = static_cast<float>((self.rank + 1) * (i % 1000 + n % 77));
      const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
      lists.push_back(std::make_unique<Pieces>(self.stream, 4, n));
      lists.back()->put(Bytes(bytes, bytes + 4 * n));
      auto r = std::make_unique<Request>(sum_of(self, lists.back()->buffer()));
      PYCOMM_ASSERT_OK(self.comm->prepare(r.get(), "peer"));
      works.push_back(self.comm->start(std::move(r)));
      bool finished = false;
      PYCOMM_ASSERT_OK(works.back()->wait(-1, nullptr, &finished));  // until it is issued
      add(256);  // so that the next cannot grow in its place
    }
    EXPECT_TRUE(has_scratch(self));            // of 40,000 bytes, more than half
    for (int i = 0; i < 26; i++) add(20'000);  // wherever there is room
    ASSERT_CUDA(cudaStreamSynchronize(other));
    latch.open();
    for (size_t k = 0; k < works.size(); k++) {
      PYCOMM_ASSERT_OK(works[k]->end()->order(self.stream));
      const Bytes got = lists[k]->get();
      const auto* v = reinterpret_cast<const float*>(got.data());
      for (uint64_t i = 0; i < kSizes[k]; i++)
        ASSERT_EQ(v[i], static_cast<float>(3 * (i % 1000 + kSizes[k] % 77))) << kSizes[k] << " " << i;
    }
    for (const auto& b : others) b->expect_untouched();
    others.clear();
    ASSERT_CUDA(cudaStreamDestroy(other));
  });
}

// The block of a captured call is the graph's: it stays when a larger one takes its place.
TEST(DevicePacking, AGraphKeepsItsBlock) {
  run_device_ranks(2, [](DeviceRank& self) {
    check(self, {.n = 11}, 1);
    Pieces list(self.stream, 4, 3001);
    const std::vector<float> ones(3001, 1);
    const auto* bytes = reinterpret_cast<const uint8_t*>(ones.data());
    CapturedGraph graph;
    ASSERT_CUDA(cudaStreamSynchronize(self.stream));
    PYCOMM_ASSERT_OK(graph.capture(self.stream, [&] { return sum(self, list.buffer(), "peer_two_shot"); }));
    std::vector<std::unique_ptr<Bystander>> others;
    others.push_back(std::make_unique<Bystander>(256, self.stream));  // the block cannot grow in its place
    Status s = others.back()->take(self);
    PYCOMM_ASSERT_OK(s.clone());
    check(self, {.n = 4000}, 2);
    // All that is free.
    for (size_t n = 1 << 20; n >= 256; n = s.ok() ? n : n / 2) {
      auto one = std::make_unique<Bystander>(n, self.stream);
      s = one->take(self);
      if (s.ok()) others.push_back(std::move(one));
    }
    for (int i = 0; i < 3; i++) {
      list.put(Bytes(bytes, bytes + 4 * 3001));
      PYCOMM_ASSERT_OK(graph.replay(self.stream));
      const Bytes got = list.get();
      for (size_t k = 0; k < 3001; k++) ASSERT_EQ(reinterpret_cast<const float*>(got.data())[k], 2) << k;
      check(self, {.n = 4000}, 3);
    }
    for (const auto& b : others) b->expect_untouched();
    PYCOMM_ASSERT_OK(barrier(*self.comm, kDeadlineS));
    graph.reset();
  });
}

// Room in peers' memory needs no allocation of CUDA's, so the first list may be captured; scratch does.
TEST(DevicePacking, WhatCanBeCaptured) {
  for (const char* bytes : {"1048576", "0"}) {
    const ScopedEnv arena("PYCOMM_DEVICE_ARENA", bytes);
    run_device_ranks(2, [&](DeviceRank& self) {
      OnStream t(self.stream, Bytes(400));
      PYCOMM_ASSERT_OK(sum(self, t, "peer"));
      Pieces list(self.stream, 4, 3001);
      CapturedGraph graph;
      ASSERT_CUDA(cudaStreamSynchronize(self.stream));
      const Status s = graph.capture(self.stream, [&] { return sum(self, list.buffer(), "peer"); });
      if (std::string(bytes) == "0") {
        EXPECT_NE(s.message().find("it needs more scratch memory"), std::string::npos) << s.message();
      } else {
        EXPECT_TRUE(s.ok()) << s.message();
      }
      PYCOMM_ASSERT_OK(barrier(*self.comm, kDeadlineS));
      graph.reset();
    });
  }
}

}  // namespace
}  // namespace pycomm
