// Calls on CUDA tensors: agreed on as any call, then issued on the device (engine/device_engine.h).
#include <cstring>

#include "engine/communicator.h"
#include "engine/compressed.h"

namespace pycomm {

Status Communicator::prepare_on_device(Request* request, const char* algorithm) {
  Call& call = request->call;
  Signature& sig = call.sig;
  const auto refuse = [&](const std::string& why) {
    return Status::error(Code::kValue, format("%s: %s", call_kind_name(sig.kind), why.c_str()));
  };
  if (const char* why = DeviceEngine::why_not_built()) return refuse(why);
  const int known = first_device_.load();
  if (known >= 0 && known != call.device) {
    return refuse(
        format("the tensors are on cuda:%d, and this communicator's calls on CUDA are on cuda:%d; a "
               "communicator has one device on each rank, that of its first call on CUDA (split() "
               "makes another one)",
               call.device, known));
  }
  sig.on_device = true;
  sig.deterministic = request->deterministic;
  if (algorithm != nullptr && sig.kind != CallKind::kAllToAll)
    PYCOMM_RETURN_IF_ERROR(find_device_way(sig.kind, algorithm, &sig.algorithm));
  const bool reduces = sig.kind == CallKind::kAllReduce || sig.kind == CallKind::kReduceScatter ||
                       sig.kind == CallKind::kReduce;
  if (sig.deterministic && reduces && algorithm != nullptr && !device_way_is_deterministic(sig.algorithm)) {
    return refuse(
        format("algorithm '%s' does not reduce in the deterministic order; with deterministic=True "
               "use one that does (pycomm schedule list shows them)",
               algorithm));
  }
  if (sig.compression != Compression::kNone) PYCOMM_RETURN_IF_ERROR(check_compression(sig, false));
  uint64_t hash = 0;
  for (const uint64_t c : request->counts) hash = hash_mix(hash, c);
  sig.extra = hash_mix(hash, 0);
  return Status();
}

// From here on calls that are made later, over any communicator of this process and device, come after. A
// rank that gets no turn refuses the call, in its place: the peers would wait for it.
void Communicator::take_turn(Request* request) {
  int first = -1;
  Status s;
  if (!first_device_.compare_exchange_strong(first, request->call.device) && first != request->call.device) {
    s = Status::error(Code::kValue,
                      format("%s: the tensors are on cuda:%d, and this communicator's first call "
                             "on CUDA is on cuda:%d; a communicator has one device on each rank",
                             call_kind_name(request->call.sig.kind), request->call.device, first));
  } else {
    s = DeviceTurn::take(request->call.device, request->call.stream, &request->turn);
  }
  if (s.ok()) {
    request->call.sig.captured = request->turn->is_captured();
    return;
  }
  if (first < 0) first_device_.store(-1);  // it was none
  request->refusal = s.message();
  request->refused_as = s.code();
}

Status Communicator::exchange(const void* mine, size_t n_bytes, void* all, CallerHooks* hooks,
                              double timeout_s) {
  Request r;
  r.call.sig.kind = CallKind::kAllGather;
  r.call.sig.count = n_bytes * static_cast<size_t>(size());
  r.call.in = Buffer(const_cast<void*>(mine), n_bytes);
  r.call.out = Buffer(all, r.call.sig.count);
  r.counts.assign(static_cast<size_t>(size()), n_bytes);
  r.timeout_s = timeout_s;
  PYCOMM_RETURN_IF_ERROR(prepare(&r, nullptr));
  return execute(r, hooks);
}

void Communicator::fail_and_tell(const Status& why) {
  group_->fail(why);
  if (hierarchy_ != nullptr) hierarchy_->remote().tell_now();
}

// What makes it hopeless to wait for calls that were made.
Status Communicator::device_trouble() const {
  if (group_->failed()) return group_->failure();
  const char* const here = "a call on CUDA";
  PYCOMM_RETURN_IF_ERROR(group_->dead_peer(here));
  PYCOMM_RETURN_IF_ERROR(group_->failed_peer(here));
  return hierarchy_ != nullptr ? hierarchy_->remote().lost_rank(here) : Status();
}

// Within a call on CUDA, whose hooks and limit the engine's exchanges have.
Status Communicator::make_device(int device) {
  DeviceEngine::Link link;
  link.rank = rank();
  link.n_ranks = size();
  link.one_host = hierarchy_ == nullptr;
  link.node = group_->node();
  for (int q = 0; link.one_host && q < size(); q++) link.node_ranks.push_back(group_->node_rank(q));
  link.exchange = [this](const void* mine, size_t n_bytes, void* all) {
    return exchange(mine, n_bytes, all, device_hooks_, device_timeout_s_);
  };
  link.describe = [this](int q) { return describe(q); };
  link.trouble = [this] { return device_trouble(); };
  link.poll = [this] { return device_hooks_ != nullptr ? device_hooks_->poll() : Status(); };
  link.fail = [this](const Status& s) { fail_and_tell(s); };
  link.show = [this](uint64_t n_reached, uint64_t n_passed) { group_->show_device(n_reached, n_passed); };
  link.was_shrunk = was_shrunk_;
  link.heritage = std::move(device_heritage_);
  link.behind = [this](uint64_t number) { return group_->devices_behind(number); };
  std::unique_ptr<DeviceEngine> made;
  PYCOMM_RETURN_IF_ERROR(DeviceEngine::create(device, std::move(link), &made));
  const std::lock_guard lock(device_mutex_);
  device_ = std::move(made);
  has_device_.store(true, std::memory_order_release);
  return Status();
}

// Sizes of an all_to_all that differ would hang on the device.
Status Communicator::compare_splits(const Call& call, CallerHooks* hooks, double timeout_s) {
  const auto n = static_cast<size_t>(size());
  std::vector<uint64_t> all(n * n);
  PYCOMM_RETURN_IF_ERROR(
      exchange(call.send_counts.data(), n * sizeof(uint64_t), all.data(), hooks, timeout_s));
  std::vector<uint64_t> recvs(n * n);
  PYCOMM_RETURN_IF_ERROR(
      exchange(call.recv_counts.data(), n * sizeof(uint64_t), recvs.data(), hooks, timeout_s));
  for (size_t from = 0; from < n; from++) {
    for (size_t to = 0; to < n; to++) {
      const auto sent = static_cast<unsigned long long>(all[from * n + to]);
      const auto expected = static_cast<unsigned long long>(recvs[to * n + from]);
      if (sent == expected) continue;
      return Status::error(Code::kMismatch, format("all_to_all on CUDA: rank %zu sends %llu elements to rank "
                                                   "%zu, which expects %llu",
                                                   from, sent, to, expected));
    }
  }
  return Status();
}

Status Communicator::execute_on_device(Request& request, CallerHooks* hooks, double timeout_s) {
  Call& call = request.call;
  const auto failed = [&](Status s) {  // of this rank alone: the others must not wait
    fail_and_tell(s.code() == Code::kInterrupt
                      ? Status::error(Code::kClosed, call.sig.text() + " was interrupted (Ctrl-C)")
                      : s.clone());
    return s;
  };
  const std::shared_ptr<DeviceTurn> turn = std::move(request.turn);  // over when this call is issued, or not
  if (Status s = turn->wait(hooks, [this] { return device_trouble(); }); !s.ok()) return failed(std::move(s));
  if (device_ != nullptr && !turn->is_captured() && call.sig.kind != CallKind::kBarrier) {
    if (Status s = device_->reserve(device_tables_, &call); !s.ok()) {
      const std::string why = s.message();
      PYCOMM_RETURN_IF_ERROR(hierarchy_ != nullptr ? hierarchy_->refuse(why, hooks, timeout_s)
                                                   : engine_->refuse(why, hooks, timeout_s));
      return s;
    }
  }
  Call agreement;
  agreement.sig = call.sig;
  agreement.agree_only = true;
  PYCOMM_RETURN_IF_ERROR(hierarchy_ != nullptr ? hierarchy_->run(agreement, hooks, timeout_s)
                                               : engine_->agree(call.sig, hooks, timeout_s));
  device_hooks_ = hooks;
  device_timeout_s_ = timeout_s;
  const std::unique_ptr<CallerHooks*, void (*)(CallerHooks**)> until_return(
      &device_hooks_, [](CallerHooks** here) { *here = nullptr; });  // the caller's
  if (device_ == nullptr && turn->is_captured()) {
    return Status::error(Code::kValue,
                         "the first call of a communicator on CUDA cannot be captured into a CUDA "
                         "graph: make one before the capture");
  }
  if (device_ == nullptr) {
    Status s = make_device(call.device);
    first_device_.store(s.ok() ? call.device : -1);
    PYCOMM_RETURN_IF_ERROR(std::move(s));
  }
  if (call.sig.kind == CallKind::kBarrier) return Status();  // all are here, and know their devices
  if (call.sig.kind == CallKind::kAllToAll) {
    Status s = compare_splits(call, hooks, timeout_s);
    if (s.code() == Code::kMismatch) return failed(std::move(s));
    PYCOMM_RETURN_IF_ERROR(std::move(s));
  }
  PYCOMM_RETURN_IF_ERROR(device_->choose(device_tables_, &call));
  return device_->run(call, *turn, timeout_s, &request.end);
}

}  // namespace pycomm
