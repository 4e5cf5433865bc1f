// Tiles and launches. The watchdog is in peer_watchdog.cc. See peer_collectives.h.
#include "engine/cuda/peer_collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine/cuda/streams.h"
#include "transport/cuda/runtime.h"

namespace pycomm {

using cuda::PeerCall;
using cuda::PeerKind;

namespace {

constexpr size_t kHalfQuantum = 256;
constexpr size_t kMinHalfBytes = 4096;

constexpr uint64_t round_up(uint64_t n, uint64_t step) { return (n + step - 1) / step * step; }
constexpr uint64_t round_down(uint64_t n, uint64_t step) { return n / step * step; }

bool overlap(const void* a, size_t n_a, const void* b, size_t n_b) {
  const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return n_a > 0 && n_b > 0 && x < y + n_b && y < x + n_a;
}

// in and out may be the same memory, or share none.
Status check_overlap(const char* what, const void* in, size_t n_in, const void* out, size_t n_out,
                     bool in_place) {
  if (in_place || !overlap(in, n_in, out, n_out)) return {};
  return Status::error(Code::kValue,
                       format("%s: the output overlaps the input, and is not its place in it: give separate "
                              "tensors, or the same one",
                              what));
}

// A hash of what must be alike on all ranks, below 2^kHashBits.
class Hash {
 public:
  void add(uint64_t v) {  // splitmix64's steps
    state_ += v + 0x9e3779b97f4a7c15u;
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9u;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebu;
    state_ ^= state_ >> 31;
  }
  uint32_t value() const { return static_cast<uint32_t>(state_ >> (64 - cuda::kHashBits)); }

