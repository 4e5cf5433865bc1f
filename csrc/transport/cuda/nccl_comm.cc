#include "transport/cuda/nccl_comm.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pycomm::nccl {

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kSpin_s = 200e-6;

double seconds_since(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

Code code_of(Result result) {
  switch (result) {
    case kInvalidArgument: return Code::kValue;
    case kRemoteError: return Code::kPeerLost;
    case kTimedOut: return Code::kTimeout;
    case kSuccess:
    case kUnhandledCudaError:
    case kSystemError:
    case kInternalError:
    case kInvalidUsage:
    case kInProgress: return Code::kSystem;
  }
  return Code::kSystem;
}

// What a function that may hang shares with the thread that waits for it.
struct Ending {
  std::mutex mutex;
  std::condition_variable done;
  bool is_done = false;
  Result result = kSuccess;
};

// Keeps the place of a communicator that is not wanted any more: NCCL may write to it at any time.
void abandon(std::unique_ptr<Comm> place) {
  static std::mutex mutex;
  static auto* const places = new std::vector<std::unique_ptr<Comm>>;  // for good
  const std::lock_guard lock(mutex);
  places->push_back(std::move(place));
}

}  // namespace

NcclComm::~NcclComm() { (void)abort(); }  // nobody is left to be told; abort() is there for who wants to know

NcclComm::NcclComm(NcclComm&& other) noexcept { *this = std::move(other); }

NcclComm& NcclComm::operator=(NcclComm&& other) noexcept {
  if (this == &other) return *this;
  (void)abort();
  library_ = other.library_;
  comm_ = other.comm_.exchange(nullptr);
  rank_ = other.rank_;
  n_ranks_ = other.n_ranks_;
  device_ = other.device_;
  exchanged_ = std::move(other.exchanged_);
  return *this;
}

Status NcclComm::failure(Result result, const std::string& what) const {
  const Comm comm = raw();
  const char* last = comm == nullptr ? nullptr : api().get_last_error(comm);
  std::string message =
      format("%s, rank %d of %d on device %d: NCCL %s: %s", what.c_str(), rank_, n_ranks_, device_,
             version_text(library_->version).c_str(), api().get_error_string(result));
  if (last != nullptr && *last != '\0') message += std::string(" (") + last + ")";
  return Status::error(code_of(result), message);
}

Status NcclComm::make_id(UniqueId* out) {
  const Library* library = nullptr;
  PYCOMM_RETURN_IF_ERROR(open(&library));
  const Result result = library->api.get_unique_id(out);
  if (result == kSuccess) return Status();
  return Status::error(code_of(result),
                       format("ncclGetUniqueId: NCCL %s: %s", version_text(library->version).c_str(),
                              library->api.get_error_string(result)));
}

Status NcclComm::init(const UniqueId& id, int n_ranks, int rank, int device, const Patience& patience,
                      NcclComm* out) {
  NcclComm made;
  PYCOMM_RETURN_IF_ERROR(open(&made.library_));
  made.rank_ = rank;
  made.n_ranks_ = n_ranks;
  made.device_ = device;
  Config config;
  config.blocking = 0;
  auto place = std::make_unique<Comm>(nullptr);
  const Result result = made.api().comm_init_rank_config(place.get(), n_ranks, id, rank, &config);
  made.comm_ = *place;
  if (made.comm_ == nullptr) return made.failure(result, "ncclCommInitRankConfig");
  Status s = made.settle(result, "ncclCommInitRankConfig", patience);
  if (!s.ok()) {
    abandon(std::move(place));
    (void)made.abort();  // what went wrong first is what matters
    return s;
  }
  *out = std::move(made);
  return Status();
}

