// Ranks as threads of this process over the real transport: what every test of the engine starts with.
//
// run_ranks(n, fn) makes a private folder, joins n nodes there (one thread each, the real rendezvous), gives
// each a communicator, and calls fn on every rank. Threads of one process share one mapping of every arena,
// so TSAN sees each access that races. A rank that leaves fn early (a failed ASSERT) closes its communicator,
// so its peers get an error instead of waiting; every wait ends at kDeadlineS.
//
// Guarded<T> is test memory, ordinary or in the rank's arena, between guards that are checked when it dies.
// Values are small integers, exact in every dtype used, so that any order of summation gives the same bits.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"
#include "engine/control.h"
#include "engine/p2p.h"
#include "private_folder.h"

namespace pycomm {

inline constexpr double kDeadlineS = 30;

struct TestRank {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Node> node;
  std::shared_ptr<Communicator> comm;

  Arena& arena() const { return *node->arena(); }
};

inline void run_ranks(int n, const std::function<void(TestRank&)>& fn, double timeout_s = kDeadlineS) {
  // Address space is dear under sanitizers; tests of other limits set their own.
  setenv("PYCOMM_ARENA_MAX", "268435456", 0);
  const PrivateFolder folder;
  std::vector<std::thread> threads;
  for (int r = 0; r < n; r++) {
    threads.emplace_back([&, r] {
      TestRank self{r, n, nullptr, nullptr};
      Status s = Node::join(folder.run(), r, n, kControlBytes, kDeadlineS, nullptr, &self.node);
      ASSERT_TRUE(s.ok()) << "rank " << r << ": " << s.message();
      std::vector<int> ranks;
      for (int q = 0; q < n; q++) ranks.push_back(q);
      const std::vector<uint64_t> controls(static_cast<size_t>(n), 0);
      s = Communicator::create(self.node, ranks, r, timeout_s, controls, &self.comm);
      ASSERT_TRUE(s.ok()) << "rank " << r << ": " << s.message();
      // Ranks outnumber cores here, and the cores may be busy with others: a yield would go to those.
      self.comm->group().set_policy({.polls = 20, .yields = 0});
      fn(self);
    });
  }
  for (std::thread& t : threads) t.join();
}

template <class T>
class Guarded {
 public:
  // In the arena of `owner`, or ordinary memory when it is null.
  Guarded(uint64_t n, const TestRank* owner) : n_(n), owner_(owner) {
    const size_t n_bytes = (n + 2 * kGuard) * sizeof(T);
    if (owner != nullptr) {
      const Status s = owner->arena().allocate(n_bytes, &offset_);
      if (!s.ok()) ADD_FAILURE() << s.message();
      all_ = reinterpret_cast<T*>(owner->arena().base() + offset_);
    } else {
      own_.resize(n_bytes);
      all_ = reinterpret_cast<T*>(own_.data());
    }
    std::memset(static_cast<void*>(all_), kPattern, n_bytes);
  }
  ~Guarded() {
    const auto intact = [](const T* p) {
      for (size_t i = 0; i < kGuard * sizeof(T); i++) {
        if (reinterpret_cast<const unsigned char*>(p)[i] != kPattern) return false;
      }
      return true;
    };
    EXPECT_TRUE(intact(all_)) << "written before the tensor";
    EXPECT_TRUE(intact(all_ + kGuard + n_)) << "written behind the tensor";
    if (owner_ != nullptr) owner_->arena().release(offset_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() const { return all_ + kGuard; }
  uint64_t size() const { return n_; }
  T& operator[](uint64_t i) const { return data()[i]; }

 private:
  static constexpr size_t kGuard = 16;
  static constexpr unsigned char kPattern = 0xA5;
  uint64_t n_;
  const TestRank* owner_;
  uint64_t offset_ = 0;
  std::vector<std::byte> own_;
  T* all_ = nullptr;
};

// bfloat16 as bits; only small integers are needed.
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(double v) {
    const auto f = static_cast<float>(v);
    uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    bits = static_cast<uint16_t>(u >> 16);
  }
  friend bool operator==(BFloat16, BFloat16) = default;
};

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType dtype_of<int64_t>() {
  return DType::kInt64;
}
template <>
constexpr DType dtype_of<BFloat16>() {
  return DType::kBFloat16;
}

inline Request request_of(CallKind kind, DType dtype, ReduceOp op, uint64_t count, int root = 0) {
  Request request;
  request.call.sig.kind = kind;
  request.call.sig.dtype = dtype;
  request.call.sig.op = op;
  request.call.sig.count = count;
  request.call.sig.root = root;
  return request;
}

// all_reduce(sum) in place with the communicator's own choice of algorithm.
template <class T>
Status all_reduce(Communicator& comm, T* data, uint64_t n, double timeout_s = 0) {
  Request request = request_of(CallKind::kAllReduce, dtype_of<T>(), ReduceOp::kSum, n);
  request.call.in = request.call.out = Buffer(data, n);
  request.timeout_s = timeout_s;
  PYCOMM_RETURN_IF_ERROR(comm.prepare(&request, nullptr));
  return comm.run(request, nullptr);
}

inline Status barrier(Communicator& comm, double timeout_s = 0) {
  Request request = request_of(CallKind::kBarrier, DType::kUInt8, ReduceOp::kSum, 0);
  request.timeout_s = timeout_s;
  PYCOMM_RETURN_IF_ERROR(comm.prepare(&request, nullptr));
  return comm.run(request, nullptr);
}

// The communicator still works: 1 + 2 + … + n.
inline void expect_usable(TestRank& self, uint64_t n = 3) {
  std::vector<float> v(n, static_cast<float>(self.rank + 1));
  const Status s = all_reduce(*self.comm, v.data(), n);
  ASSERT_TRUE(s.ok()) << "rank " << self.rank << ": " << s.message();
  const auto want = static_cast<float>(self.size * (self.size + 1) / 2);
  for (float x : v) ASSERT_EQ(x, want) << "rank " << self.rank;
}

#define PYCOMM_ASSERT_OK(expr)                                       \
  do {                                                               \
    const ::pycomm::Status status_ = (expr);                         \
    ASSERT_TRUE(status_.ok()) << #expr << ": " << status_.message(); \
  } while (0)

}  // namespace pycomm
