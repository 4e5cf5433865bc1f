#include "engine/hierarchy.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace pycomm {

Placement::Placement(const std::vector<int>& hosts, int own_rank) : host_of(hosts), rank(own_rank) {
  std::map<int, int> number;  // of each host, as they come first
  for (size_t q = 0; q < host_of.size(); q++) {
    const auto [at, fresh] = number.emplace(host_of[q], static_cast<int>(number.size()));
    host_of[q] = at->second;
    if (fresh) ranks.emplace_back();
    std::vector<int>& there = ranks[static_cast<size_t>(at->second)];
    local_of.push_back(static_cast<int>(there.size()));
    there.push_back(static_cast<int>(q));
  }
  host = host_of[static_cast<size_t>(rank)];
  local = local_of[static_cast<size_t>(rank)];
  n_owners = static_cast<int>(ranks[0].size());
  for (const std::vector<int>& there : ranks) n_owners = std::min(n_owners, static_cast<int>(there.size()));
  if (!is_owner()) return;
  for (const std::vector<int>& there : ranks) members.push_back(there[static_cast<size_t>(local)]);
}

bool Placement::keeps_order() const { return pycomm::keeps_order(host_of); }

std::string Placement::text() const {
  std::string s;
  for (size_t h = 0; h < ranks.size(); h++) {
    s += format("%shost %zu: ranks", h == 0 ? "" : ", ", h);
    for (const int q : ranks[h]) s += format(" %d", q);
  }
  return s;
}

Hierarchy::Hierarchy(Group& group, Engine& engine, const Selector& selector, Placement placement,
                     std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks)
    : group_(group),
      engine_(engine),
      selector_(selector),
      placement_(std::move(placement)),
      tree_(placement_.host_of) {
  remote_ = std::make_unique<Remote>(std::move(net), id, std::move(job_ranks), placement_.rank, group_);
}

// ---- one call --------------------------------------------------------------------------------------------

// Behind a run between hosts this rank may wait for one that waits for another host: that one's deadline
// comes first, and names who is to blame.
double Hierarchy::local_timeout_s() const { return timeout_s_ + (n_runs_ > 0 ? 4 * Remote::kGraceS : 0); }

std::string Hierarchy::here() const { return format("%s #%u", call_kind_name(call_->sig.kind), number_); }

Status Hierarchy::run(const Call& call, CallerHooks* hooks, double timeout_s) {
  if (group_.failed()) return group_.failure();
  call_ = &call;
  hooks_ = hooks;
  timeout_s_ = timeout_s;
  elem_size_ = dtype_size(call.dtype());
  op_ = call.sig.op == ReduceOp::kPremulSum || call.sig.op == ReduceOp::kAvg ? ReduceOp::kSum : call.sig.op;
  number_++;
  n_runs_ = n_inside_ = 0;
  group_.enter(call.sig.kind, number_);
  {
    const auto lock = remote_->net().lock();
    remote_->begin(number_, call.sig);
  }
  Status s = placement_.n_local() > 1 ? engine_.agree(call.sig, hooks, timeout_s) : Status();
  const bool told_here = s.code() == Code::kRefused;  // by a rank of this host, to all of it
  try {
    if (s.ok()) s = dispatch();
  } catch (const std::bad_alloc&) {  // what is under way must end before its memory goes
    s = Status::error(Code::kSystem,
                      format("%s: rank %d ran out of memory", here().c_str(), placement_.rank));
  }
  return settle(std::move(s), told_here);
}

Status Hierarchy::dispatch() {
  if (call_->agree_only) return barrier();
  const bool exact = call_->sig.deterministic && !placement_.keeps_order();
  switch (call_->sig.kind) {
    case CallKind::kAllReduce: return exact ? exact_all_reduce() : all_reduce();
    case CallKind::kReduceScatter: return exact ? exact_reduce_scatter() : reduce_scatter();
    case CallKind::kAllGather: return all_gather();
    case CallKind::kBroadcast: return broadcast();
    case CallKind::kReduce: return exact ? exact_reduce() : reduce();
    case CallKind::kGather: return gather();
    case CallKind::kScatter: return scatter();
    case CallKind::kAllToAll: return all_to_all();
    case CallKind::kBarrier: return barrier();
    case CallKind::kRefused: break;
  }
  return Status();
}

