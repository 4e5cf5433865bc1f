// Which way serves a call. Everything here follows from what the ranks agreed on, so they choose alike.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "engine/cuda/device_coded.h"
#include "engine/cuda/device_impl.h"
#include "engine/cuda/rounds_binding.h"
#include "schedule/catalog.h"

namespace pycomm {

namespace {

constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
// Until measured: below, two launches over peers' memory are quicker than NCCL's protocol on NVLink and PCIe.
constexpr uint64_t kPeerBytes = uint64_t{1} << 20;

constexpr uint8_t code(DeviceWay w) { return static_cast<uint8_t>(w); }
bool is_reduction(CallKind kind) {
  return kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter || kind == CallKind::kReduce;
}
bool is_peer(uint8_t way) {
  return way == code(DeviceWay::kPeer) || way == code(DeviceWay::kPeerOneShot) ||
         way == code(DeviceWay::kPeerTwoShot);
}
bool has_two_ways(CallKind kind) { return kind == CallKind::kAllReduce || kind == CallKind::kBroadcast; }
bool is_named(uint8_t way, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const char* name) { return std::strcmp(device_way_name(way), name) == 0; });
}

std::vector<uint8_t> ways_of(CallKind kind) {
  std::vector<uint8_t> all;
  all.push_back(code(DeviceWay::kPeer));
  if (has_two_ways(kind)) {
    all.push_back(code(DeviceWay::kPeerOneShot));
    all.push_back(code(DeviceWay::kPeerTwoShot));
  }
  all.push_back(code(DeviceWay::kNccl));
  for (size_t i = 0; i < catalog().size(); i++) {
    if (static_cast<uint8_t>(catalog()[i].collective) == static_cast<uint8_t>(kind))
      all.push_back(static_cast<uint8_t>(i));
  }
  return all;
}

}  // namespace

const char* device_way_name(uint8_t way) {
  if (way < catalog().size()) return catalog()[way].name;
  switch (static_cast<DeviceWay>(way)) {
    case DeviceWay::kNccl: return "nccl";
    case DeviceWay::kPeer: return "peer";
    case DeviceWay::kPeerOneShot: return "peer_one_shot";
    case DeviceWay::kPeerTwoShot: return "peer_two_shot";
    case DeviceWay::kAuto: return "";
  }
  return "";
}

bool device_way_is_deterministic(uint8_t way) {
  return way < catalog().size() ? catalog()[way].deterministic : way != code(DeviceWay::kNccl);
}

Status find_device_way(CallKind kind, const std::string& name, uint8_t* out) {
  std::string known;
  for (const uint8_t way : ways_of(kind)) {
    if (name == device_way_name(way)) {
      *out = way;
      return Status();
    }
    known += (known.empty() ? "" : ", ") + std::string(device_way_name(way));
  }
  return Status::error(Code::kValue, format("on CUDA, algorithm '%s' is not one of %s's: %s", name.c_str(),
                                            call_kind_name(kind), known.c_str()));
}

CallParts::CallParts(const Call& call, int n_ranks) {
  uint64_t at = 0;
  for (int q = 0; q < n_ranks; q++) {
    const auto i = static_cast<size_t>(q);
    len.push_back(call.counts.empty() ? call.sig.count / static_cast<uint64_t>(n_ranks) : call.counts[i]);
    start.push_back(at);
    at += len[i];
    longest = std::max(longest, len[i]);
    equal = equal && len[i] == len[0];
  }
}

DeviceTables::DeviceTables() {
  for (auto& t : rows_) t = {{kPeerBytes, code(DeviceWay::kPeer)}, {kAll, code(DeviceWay::kNccl)}};
}

Status DeviceTables::set(Collective collective, std::vector<Row> rows) {
  const std::vector<uint8_t> known = ways_of(static_cast<CallKind>(collective));
  if (rows.empty()) return Status::error(Code::kValue, "a selection table needs at least one entry");
  for (size_t i = 0; i < rows.size(); i++) {
    const bool rises = i == 0 || rows[i].max_bytes > rows[i - 1].max_bytes;
    if (rises && std::find(known.begin(), known.end(), rows[i].way) != known.end()) continue;
    return Status::error(Code::kValue, format("entry %zu of the %s table on CUDA: sizes must rise, and the "
                                              "algorithm be one of the collective's",
                                              i, collective_name(collective)));
  }
  rows_[static_cast<size_t>(collective)] = std::move(rows);
  return Status();
}

Status DeviceEngine::Impl::plan_of(const Call& call, uint8_t algorithm, bool in_place,
                                   const cuda::RoundPlan** out) {
  const std::lock_guard lock(plans_mutex);
  auto& slot = plans[{algorithm, call.sig.root, in_place}];
  if (slot == nullptr) {
    auto made = std::make_unique<cuda::RoundPlan>();
    PYCOMM_RETURN_IF_ERROR(cuda::make_round_plan(catalog()[algorithm], link.rank, link.n_ranks, call.sig.root,
                                                 0, in_place, made.get()));
    slot = std::move(made);
  }
  *out = slot.get();
  return Status();
}