 private:
  uint64_t state_ = 0;
};

bool is_two_shot(PeerKind kind) { return kind == PeerKind::kTwoShot || kind == PeerKind::kBroadcastTwoShot; }

uint64_t key_of(DType dtype, ReduceOp op) {
  return (static_cast<uint64_t>(dtype) + 1) << 8 | static_cast<uint64_t>(op);
}

}  // namespace

size_t PeerCollectives::zero_bytes() { return round_up(sizeof(cuda::PeerControl), kHalfQuantum); }

size_t PeerCollectives::reserved_bytes(size_t half_bytes) { return zero_bytes() + 2 * half_bytes; }

// ---- creation

Status PeerCollectives::create(PeerMemory* memory, const PeerOptions& options, const Exchange& exchange,
                               std::unique_ptr<PeerCollectives>* out) {
  std::unique_ptr<PeerCollectives> made(new PeerCollectives(memory, options));
  PYCOMM_RETURN_IF_ERROR(made->agree_on_options(made->allocate_words(), exchange));
  if (memory->n_ranks() > 1) made->watchdog_ = std::thread([self = made.get()] { self->watch(); });
  PYCOMM_RETURN_IF_ERROR(made->prove(exchange));
  *out = std::move(made);
  return {};
}

// `mine`: whether this rank can take part at all.
Status PeerCollectives::agree_on_options(Status mine, const Exchange& exchange) {
  const int n = memory_->n_ranks();
  struct Terms {
    uint64_t half_bytes, n_threads, push, one_shot_bytes;
    uint64_t max_blocks;  // the smallest serves
    uint64_t n_multiprocessors;
    DeviceId device;
    uint64_t good;
  };
  const DeviceGuard guard(memory_->device());
  int n_multiprocessors = 0;
  if (mine.ok()) mine = guard.status();
  if (mine.ok()) {
    mine = cuda_status(
        cudaDeviceGetAttribute(&n_multiprocessors, cudaDevAttrMultiProcessorCount, memory_->device()),
        "cudaDeviceGetAttribute");
  }
  DeviceId id;
  if (mine.ok()) mine = device_id(memory_->device(), &id);
  if (mine.ok() && (n > cuda::kMaxPeers || options_.half_bytes < kMinHalfBytes ||
                    options_.half_bytes % kHalfQuantum != 0 || options_.max_blocks < 1 ||
                    options_.n_threads < 32 || options_.n_threads > cuda::kMaxPeerThreads)) {
    mine = Status::error(
        Code::kValue,
        format("peer collectives: %d ranks (1 to %d), half_bytes %zu (a multiple of %zu from %zu "
               "on), max_blocks %u (from 1 on), n_threads %u (32 to %u)",
               n, cuda::kMaxPeers, options_.half_bytes, kHalfQuantum, kMinHalfBytes, options_.max_blocks,
               options_.n_threads, cuda::kMaxPeerThreads));
  }
  const bool push = options_.push || memory_->is_over_pcie();
  const unsigned most = std::min(options_.max_blocks, static_cast<unsigned>(cuda::kMaxPeerBlocks));
  const Terms terms{options_.half_bytes,
                    options_.n_threads,
                    push ? 1u : 0u,
                    options_.one_shot_bytes,
                    most,
                    static_cast<uint64_t>(n_multiprocessors),
                    id,
                    mine.ok() ? 1u : 0u};
  std::vector<Terms> all(static_cast<size_t>(n));
  PYCOMM_RETURN_IF_ERROR(exchange(&terms, sizeof terms, all.data()).within("peer collectives"));
  if (!mine.ok()) return mine;
  max_blocks_ = most;
  for (int r = 0; r < n; ++r) {
    const Terms& t = all[static_cast<size_t>(r)];
    if (t.good == 0) {
      return Status::error(Code::kValue, format("peer collectives: rank %d could not take part", r));
    }
    push_ = push_ || t.push != 0;
    if (t.half_bytes != terms.half_bytes || t.n_threads != terms.n_threads ||
        t.one_shot_bytes != terms.one_shot_bytes) {
      return Status::error(
          Code::kMismatch,
          format(
              "peer collectives: options differ: half_bytes %llu, n_threads %llu, one_shot_bytes %llu here; "
              "%llu, %llu, %llu on rank %d",
              static_cast<unsigned long long>(terms.half_bytes),
              static_cast<unsigned long long>(terms.n_threads),
              static_cast<unsigned long long>(terms.one_shot_bytes),
              static_cast<unsigned long long>(t.half_bytes), static_cast<unsigned long long>(t.n_threads),
              static_cast<unsigned long long>(t.one_shot_bytes), r));
    }
    // A block takes a multiprocessor for itself, and ranks on one GPU share those.
    const auto sharing =
        std::count_if(all.begin(), all.end(), [&](const Terms& other) { return other.device == t.device; });
    const auto share = std::max<uint64_t>(1, t.n_multiprocessors / static_cast<uint64_t>(sharing));
    max_blocks_ = std::min({max_blocks_, static_cast<unsigned>(t.max_blocks), static_cast<unsigned>(share)});
  }
  return {};
}

Status PeerCollectives::allocate_words() {
  const DeviceGuard guard(memory_->device());
  PYCOMM_RETURN_IF_ERROR(guard.status());
  void* host = nullptr;
  void* device = nullptr;
  PYCOMM_RETURN_IF_ERROR(
      cuda_status(cudaHostAlloc(&host, sizeof(cuda::PeerWords), cudaHostAllocMapped | cudaHostAllocPortable),
                  "cudaHostAlloc"));
  words_ = static_cast<cuda::PeerWords*>(host);
  std::memset(host, 0, sizeof(cuda::PeerWords));
  PYCOMM_RETURN_IF_ERROR(cuda_status(cudaHostGetDevicePointer(&device, host, 0), "cudaHostGetDevicePointer"));
  device_words_ = static_cast<cuda::PeerWords*>(device);
  return {};
}

PeerCollectives::~PeerCollectives() {
  end_watch();
  // Not idle: a kernel still writes to them, and they are kept until the process ends.
  if (words_ != nullptr && is_idle()) memory_->free_with(words_);
}

// ---- a message in tiles

// The place of a tensor that peers may access where it lies; 0: it is staged.
uint64_t PeerCollectives::place_of(const void* p, size_t n_bytes) const {
  uint64_t place = 0;
  if (!memory_->find(p, n_bytes, &place) || place % 16 != 0) return 0;
  return place | 1;
}

// How much of Message::n_bytes fits half of the staging.
uint64_t PeerCollectives::tile_bytes(PeerKind kind) const {
  const auto n = static_cast<uint64_t>(memory_->n_ranks());
  uint64_t result = 0;
  const uint64_t copies = peer_staged_bytes(kind, push_, memory_->n_ranks(), 16, &result) / 16;
  const uint64_t slice = round_down(options_.half_bytes / copies, 16);
  return is_two_shot(kind) ? n * slice : slice;
}

PeerCall PeerCollectives::tile_of(const Message& m, uint64_t begin, uint64_t n_bytes,
                                  unsigned* n_blocks) const {
  const int n = memory_->n_ranks();
  const auto ranks = static_cast<uint64_t>(n);
  PeerCall call{};
  for (int r = 0; r < n; ++r) call.bases[r] = memory_->base(r);
  call.words = device_words_;
  call.kind = m.kind;
  call.push = push_;
  call.rank = memory_->rank();
  call.n_ranks = n;
  call.root = m.root;
  call.in = m.in == nullptr ? nullptr : m.in + begin;
  call.out = m.out == nullptr ? nullptr : m.out + begin;
  if (is_two_shot(m.kind)) {
    call.slice_bytes = round_up((n_bytes + ranks - 1) / ranks, 16);
    call.total_bytes = n_bytes;
    call.in_stride = call.out_stride = call.staging_stride = call.slice_bytes;
    if (m.out != nullptr && (m.kind == PeerKind::kTwoShot || call.rank != m.root)) {
      call.out_place = place_of(call.out, n_bytes);
    }
  } else {
    const bool scatters = m.kind == PeerKind::kReduceScatter;
    call.slice_bytes = n_bytes;
    call.total_bytes = scatters ? ranks * n_bytes : n_bytes;
    call.in_stride = scatters ? m.n_bytes : n_bytes;
    call.out_stride = m.n_bytes;
    call.staging_stride = round_up(n_bytes, 16);
  }
  // One-shot: staging is cheaper than a second meeting, and in-place outputs are written meanwhile.
  if (!push_ && call.in != nullptr && m.kind != PeerKind::kOneShot) {
    const bool scatters = m.kind == PeerKind::kReduceScatter;
    const uint64_t reach = scatters ? (ranks - 1) * m.n_bytes + n_bytes : n_bytes;
    if (!scatters || m.n_bytes % 16 == 0) call.in_place = place_of(call.in, reach);
  }
  call.staging = zero_bytes();
  call.half_bytes = options_.half_bytes;
  (void)peer_staged_bytes(m.kind, push_, n, call.staging_stride, &call.result);
  const uint64_t per_block = uint64_t{16} * options_.n_threads;
  *n_blocks = static_cast<unsigned>(
      std::clamp<uint64_t>((call.slice_bytes + per_block - 1) / per_block, 1, max_blocks_));
  call.label = static_cast<uint64_t>(m.kind) | m.n_bytes << 8;
  Hash hash;
  for (uint64_t v : {static_cast<uint64_t>(m.kind), m.key, m.n_bytes, begin, n_bytes,
                     static_cast<uint64_t>(m.root), uint64_t{*n_blocks}}) {
    hash.add(v);
  }
  call.hash = hash.value();
  return call;
}

Status PeerCollectives::run(const char* what, const Message& m, cuda::Stream stream, const Launch& launch) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  if (m.n_bytes == 0) return {};
  const DeviceGuard guard(memory_->device());
  PYCOMM_RETURN_IF_ERROR(guard.status());
  bool captured = false;
  PYCOMM_RETURN_IF_ERROR(cuda::capture_state(stream, what, &captured));
  const uint64_t tile = tile_bytes(m.kind);
  for (uint64_t begin = 0; begin < m.n_bytes; begin += tile) {
    unsigned n_blocks = 1;
    const PeerCall call = tile_of(m, begin, std::min(tile, m.n_bytes - begin), &n_blocks);
    Status status = launch(call, n_blocks);
    if (status.ok()) continue;
    if (!captured) abort(status.clone());  // the peers' kernels wait for what was not launched
    return status;
  }
  return {};
}

