// The collectives of engine/hierarchy.h, each as its steps inside and between the hosts.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "engine/hierarchy.h"

namespace pycomm {

namespace {
// A flight that a failed call leaves behind must not be told of messages any more: settle() ends the call
// before its flights go, because they are held here.
using FlightPtr = std::unique_ptr<Flight>;

void copy(const Buffer& from, const Buffer& to, size_t elem_size) {
  for (uint64_t at = 0; at < from.n_elems();) {
    uint64_t n, m;
    const std::byte* src = from.locate(at, elem_size, &n);
    std::byte* dst = to.locate(at, elem_size, &m);
    n = std::min({n, m, from.n_elems() - at});
    if (dst != src) std::memmove(dst, src, n * elem_size);
    at += n;
  }
}

uint64_t sum_before(const std::vector<uint64_t>& lengths, size_t end) {
  return std::accumulate(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(end), uint64_t{0});
}
}  // namespace

// avg: the sum over all ranks, divided once.
void Hierarchy::divide(std::byte* data, uint64_t n) {
  if (call_->sig.op != ReduceOp::kAvg || n == 0) return;
  void* dst = data;
  const void* src = data;
  find_reduce(call_->dtype(), ReduceOp::kAvg)(&dst, 1, &src, 1, n, static_cast<double>(placement_.n_ranks()));
}

// Tile t's shares are begun by `begin`, their sums are at work(first_work + t % kFlights). While those of one
// tile are between hosts, the next is reduced inside.
Status Hierarchy::in_tiles(size_t first_work, const BeginTile& begin) {
  const uint64_t count = call_->sig.count;
  const uint64_t tile = std::max<uint64_t>(1, kTileBytes / elem_size_);
  const uint64_t n_tiles = std::max<uint64_t>(1, (count + tile - 1) / tile);
  const auto len = [&](uint64_t t) { return std::min(tile, count - t * tile); };
  const auto mine = static_cast<size_t>(placement_.local);
  flights_.resize(kFlights);
  for (uint64_t t = 0; t < n_tiles + kFlights - 1; t++) {
    if (t < n_tiles) PYCOMM_RETURN_IF_ERROR(begin(t % kFlights, t * tile, len(t), shares(len(t))));
    if (t + 1 < kFlights) continue;
    const uint64_t back = t + 1 - kFlights;
    PYCOMM_RETURN_IF_ERROR(finish(flights_[back % kFlights].get()));
    const std::vector<uint64_t> cut = shares(len(back));
    std::byte* const sum = work(first_work + back % kFlights, cut[mine]);
    divide(sum, cut[mine]);
    PYCOMM_RETURN_IF_ERROR(inside(CallKind::kAllGather, Buffer(sum, cut[mine]),
                                  slice_of(call_->out, back * tile, len(back), elem_size_), cut, 0));
  }
  return Status();
}

Status Hierarchy::all_reduce() {
  // Alike on all hosts: tiles are runs of their own.
  if (placement_.n_ranks() == placement_.n_hosts()) return all_reduce_alone();
  const auto mine = static_cast<size_t>(placement_.local);
  return in_tiles(0, [&](size_t slot, uint64_t at, uint64_t len, const std::vector<uint64_t>& cut) -> Status {
    std::byte* const stage = work(slot, cut[mine]);
    PYCOMM_RETURN_IF_ERROR(inside(CallKind::kReduceScatter, slice_of(call_->in, at, len, elem_size_),
                                  Buffer(stage, cut[mine]), cut, 0));
    return start(&flights_[slot], Collective::kAllReduce, stage, stage, cut[mine], {}, 0,
                 at + sum_before(cut, mine));
  });
}

// Every host's only rank: straight from and to the tensors, when they are in one piece.
Status Hierarchy::all_reduce_alone() {
  const uint64_t count = call_->sig.count;
  std::byte* in = call_->in.data();
  std::byte* out = call_->out.data();
  if (!call_->in.single() || !call_->out.single()) {
    in = out = work(0, count);
    copy(call_->in, Buffer(in, count), elem_size_);
  }
  PYCOMM_RETURN_IF_ERROR(between(Collective::kAllReduce, in, out, count, {}, 0));
  divide(out, count);
  if (out != call_->out.data()) copy(Buffer(out, count), call_->out, elem_size_);
  return Status();
}

Status Hierarchy::reduce_scatter() {
  const auto mine = static_cast<size_t>(placement_.local);
  const std::vector<uint64_t> totals = share_totals(), block = block_shares(placement_.host);
  std::byte* const share = work(0, totals[mine]);
  PYCOMM_RETURN_IF_ERROR(
      inside(CallKind::kReduceScatter, by_owners(call_->in), Buffer(share, totals[mine]), totals, 0));
  std::byte* const own = work(1, block[mine]);
  if (placement_.is_owner()) {
    PYCOMM_RETURN_IF_ERROR(between(Collective::kReduceScatter, share, own, totals[mine],
                                   share_counts(placement_.local), 0, sum_before(totals, mine)));
    divide(own, block[mine]);
  }
  return spread_block(own, block);
}

// The owners' shares of this host's block to all its ranks, each of which takes its part.
Status Hierarchy::spread_block(std::byte* own, const std::vector<uint64_t>& block) {
  const uint64_t n = block_len(placement_.host);
  std::byte* const whole = work(2, n);
  PYCOMM_RETURN_IF_ERROR(inside(CallKind::kAllGather,
                                Buffer(own, block[static_cast<size_t>(placement_.local)]), Buffer(whole, n),
                                block, 0));
  uint64_t at = 0;
  for (int i = 0; i < placement_.local; i++)
    at += part_len(placement_.ranks[static_cast<size_t>(placement_.host)][static_cast<size_t>(i)]);
  copy(Buffer(whole + at * elem_size_, part_len(placement_.rank)), call_->out, elem_size_);
  return Status();
}

// Of this host's block, which `part` is a part of, the share of this rank.
Status Hierarchy::gather_block(const Buffer& part, std::byte** share) {
  std::vector<uint64_t> parts;
  for (const int q : placement_.ranks[static_cast<size_t>(placement_.host)]) parts.push_back(part_len(q));
  const uint64_t n = block_len(placement_.host);
  std::byte* const whole = work(2, n);
  PYCOMM_RETURN_IF_ERROR(inside(CallKind::kAllGather, part, Buffer(whole, n), parts, 0));
  const std::vector<uint64_t> cut = block_shares(placement_.host);
  uint64_t at = 0;
  for (int i = 0; i < placement_.local; i++) at += cut[static_cast<size_t>(i)];
  *share = whole + at * elem_size_;
  return Status();
}

Status Hierarchy::all_gather() {
  const auto mine = static_cast<size_t>(placement_.local);
  std::byte* own = nullptr;
  PYCOMM_RETURN_IF_ERROR(gather_block(call_->in, &own));
  const std::vector<uint64_t> totals = share_totals();
  std::byte* const share = work(0, totals[mine]);
  if (placement_.is_owner()) {
    PYCOMM_RETURN_IF_ERROR(between(Collective::kAllGather, own, share, totals[mine],
                                   share_counts(placement_.local), 0, sum_before(totals, mine)));
  }
  return inside(CallKind::kAllGather, Buffer(share, totals[mine]), by_owners(call_->out), totals, 0);
}

Status Hierarchy::gather() {
  const auto mine = static_cast<size_t>(placement_.local);
  const auto root = static_cast<size_t>(call_->sig.root);
  const int root_host = placement_.host_of[root];
  std::byte* own = nullptr;
  PYCOMM_RETURN_IF_ERROR(gather_block(call_->in, &own));
  const std::vector<uint64_t> totals = share_totals();
  std::byte* const share = work(0, totals[mine]);
  if (placement_.is_owner()) {
    PYCOMM_RETURN_IF_ERROR(
        between(Collective::kGather, own, share, totals[mine], share_counts(placement_.local), root_host));
  }
  if (placement_.host != root_host) return all_here();
  return inside(CallKind::kGather, Buffer(share, totals[mine]),
                placement_.rank == call_->sig.root ? by_owners(call_->out) : Buffer(), totals,
                placement_.local_of[root]);
}

Status Hierarchy::scatter() {
  const auto mine = static_cast<size_t>(placement_.local);
  const auto root = static_cast<size_t>(call_->sig.root);
  const int root_host = placement_.host_of[root];
  const std::vector<uint64_t> totals = share_totals(), block = block_shares(placement_.host);
  std::byte* const share = work(0, totals[mine]);
  if (placement_.host == root_host) {
    PYCOMM_RETURN_IF_ERROR(inside(CallKind::kScatter,
                                  placement_.rank == call_->sig.root ? by_owners(call_->in) : Buffer(),
                                  Buffer(share, totals[mine]), totals, placement_.local_of[root]));
  }
  std::byte* const own = work(1, block[mine]);
  if (placement_.is_owner()) {
    PYCOMM_RETURN_IF_ERROR(
        between(Collective::kScatter, share, own, totals[mine], share_counts(placement_.local), root_host));
  }
  return spread_block(own, block);
}

Status Hierarchy::broadcast() {
  const auto mine = static_cast<size_t>(placement_.local);
  const auto root = static_cast<size_t>(call_->sig.root);
  const int root_host = placement_.host_of[root];
  const uint64_t count = call_->sig.count;
  if (placement_.n_local() == 1 && call_->out.single() &&
      (placement_.host != root_host || call_->in.single())) {
    return between(Collective::kBroadcast, call_->in.data(), call_->out.data(), count, {}, root_host);
  }
  const std::vector<uint64_t> cut = shares(count);
  std::byte* const share = work(0, cut[mine]);
  if (placement_.host == root_host) {
    PYCOMM_RETURN_IF_ERROR(inside(CallKind::kScatter,
                                  placement_.rank == call_->sig.root ? call_->in : Buffer(),
                                  Buffer(share, cut[mine]), cut, placement_.local_of[root]));
  }
  PYCOMM_RETURN_IF_ERROR(between(Collective::kBroadcast, share, share, cut[mine], {}, root_host));
  return inside(CallKind::kAllGather, Buffer(share, cut[mine]), call_->out, cut, 0);
}

Status Hierarchy::reduce() {
  const auto mine = static_cast<size_t>(placement_.local);
  const auto root = static_cast<size_t>(call_->sig.root);
  const int root_host = placement_.host_of[root];
  const std::vector<uint64_t> cut = shares(call_->sig.count);
  std::byte* const share = work(0, cut[mine]);
  PYCOMM_RETURN_IF_ERROR(inside(CallKind::kReduceScatter, call_->in, Buffer(share, cut[mine]), cut, 0));
  std::byte* const sum = work(1, cut[mine]);
  PYCOMM_RETURN_IF_ERROR(between(Collective::kReduce, share, sum, cut[mine], {}, root_host));
  if (placement_.host != root_host) return all_here();
  divide(sum, placement_.is_owner() ? cut[mine] : 0);
  return inside(CallKind::kGather, Buffer(sum, cut[mine]),
                placement_.rank == call_->sig.root ? call_->out : Buffer(), cut, placement_.local_of[root]);
}

// Also where owners end at different times, or not: a refusal that one of them has seen and another has not
// must reach all ranks of this host in this call.
Status Hierarchy::all_here() {
  Status s = placement_.n_local() > 1 ? engine_.agree(call_->sig, hooks_, local_timeout_s()) : Status();
  inside_refused_ = s.code() == Code::kRefused;
  return s;
}

Status Hierarchy::barrier() {
  PYCOMM_RETURN_IF_ERROR(all_here());
  std::byte nothing{};
  if (placement_.local == 0)
    PYCOMM_RETURN_IF_ERROR(between(Collective::kAllReduce, &nothing, &nothing, 0, {}, 0));
  else
    n_runs_++;  // local_timeout_s(): the first rank here names whom it waits for
  return all_here();
}

// Between hosts straight from rank to rank, in slices; the ranks of this host by the shared-memory engine.
// The number of elements goes ahead, so that sizes that differ are seen.
Status Hierarchy::all_to_all() {
  const auto n = static_cast<size_t>(placement_.n_ranks());
  std::vector<uint64_t> send_at(1, 0), recv_at(1, 0);
  for (size_t q = 0; q < n; q++) {
    send_at.push_back(send_at.back() + call_->send_counts[q]);
    recv_at.push_back(recv_at.back() + call_->recv_counts[q]);
  }
  std::byte* in = call_->in.data();
  std::byte* out = call_->out.data();
  if (!call_->in.single()) copy(call_->in, Buffer(in = work(0, send_at[n]), send_at[n]), elem_size_);
  if (!call_->out.single()) out = work(1, recv_at[n]);
  const uint64_t slice = Rounds::kSliceBytes / elem_size_;
  const auto n_slices = [&](uint64_t count) { return static_cast<uint32_t>((count + slice - 1) / slice); };
  uint64_t left = 0;
  sizes_.resize(2 * n);
  {
    const auto lock = remote_->net().lock();
    for (size_t q = 0; q < n; q++) {
      const int peer = static_cast<int>(q);
      if (placement_.host_of[q] == placement_.host) continue;
      sizes_[q] = call_->send_counts[q];
      left += 2;
      remote_->expect({number_, 0, 0, 1, peer}, nullptr, sizeof(uint64_t), [&, q](const std::byte* data) {
        uint64_t theirs;
        std::memcpy(&theirs, data, sizeof theirs);
        if (theirs != call_->recv_counts[q])
          remote_->differ(static_cast<int>(q), theirs, call_->recv_counts[q]);
        left--;
      });
      remote_->send(peer, {number_, 0, 0, 1, peer}, reinterpret_cast<const std::byte*>(&sizes_[q]),
                    sizeof(uint64_t), [&] { left--; });
      remote_->open(peer);
      for (uint32_t t = 0; t < n_slices(call_->recv_counts[q]); t++) {
        const uint64_t at = t * slice, len = std::min(slice, call_->recv_counts[q] - at);
        left++;
        remote_->expect({number_, 0, t, 0, peer}, out + (recv_at[q] + at) * elem_size_, len * elem_size_,
                        [&](const std::byte*) { left--; });
      }
      if (call_->send_counts[q] == 0) continue;
      left++;
      remote_->when_opened(peer, [&, q, peer] {
        for (uint32_t t = 0; t < n_slices(call_->send_counts[q]); t++) {
          const uint64_t at = t * slice, len = std::min(slice, call_->send_counts[q] - at);
          left++;
          remote_->send(peer, {number_, 0, t, 0, peer}, in + (send_at[q] + at) * elem_size_, len * elem_size_,
                        [&] { left--; });
        }
        left--;
      });
    }
  }
  Status s;
  if (placement_.n_local() > 1 || call_->send_counts[static_cast<size_t>(placement_.rank)] > 0) {
    Call local = *call_;
    std::vector<Segment> from, to;
    std::vector<uint64_t> send_counts, recv_counts;
    for (const int r : placement_.ranks[static_cast<size_t>(placement_.host)]) {
      const auto q = static_cast<size_t>(r);
      from.push_back({in + send_at[q] * elem_size_, call_->send_counts[q]});
      to.push_back({out + recv_at[q] * elem_size_, call_->recv_counts[q]});
      send_counts.push_back(call_->send_counts[q]);
      recv_counts.push_back(call_->recv_counts[q]);
    }
    local.in = Buffer(std::move(from), elem_size_);
    local.out = Buffer(std::move(to), elem_size_);
    local.send_counts = send_counts;
    local.recv_counts = recv_counts;
    s = engine_.run(local, hooks_, timeout_s_);
    inside_refused_ = s.code() == Code::kRefused;
  }
  auto lock = remote_->net().lock();
  if (s.ok())
    s = remote_->wait(
        lock, [&] { return left == 0; }, hooks_, timeout_s_, here());
  remote_->end(s.ok());  // its functions refer to this frame
  lock.unlock();
  if (s.ok() && !call_->out.single()) copy(Buffer(out, recv_at[n]), call_->out, elem_size_);
  return s;
}

}  // namespace pycomm
