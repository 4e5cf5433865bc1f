// Ranks as threads over the loopback NCCL, each on a device of its own, for tests.
//
// run_nccl_ranks(n, fn) makes one communicator of n ranks and calls fn(Rank&) on n threads; a rank whose
// Status is not ok fails the test. The loopback is opened through PYCOMM_NCCL_LIB, which main() of these
// tests (nccl_main.cc) has set, together with 64 devices. ScopedEnv sets a variable for one test.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime_api.h"
#include "transport/cuda/nccl_comm.h"

namespace pycomm {

class ScopedEnv {
 public:
  ScopedEnv(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old, had_ = true;
    setenv(name, value.c_str(), 1);
  }
  ~ScopedEnv() {
    if (had_) {
      setenv(name_, old_.c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

struct NcclRank {
  int rank = 0, n = 1;
  nccl::NcclComm comm;
  cudaStream_t stream = nullptr;
  nccl::Patience patience{20, {}};
};

// Waits for the stream; false when it has not ended after a while, for which a peer that has failed is
// enough.
inline bool ends(cudaStream_t stream, double timeout_s = 30) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return cudaStreamSynchronize(stream) == cudaSuccess;
}

inline nccl::UniqueId new_id() {
  nccl::UniqueId id{};
  const Status s = nccl::NcclComm::make_id(&id);
  EXPECT_TRUE(s.ok()) << s.message();
  return id;
}

// Calls fn(rank) on n threads whose device is their rank; each returns a Status.
inline void run_threads(int n, const std::function<Status(int)>& fn) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<size_t>(n));
  for (int r = 0; r < n; r++) {
    threads.emplace_back([&, r] {
      if (cudaSetDevice(r) != cudaSuccess) {
        errors[static_cast<size_t>(r)] = "cudaSetDevice failed";
        return;
      }
      const Status s = fn(r);
      if (!s.ok()) errors[static_cast<size_t>(r)] = s.message();
    });
  }
  for (auto& t : threads) t.join();
  for (int r = 0; r < n; r++) {
    EXPECT_EQ(errors[static_cast<size_t>(r)], "") << "rank " << r << " of " << n;
  }
}

// Each with a communicator and a stream. A communicator that fn leaves is finalized.
inline void run_nccl_ranks(int n, const std::function<Status(NcclRank&)>& fn) {
  const nccl::UniqueId id = new_id();
  run_threads(n, [&](int r) -> Status {
    NcclRank me;
    me.rank = r;
    me.n = n;
    PYCOMM_RETURN_IF_ERROR(nccl::NcclComm::init(id, n, r, r, me.patience, &me.comm));
    if (cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking) != cudaSuccess) {
      return Status::error(Code::kSystem, "no stream");
    }
    Status s = fn(me);
    if (s.ok() && me.comm.valid()) s = me.comm.finalize(me.patience);
    if (me.comm.valid()) (void)me.comm.abort();  // or its operation would keep the stream
    (void)cudaStreamSynchronize(me.stream);
    (void)cudaStreamDestroy(me.stream);
    return s;
  });
}

}  // namespace pycomm