// ---- the collectives

Status PeerCollectives::check_reduce(const char* what, DType dtype, ReduceOp op) const {
  if (cuda::reduce_supported(dtype, op)) return {};
  return Status::error(Code::kValue,
                       format("%s: %s is not defined for %s", what, reduce_op_name(op), dtype_name(dtype)));
}

Status PeerCollectives::all_reduce(const void* in, void* out, size_t n_elems, DType dtype, ReduceOp op,
                                   double scalar, PeerWay way, cuda::Stream stream) {
  const uint64_t n_bytes = n_elems * dtype_size(dtype);
  PYCOMM_RETURN_IF_ERROR(check_reduce("all_reduce", dtype, op));
  PYCOMM_RETURN_IF_ERROR(check_overlap("all_reduce", in, n_bytes, out, n_bytes, in == out));
  if (memory_->n_ranks() == 1) {
    const DeviceGuard guard(memory_->device());
    PYCOMM_RETURN_IF_ERROR(guard.status());
    const cuda::ReduceSegment segment{out, &in, n_elems};
    return cuda::reduce(dtype, op, {&segment, 1}, 1, scalar, stream);
  }
  const bool one_shot =
      way == PeerWay::kOneShot || (way == PeerWay::kAuto && n_bytes <= options_.one_shot_bytes);
  const Message message{one_shot ? PeerKind::kOneShot : PeerKind::kTwoShot,
                        static_cast<const char*>(in),
                        static_cast<char*>(out),
                        n_bytes,
                        0,
                        key_of(dtype, op)};
  return run("all_reduce", message, stream, [&](const PeerCall& call, unsigned n_blocks) {
    return cuda::peer_reduce(call, dtype, op, scalar, n_blocks, options_.n_threads, stream);
  });
}