// Ends the call on this rank. A refusal that came from another host is passed on to the ranks of this one;
// any other failure ends the communicator, here and there.
Status Hierarchy::settle(Status s, bool told_here) {
  group_.exit();
  {
    auto lock = remote_->net().lock();
    remote_->end(s.ok());
    if (!s.ok()) remote_->net().await_acknowledged(lock, kAcknowledgeS);
  }
  if (!s.ok()) flights_.clear();  // of this call; the next one's would end that
  if (s.ok()) {  // what showed that an earlier call differed may have come together with this one's end
    Status failure = group_.failed() ? group_.failure() : Status();
    return failure.code() == Code::kMismatch ? std::move(failure) : std::move(s);
  }
  if (s.code() == Code::kRefused) {
    if (!told_here && !inside_refused_ && placement_.n_local() > 1) {
      const Status ignored = engine_.pass_on(s.message(), hooks_, timeout_s_);
    }
    inside_refused_ = false;
    return s;
  }
  group_.fail(s.code() == Code::kInterrupt
                  ? Status::error(Code::kClosed, here() + " was interrupted (Ctrl-C)")
                  : s.clone());
  for (const Buffer* b : {&call_->in, &call_->out}) group_.node()->arena()->quarantine(b->data());
  const auto lock = remote_->net().lock();
  remote_->tell_failure(group_.failure());
  return s;
}

Status Hierarchy::refuse(const std::string& why, CallerHooks* hooks, double timeout_s) {
  if (group_.failed()) return group_.failure();
  Call call;
  call.sig.kind = CallKind::kRefused;
  number_++;
  {
    const auto lock = remote_->net().lock();
    remote_->begin(number_, call.sig);
    remote_->refuse(number_, why);
    remote_->end(false);
  }
  return placement_.n_local() > 1 ? engine_.refuse(why, hooks, timeout_s) : Status();
}

// ---- the two levels --------------------------------------------------------------------------------------

Status Hierarchy::inside(CallKind kind, Buffer in, Buffer out, std::vector<uint64_t> counts, int root) {
  Call call;
  call.sig.kind = kind;
  call.sig.op = op_;
  call.sig.dtype = call_->dtype();
  call.sig.root = root;
  for (const uint64_t c : counts) call.sig.count += c;
  call.in = std::move(in);
  call.out = std::move(out);
  call.counts = counts;
  const Choice& choice = selector_.choose(kind, call.sig.count * elem_size_);
  call.sig.algorithm = choice.algorithm;
  call.direct_algorithm = choice.direct_algorithm;
  call.tile_bytes = choice.tile_bytes;
  if (call_->sig.deterministic && kind == CallKind::kReduceScatter) {
    for (uint8_t* a : {&call.sig.algorithm, &call.direct_algorithm}) {
      if (!catalog()[*a].deterministic) PYCOMM_RETURN_IF_ERROR(algorithm_index(kind, "direct", a));
    }
  }
  call.sig.extra = hash_mix(number_, n_inside_++);
  Status s = engine_.run(call, hooks_, local_timeout_s());
  inside_refused_ = s.code() == Code::kRefused;
  return s.code() == Code::kInterrupt || s.ok() ? std::move(s) : std::move(s).within(here());
}

Status Hierarchy::start(std::unique_ptr<Flight>* out, Collective collective, std::byte* in, std::byte* to,
                        uint64_t count, const std::vector<uint64_t>& counts, int root_host, uint64_t at) {
  const uint32_t run = n_runs_++;
  if (!placement_.is_owner()) return Status();
  const HostChoice choice = host_selector_.choose(collective, count * elem_size_, call_->sig.deterministic);
  const bool given =
      call_->sig.algorithm < catalog().size() && catalog()[call_->sig.algorithm].collective == collective;
  const Algorithm* a = given                                          ? &catalog()[call_->sig.algorithm]
                       : call_->sig.compression != Compression::kNone ? find_algorithm(collective, "direct")
                                                                      : &catalog()[choice.algorithm];
  Schedule& schedule = schedules_[{a, root_host}];
  if (schedule.part.empty()) {
    PYCOMM_RETURN_IF_ERROR(
        build_schedule(*a, placement_.host, placement_.n_hosts(), root_host, 1, &schedule));
  }
  *out = std::make_unique<Flight>(*remote_, schedule, counts, placement_.members);
  Rounds::Task& task = (*out)->task;
  task.call = number_;
  task.run = run;
  task.in = in;
  if (!a->in_place && in != nullptr && in == to) {  // one_shot, whose input is the whole vector
    (*out)->input.assign(in, in + count * elem_size_);
    task.in = (*out)->input.data();
  }
  task.out = to;
  task.count = count;
  task.dtype = call_->dtype();
  task.op = op_;
  float* const residual = call_->residual;
  task.codec = Codec(call_->sig.compression, residual == nullptr ? nullptr : residual + at);
  task.n_sockets = choice.n_sockets;
  const auto lock = remote_->net().lock();
  (*out)->begin();
  return Status();
}

