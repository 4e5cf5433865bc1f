// From Python's arguments to a Request: which tensors, how many elements of each, and whether that makes
// sense.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/hooks.h"
#include "engine/communicator.h"
#include "schedule/catalog.h"

namespace pycomm {

struct PyCommunicator {
  std::shared_ptr<Node> node;
  std::shared_ptr<Communicator> comm;
  bool deterministic = false;
  std::string forced[kNumCollectives];

  PyCommunicator() = default;
  ~PyCommunicator() {
    // In a forked child the threads that it knows of do not exist: joining them, or destroying what they
    // wait on, would hang. The memory goes with the process.
    if (node != nullptr && node->forked()) static_cast<void>(new std::shared_ptr(std::move(comm)));
  }
  PyCommunicator(const PyCommunicator&) = delete;
  PyCommunicator& operator=(const PyCommunicator&) = delete;

  const char* algorithm_for(CallKind kind) const {
    const auto k = static_cast<size_t>(kind);
    return k < kNumCollectives && !forced[k].empty() ? forced[k].c_str() : nullptr;
  }
};

struct Options {
  int op = 0;
  int root = 0;
  double scalar = 1.0;
  int compression = 0;                        // Compression (engine/call.h)
  std::pair<uintptr_t, uint64_t> residual{};  // address and float32 elements of error feedback; 0: none
  std::vector<uint64_t> counts, send_counts, recv_counts;
  std::optional<std::string> algorithm;
  std::optional<bool> deterministic;
  double timeout_s = 0;
};

// Builds the request of one call; `in` or `out` may be None where this rank has none. Fails with kValue or
// kType, naming the argument; `is_staging` tells the failure that only means "not plain memory".
Status make_request(PyCommunicator& self, CallKind kind, PyObject* in, PyObject* out, Options o,
                    Request* request);
bool is_staging(const Status& s);

// Takes the GIL back, then raises when the status is a failure.
void raise_after(GilHooks& hooks, const Status& s);
// The rank's own call is invalid: tells the peers, then raises here.
void refuse_and_raise(PyCommunicator& self, const Status& why);

// Calls on more than this give the GIL away at once.
inline constexpr size_t kKeepGilBytes = size_t{64} << 10;

}  // namespace pycomm