// A communicator that a call on this one makes: NCCL writes where it is while this one is in progress, and
// goes on with it afterwards.
Status NcclComm::adopt(std::unique_ptr<Comm> place, Result result, const char* what, const Patience& patience,
                       NcclComm* out) {
  Status s = settle(result, what, patience);
  if (!s.ok()) {
    abandon(std::move(place));
    return s;
  }
  if (*place == nullptr) return failure(kInternalError, what);  // NCCL says that it has made one
  NcclComm child;
  child.library_ = library_;
  child.comm_ = *place;
  child.device_ = device_;
  PYCOMM_RETURN_IF_ERROR(child.settle(kInProgress, what, patience));
  for (const Result r :
       {api().comm_count(child.comm_, &child.n_ranks_), api().comm_user_rank(child.comm_, &child.rank_)}) {
    if (r != kSuccess) return child.failure(r, what);
  }
  *out = std::move(child);
  return Status();
}

Status NcclComm::shrink(std::span<const int> excluded, bool abort_first, const Patience& patience,
                        NcclComm* out) {
  if (!can_shrink()) {
    return Status::error(Code::kSystem,
                         format("ncclCommShrink needs NCCL 2.27 or newer; this is %s (%s)",
                                version_text(library_->version).c_str(), library_->path.c_str()));
  }
  std::vector<int> ranks(excluded.begin(), excluded.end());
  auto place = std::make_unique<Comm>(nullptr);
  const Result result = api().comm_shrink(comm_, ranks.data(), static_cast<int>(ranks.size()), place.get(),
                                          nullptr, abort_first ? kShrinkAbort : kShrinkDefault);
  return adopt(std::move(place), result, "ncclCommShrink", patience, out);
}

Status NcclComm::revoke(const Patience& patience) {
  if (!can_revoke()) {
    return Status::error(Code::kSystem,
                         format("ncclCommRevoke needs NCCL 2.29 or newer; this is %s (%s)",
                                version_text(library_->version).c_str(), library_->path.c_str()));
  }
  Result result = kSuccess;
  const auto revoke = [fn = api().comm_revoke](Comm comm) { return fn(comm, kRevokeDefault); };
  PYCOMM_RETURN_IF_ERROR(in_time(revoke, comm_, "ncclCommRevoke", patience.timeout_s, &result));
  return settle(result, "ncclCommRevoke", patience);
}

Status NcclComm::start_group() {
  in_group_.clear();
  const Result result = api().group_start();
  return result == kSuccess ? Status() : failure(result, "ncclGroupStart");
}

Status NcclComm::end_group(const Patience& patience) {
  PYCOMM_RETURN_IF_ERROR(settle(api().group_end(), "ncclGroupEnd", patience));
  exchanged_.insert(in_group_.begin(), in_group_.end());
  return Status();
}

Status NcclComm::in_group(Result result, const char* what) {
  if (result == kSuccess || result == kInProgress) return Status();
  Status s = failure(result, what);
  (void)api().group_end();  // it reports the same error again
  return s;
}

Status NcclComm::send(const void* from, size_t n_bytes, int peer, Stream stream) {
  if (n_bytes == 0) return Status();
  in_group_.push_back({peer, true});
  return in_group(api().send(from, n_bytes, kUInt8, peer, raw(), stream), "ncclSend");
}

Status NcclComm::recv(void* to, size_t n_bytes, int peer, Stream stream) {
  if (n_bytes == 0) return Status();
  in_group_.push_back({peer, false});
  return in_group(api().recv(to, n_bytes, kUInt8, peer, raw(), stream), "ncclRecv");
}