Status PeerCollectives::reduce_scatter(const void* in, void* out, size_t n_elems, DType dtype, ReduceOp op,
                                       double scalar, cuda::Stream stream) {
  const uint64_t n_bytes = n_elems * dtype_size(dtype);
  const auto n = static_cast<uint64_t>(memory_->n_ranks());
  PYCOMM_RETURN_IF_ERROR(check_reduce("reduce_scatter", dtype, op));
  const char* const mine = static_cast<const char*>(in) + static_cast<uint64_t>(memory_->rank()) * n_bytes;
  PYCOMM_RETURN_IF_ERROR(check_overlap("reduce_scatter", in, n * n_bytes, out, n_bytes, out == mine));
  if (n == 1) return all_reduce(in, out, n_elems, dtype, op, scalar, PeerWay::kAuto, stream);
  const Message message{
      PeerKind::kReduceScatter, static_cast<const char*>(in), static_cast<char*>(out), n_bytes, 0,
      key_of(dtype, op)};
  return run("reduce_scatter", message, stream, [&](const PeerCall& call, unsigned n_blocks) {
    return cuda::peer_reduce(call, dtype, op, scalar, n_blocks, options_.n_threads, stream);
  });
}

Status PeerCollectives::all_gather(const void* in, void* out, size_t n_bytes, cuda::Stream stream) {
  const auto n = static_cast<uint64_t>(memory_->n_ranks());
  const char* const mine = static_cast<char*>(out) + static_cast<uint64_t>(memory_->rank()) * n_bytes;
  PYCOMM_RETURN_IF_ERROR(check_overlap("all_gather", in, n_bytes, out, n * n_bytes, in == mine));
  if (n == 1) {
    if (in == out || n_bytes == 0) return {};
    const DeviceGuard guard(memory_->device());
    PYCOMM_RETURN_IF_ERROR(guard.status());
    return cuda_status(cudaMemcpyAsync(out, in, n_bytes, cudaMemcpyDeviceToDevice, stream), "all_gather");
  }
  const Message message{PeerKind::kAllGather, static_cast<const char*>(in), static_cast<char*>(out), n_bytes};
  return run("all_gather", message, stream, [&](const PeerCall& call, unsigned n_blocks) {
    return cuda::peer_copy(call, n_blocks, options_.n_threads, stream);
  });
}

Status PeerCollectives::broadcast(void* data, size_t n_bytes, int root, PeerWay way, cuda::Stream stream) {
  if (root < 0 || root >= memory_->n_ranks()) {
    return Status::error(Code::kValue,
                         format("broadcast: root is %d; expected 0 to %d", root, memory_->n_ranks() - 1));
  }
  if (memory_->n_ranks() == 1) return {};
  const bool one_shot =
      way == PeerWay::kOneShot || (way == PeerWay::kAuto && n_bytes <= options_.one_shot_bytes);
  const bool is_root = root == memory_->rank();
  const Message message{one_shot ? PeerKind::kBroadcast : PeerKind::kBroadcastTwoShot,
                        is_root ? static_cast<const char*>(data) : nullptr,
                        is_root ? nullptr : static_cast<char*>(data), n_bytes, root};
  return run("broadcast", message, stream, [&](const PeerCall& call, unsigned n_blocks) {
    return cuda::peer_copy(call, n_blocks, options_.n_threads, stream);
  });
}

}  // namespace pycomm