Status DeviceEngine::Impl::supports(const Call& call, uint8_t way) {
  const Signature& sig = call.sig;
  const bool reduces = is_reduction(sig.kind);
  if (is_coded_gather(call)) return supports(CodedGather(call, link).call, way);
  const auto no = [&](Code c, const std::string& why) {
    return Status::error(
        c, format("%s/%s on CUDA: %s", call_kind_name(sig.kind), device_way_name(way), why.c_str()));
  };
  if (is_peer(way)) {
    if (peers == nullptr) return no(Code::kValue, why_no_peers);
    if (sig.kind == CallKind::kAllToAll) return no(Code::kValue, "peers' memory has no all_to_all");
    if (sig.compression != Compression::kNone)
      return no(Code::kValue, "kernels over peers' memory carry no codes; direct over NCCL does");
    if (reduces && !cuda::reduce_supported(sig.dtype, sig.op)) {
      return no(Code::kValue,
                format("there is no kernel for %s of %s", reduce_op_name(sig.op), dtype_name(sig.dtype)));
    }
    return Status();
  }
  if (!has_nccl) return no(Code::kValue, why_no_nccl);
  if (sig.kind == CallKind::kAllToAll) return Status();
  if (way == code(DeviceWay::kNccl)) {
    if (sig.compression != Compression::kNone)
      return no(Code::kValue, "NCCL's own carry no codes; direct does");
    return cuda::native_supported(native_call(call, {}), link.n_ranks);
  }
  const Algorithm& a = catalog()[way];
  if (sig.deterministic && reduces && !a.deterministic) {
    return no(Code::kValue,
              "does not reduce in the deterministic order; use one that does (pycomm schedule list)");
  }
  const cuda::RoundPlan* plan = nullptr;
  PYCOMM_RETURN_IF_ERROR(plan_of(call, way, false, &plan));
  return cuda::check_rounds(rounds_call(call, {}, plan));
}

// Schedules over NCCL, the one to be tried first in front. `direct` rounds once, in two rounds, but sends to
// everybody and combines all at once; a schedule of log2(n) rounds keeps T as well.
std::vector<uint8_t> DeviceEngine::Impl::schedules_for(const Signature& sig) const {
  const auto is_direct = [](uint8_t way) { return is_named(way, {"direct"}); };
  const auto in_log_rounds = [](uint8_t way) {
    return is_named(way, {"halving_doubling", "halving", "binomial"});
  };
  const bool direct_first = sig.compression != Compression::kNone ||
                            (link.n_ranks <= cuda::kMaxReduceSrcs && (link.one_host || !sig.deterministic));
  std::vector<uint8_t> ways;
  for (const uint8_t way : ways_of(sig.kind)) {
    if (way < catalog().size()) ways.push_back(way);
  }
  std::stable_partition(ways.begin(), ways.end(), is_direct);
  if (!direct_first) std::stable_partition(ways.begin(), ways.end(), in_log_rounds);
  return ways;
}

Status DeviceEngine::Impl::choose(const DeviceTables& tables, Call* call) {
  Signature& sig = call->sig;
  if (link.n_ranks == 1) return Status();
  if (sig.algorithm != code(DeviceWay::kAuto)) return supports(*call, sig.algorithm);
  std::vector<uint8_t> order;
  if (sig.kind != CallKind::kAllToAll) {
    const uint64_t n_bytes =
        is_coded_gather(*call) ? CodedGather(*call, link).call.sig.count : sig.count * dtype_size(sig.dtype);
    for (const DeviceTables::Row& r : tables.of(static_cast<Collective>(sig.kind))) {
      if (n_bytes > r.max_bytes) continue;
      order.push_back(r.way);
      break;
    }
  }
  // What the table names may not have this dtype, operation, order or division into parts.
  const bool peers_first = order.empty() || is_peer(order[0]);
  order.push_back(code(peers_first ? DeviceWay::kPeer : DeviceWay::kNccl));
  order.push_back(code(peers_first ? DeviceWay::kNccl : DeviceWay::kPeer));
  for (const uint8_t way : schedules_for(sig)) order.push_back(way);
  Code first = Code::kOk;
  std::vector<std::string> reasons;
  for (const uint8_t way : order) {
    const Status s = supports(*call, way);
    if (s.ok()) {
      sig.algorithm = way;
      return Status();
    }
    if (reasons.empty()) first = s.code();
    const std::string why = s.message().substr(s.message().find(": ") + 2);  // without the way's name
    if (std::find(reasons.begin(), reasons.end(), why) == reasons.end()) reasons.push_back(why);
  }
  std::string all;
  for (const std::string& why : reasons) all += (all.empty() ? "" : "; and ") + why;
  return Status::error(first, format("%s on CUDA: %s", call_kind_name(sig.kind), all.c_str()));
}

Status DeviceEngine::choose(const DeviceTables& tables, Call* call) const {
  return impl_->choose(tables, call);
}

std::vector<uint8_t> DeviceEngine::ways(Collective collective) const {
  std::vector<uint8_t> usable;
  for (const uint8_t way : ways_of(static_cast<CallKind>(collective))) {
    Call call;
    call.sig.kind = static_cast<CallKind>(collective);
    call.sig.dtype = DType::kFloat32;
    call.sig.count = static_cast<uint64_t>(impl_->link.n_ranks);
    if (impl_->supports(call, way).ok()) usable.push_back(way);
  }
  return usable;
}

}  // namespace pycomm