Status NcclComm::settle(Result result, const char* what, const Patience& patience) {
  const auto began = Clock::now();
  auto looked = began;
  auto pause = std::chrono::microseconds(50);
  while (result == kInProgress) {
    const Comm comm = raw();
    if (comm == nullptr) return Status::error(Code::kClosed, std::string(what) + ": aborted meanwhile");
    if (const Result asked = api().comm_get_async_error(comm, &result); asked != kSuccess) result = asked;
    if (result != kInProgress) break;
    if (patience.poll && seconds_since(looked) > 0.1) {
      looked = Clock::now();
      PYCOMM_RETURN_IF_ERROR(patience.poll());
    }
    if (seconds_since(began) > patience.timeout_s) {
      return Status::error(
          Code::kTimeout,
          format("%s, rank %d of %d on device %d: not done after %.3g s; some rank has not made the "
                 "same call, or is gone",
                 what, rank_, n_ranks_, device_, patience.timeout_s));
    }
    if (seconds_since(began) < kSpin_s) {  // a sleep costs as much as the whole group
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
  }
  return result == kSuccess ? Status() : failure(result, what);
}

Status NcclComm::check_exchange(const std::string& what, int peer, bool sent) const {
  if (peer == rank_ || exchanged_.contains({peer, sent})) return Status();  // to itself it only copies
  return Status::error(
      Code::kValue,
      format("%s over NCCL cannot be captured: rank %d has not %s rank %d yet, and NCCL connects "
             "at the first message; make the same call once before the capture, on all ranks",
             what.c_str(), rank_, sent ? "sent to" : "received from", peer));
}

Status NcclComm::async_error() {
  Result error = kSuccess;
  const Result asked = api().comm_get_async_error(comm_, &error);
  if (asked != kSuccess) return failure(asked, "ncclCommGetAsyncError");
  if (error == kSuccess || error == kInProgress) return Status();
  return failure(error, "an operation that was under way failed");
}

// A function that may hang, on a thread of its own.
Status NcclComm::in_time(std::function<Result(Comm)> fn, Comm comm, const char* what, double timeout_s,
                         Result* result) const {
  const auto ending = std::make_shared<Ending>();
  try {
    std::thread([ending, fn = std::move(fn), comm, device = device_] {
      const bool on_device = cudaSetDevice(device) == cudaSuccess;
      const Result r = on_device ? fn(comm) : kUnhandledCudaError;
      const std::lock_guard lock(ending->mutex);
      ending->result = r;
      ending->is_done = true;
      ending->done.notify_all();
    }).detach();
  } catch (const std::system_error& e) {
    return Status::error(Code::kSystem, format("%s, rank %d of %d on device %d: no thread can be started for "
                                               "it (%s); left are the communicator's memory, connections and "
                                               "kernels",
                                               what, rank_, n_ranks_, device_, e.what()));
  }
  std::unique_lock lock(ending->mutex);
  if (!ending->done.wait_for(lock, std::chrono::duration<double>(timeout_s),
                             [&] { return ending->is_done; })) {
    return Status::error(Code::kTimeout, format("%s, rank %d of %d on device %d: did not return within %.3g "
                                                "s; left are the communicator's memory and "
                                                "connections, its kernels on the device, and the thread that "
                                                "waits for it. The device should not be "
                                                "used further by this process",
                                                what, rank_, n_ranks_, device_, timeout_s));
  }
  *result = ending->result;
  return Status();
}

Status NcclComm::end_in_time(Result (*fn)(Comm), const char* what, double timeout_s) {
  const Comm comm = comm_.exchange(nullptr);  // freed, or in the hands of a thread that may never end
  if (comm == nullptr) return Status();
  Result result = kSuccess;
  PYCOMM_RETURN_IF_ERROR(in_time(fn, comm, what, timeout_s, &result));
  return result == kSuccess ? Status() : failure(result, what);
}

Status NcclComm::finalize(const Patience& patience) {
  if (!valid()) return Status();
  PYCOMM_RETURN_IF_ERROR(settle(api().comm_finalize(comm_), "ncclCommFinalize", patience));
  return end_in_time(api().comm_destroy, "ncclCommDestroy", patience.timeout_s);
}

Status NcclComm::abort(double timeout_s) {
  if (!valid()) return Status();  // of no library, it may be
  return end_in_time(api().comm_abort, "ncclCommAbort", timeout_s);
}

}  // namespace pycomm::nccl