Status Hierarchy::finish(Flight* flight) {
  if (flight == nullptr) return Status();
  auto lock = remote_->net().lock();
  Status s = remote_->wait(
      lock, [&] { return flight->done(); }, hooks_, timeout_s_, here());
  if (!s.ok()) remote_->end(false);  // before the flight goes
  return s;
}

Status Hierarchy::between(Collective collective, std::byte* in, std::byte* out, uint64_t count,
                          const std::vector<uint64_t>& counts, int root_host, uint64_t at) {
  std::unique_ptr<Flight> flight;
  PYCOMM_RETURN_IF_ERROR(start(&flight, collective, in, out, count, counts, root_host, at));
  return finish(flight.get());
}

// ---- shares ----------------------------------------------------------------------------------------------

// Of a vector of `count` elements, one for each rank of this host: nothing for those that are no owners.
std::vector<uint64_t> Hierarchy::shares(uint64_t count) const {
  std::vector<uint64_t> out(static_cast<size_t>(placement_.n_local()));
  const auto k = static_cast<uint64_t>(placement_.n_owners);
  const uint64_t line = std::max<uint64_t>(1, 64 / elem_size_);
  const uint64_t each = ((count + k - 1) / k + line - 1) / line * line;
  for (uint64_t i = 0; i < k; i++) {
    const uint64_t at = std::min(count, each * i);
    out[i] = std::min(each, count - at);
  }
  return out;
}

uint64_t Hierarchy::part_len(int rank) const { return call_->counts[static_cast<size_t>(rank)]; }

uint64_t Hierarchy::block_len(int host) const {
  uint64_t n = 0;
  for (const int q : placement_.ranks[static_cast<size_t>(host)]) n += part_len(q);
  return n;
}

std::vector<uint64_t> Hierarchy::block_shares(int host) const { return shares(block_len(host)); }

std::vector<uint64_t> Hierarchy::share_counts(int owner) const {
  std::vector<uint64_t> out;
  for (int h = 0; h < placement_.n_hosts(); h++) out.push_back(block_shares(h)[static_cast<size_t>(owner)]);
  return out;
}

// How much each rank of this host has of the whole vector, as an owner.
std::vector<uint64_t> Hierarchy::share_totals() const {
  std::vector<uint64_t> out(static_cast<size_t>(placement_.n_local()));
  for (int i = 0; i < placement_.n_owners; i++) {
    for (const uint64_t n : share_counts(i)) out[static_cast<size_t>(i)] += n;
  }
  return out;
}

void append_pieces(const Buffer& from, uint64_t at, uint64_t n, size_t elem_size, std::vector<Segment>* to) {
  while (n > 0) {
    uint64_t have;
    std::byte* p = from.locate(at, elem_size, &have);
    have = std::min(have, n);
    to->push_back({p, have});
    at += have;
    n -= have;
  }
}

Buffer slice_of(const Buffer& from, uint64_t at, uint64_t n, size_t elem_size) {
  if (from.single()) return Buffer(from.data() == nullptr ? nullptr : from.data() + at * elem_size, n);
  std::vector<Segment> pieces;
  append_pieces(from, at, n, elem_size, &pieces);
  return Buffer(std::move(pieces), elem_size);
}

// The vector in the order of owners: of each the share of every host's block. `whole` has it in the order of
// ranks.
Buffer Hierarchy::by_owners(const Buffer& whole) const {
  std::vector<uint64_t> start(1, 0);
  for (int q = 0; q < placement_.n_ranks(); q++) start.push_back(start.back() + part_len(q));
  std::vector<Segment> pieces;
  for (int i = 0; i < placement_.n_owners; i++) {
    for (int h = 0; h < placement_.n_hosts(); h++) {
      const std::vector<uint64_t> cut = block_shares(h);
      uint64_t at = 0;  // of the share in the block
      for (int j = 0; j < i; j++) at += cut[static_cast<size_t>(j)];
      uint64_t left = cut[static_cast<size_t>(i)];
      for (const int q : placement_.ranks[static_cast<size_t>(h)]) {
        const uint64_t len = part_len(q);
        if (at >= len) {
          at -= len;
          continue;
        }
        const uint64_t n = std::min(left, len - at);
        append_pieces(whole, start[static_cast<size_t>(q)] + at, n, elem_size_, &pieces);
        left -= n;
        at = 0;
      }
    }
  }
  return Buffer(std::move(pieces), elem_size_);
}

std::byte* Hierarchy::work(size_t which, uint64_t n_elems) {
  if (work_.size() <= which) work_.resize(which + 1);
  const size_t n_bytes = n_elems * elem_size_ + 64;
  if (work_[which].size() < n_bytes) work_[which].resize(n_bytes);
  return work_[which].data();
}

}  // namespace pycomm
