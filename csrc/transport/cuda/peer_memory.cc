// Segments, their handles, and the heap in them. See peer_memory.h.
#include "transport/cuda/peer_memory.h"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "transport/cuda/runtime.h"

namespace pycomm {

namespace {

constexpr size_t kSegmentAlignment = size_t{2} << 20;  // smaller allocations share their pages with others
constexpr int kSegmentShift = 56;

constexpr size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// A number that no other process has: equal pids do not mean one process across PID namespaces.
uint64_t process_token() {
  static const uint64_t token = [] {
    uint64_t v = 0;
    while (getrandom(&v, sizeof v, 0) != sizeof v) {
    }
    return v;
  }();
  return token;
}

// What a rank tells its peers of a new segment.
struct Offer {
  uint64_t process;
  uint64_t pointer;
  uint64_t n_bytes;
  char bus_id[16];
  cudaIpcMemHandle_t handle;
};

// A Status as it travels.
struct Verdict {
  uint64_t code;
  char message[504];
};

// What there is between my device and a peer's.
struct Path {
  bool visible = false;  // this process sees the peer's device, and has a number for it
  int theirs = 0;        // the number
  bool is_pcie = false;  // no NVLink: atomic operations do not cross it
};

// kSystem: nothing between them. What is not visible (a job may give each rank its own GPU alone) can only be
// tried.
Status find_path(int mine, const char* bus_id, Path* out) {
  if (cudaDeviceGetByPCIBusId(&out->theirs, bus_id) != cudaSuccess) {
    (void)cudaGetLastError();
    return {};
  }
  out->visible = true;
  if (out->theirs == mine) return {};
  int can = 0, has_atomics = 0;
  PYCOMM_RETURN_IF_ERROR(
      cuda_status(cudaDeviceCanAccessPeer(&can, mine, out->theirs), "cudaDeviceCanAccessPeer"));
  if (can == 0) {
    return Status::error(
        Code::kSystem, format("GPU %d has no peer access to its GPU %d (%s): no NVLink or PCIe path between "
                              "them allows it (nvidia-smi topo -p2p r)",
                              mine, out->theirs, bus_id));
  }
  PYCOMM_RETURN_IF_ERROR(cuda_status(
      cudaDeviceGetP2PAttribute(&has_atomics, cudaDevP2PAttrNativeAtomicSupported, mine, out->theirs),
      "cudaDeviceGetP2PAttribute"));
  out->is_pcie = has_atomics == 0;
  return {};
}

std::atomic<size_t>& leaked_bytes() {
  static std::atomic<size_t> n{0};
  return n;
}

Status open_offer(int device, const Offer& offer, char** base, bool* opened, bool* over_pcie) {
  Path path;
  PYCOMM_RETURN_IF_ERROR(find_path(device, offer.bus_id, &path));
  *over_pcie |= path.is_pcie;
  if (offer.process == process_token()) {
    if (!path.visible) {
      return Status::error(Code::kSystem, format("its GPU %s has no number in this process", offer.bus_id));
    }
    *base = reinterpret_cast<char*>(offer.pointer);
    if (path.theirs == device) return {};
    const cudaError_t error = cudaDeviceEnablePeerAccess(path.theirs, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) {
      return cuda_status(error, format("cudaDeviceEnablePeerAccess(%d)", path.theirs));
    }
    (void)cudaGetLastError();
    return {};
  }
  const std::string unseen = format(
      "; its GPU %s is not visible to this process: if they have a path, give every rank all GPUs of the "
      "machine (CUDA_VISIBLE_DEVICES), and let it select its own",
      offer.bus_id);
  void* p = nullptr;
  PYCOMM_RETURN_IF_ERROR(
      cuda_status(cudaIpcOpenMemHandle(&p, offer.handle, cudaIpcMemLazyEnablePeerAccess),
                  "cudaIpcOpenMemHandle (in containers, all ranks need one IPC namespace: --ipc=host" +
                      (path.visible ? "" : unseen) + ")"));
  *base = static_cast<char*>(p);
  *opened = true;
  return {};
}

}  // namespace

// Every rank tells how it went; the first error is everybody's.
Status PeerMemory::agree(Status mine, const char* what, const Exchange& exchange) const {
  Verdict verdict{static_cast<uint64_t>(mine.code()), {}};
  std::memcpy(verdict.message, mine.message().data(),
              utf8_prefix(mine.message(), sizeof verdict.message - 1));
  std::vector<Verdict> all(static_cast<size_t>(n_ranks()));
  PYCOMM_RETURN_IF_ERROR(exchange(&verdict, sizeof verdict, all.data()).within(what));
  for (int r = 0; r < n_ranks(); ++r) {
    Verdict& v = all[static_cast<size_t>(r)];
    if (v.code == static_cast<uint64_t>(Code::kOk)) continue;
    v.message[sizeof v.message - 1] = '\0';
    return Status::error(static_cast<Code>(v.code), format("%s: rank %d: %s", what, r, v.message));
  }
  return {};
}

Status PeerMemory::create(const Options& options, const Exchange& exchange,
                          std::unique_ptr<PeerMemory>* out) {
  std::unique_ptr<PeerMemory> memory(new PeerMemory(options));
  const size_t reserved = round_up(options.n_reserved_bytes, kAlignment);
  PYCOMM_RETURN_IF_ERROR(memory->add_segment(reserved + options.n_heap_bytes, reserved, exchange));
  *out = std::move(memory);
  return {};
}

PeerMemory::~PeerMemory() {
  if (closed_) {  // no peer knows of it; its blocks' users are gone, or would not hold this object
    free_segments();
    return;
  }
  for (const Segment& s : segments_) leaked_bytes() += s.n_bytes;
}

size_t PeerMemory::n_bytes_leaked() { return leaked_bytes(); }

char* PeerMemory::base(int rank, int segment) const {
  const std::lock_guard lock(mutex_);
  if (segment < 0 || static_cast<size_t>(segment) >= segments_.size()) return nullptr;
  return segments_[static_cast<size_t>(segment)].bases[static_cast<size_t>(rank)];
}

void PeerMemory::bases(char* (*of_rank)[kMaxSegments]) const {
  const std::lock_guard lock(mutex_);
  for (size_t r = 0; r < static_cast<size_t>(n_ranks()); ++r) {
    for (size_t s = 0; s < kMaxSegments; ++s)
      of_rank[r][s] = s < segments_.size() ? segments_[s].bases[r] : nullptr;
  }
}

Status PeerMemory::grow(size_t n_bytes, const Exchange& exchange) {
  return add_segment(n_bytes, 0, exchange);
}

Status PeerMemory::add_segment(size_t n_bytes, size_t first_free, const Exchange& exchange) {
  constexpr const char* kWhat = "peer memory";
  const DeviceGuard guard(device());
  const size_t index = segments_.size();  // only collective calls change it
  Segment segment;
  segment.n_bytes = round_up(std::max<size_t>(n_bytes, 1), kSegmentAlignment);
  segment.bases.resize(static_cast<size_t>(n_ranks()));
  segment.opened.resize(static_cast<size_t>(n_ranks()));
  Offer offer{process_token(), 0, segment.n_bytes, {}, {}};

  const auto make = [&]() -> Status {
    PYCOMM_RETURN_IF_ERROR(guard.status());
    if (index >= kMaxSegments) {
      return Status::error(Code::kValue,
                           format("there are %d segments already, which is the most", kMaxSegments));
    }
    void* p = nullptr;
    PYCOMM_RETURN_IF_ERROR(
        cuda_status(cudaMalloc(&p, segment.n_bytes), format("cudaMalloc of %zu bytes", segment.n_bytes)));
    segment.bases[static_cast<size_t>(rank())] = static_cast<char*>(p);
    offer.pointer = reinterpret_cast<uintptr_t>(p);
    // Zero before any peer knows the address.
    const size_t n_zero = index == 0 ? options_.n_zero_bytes : 0;
    if (n_zero > 0) {
      PYCOMM_RETURN_IF_ERROR(cuda_status(cudaMemset(p, 0, n_zero), "cudaMemset"));
      PYCOMM_RETURN_IF_ERROR(cuda_status(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
    }
    PYCOMM_RETURN_IF_ERROR(cuda_status(cudaDeviceGetPCIBusId(offer.bus_id, sizeof offer.bus_id, device()),
                                       "cudaDeviceGetPCIBusId"));
    if (n_ranks() == 1) return {};
    return cuda_status(cudaIpcGetMemHandle(&offer.handle, p), "cudaIpcGetMemHandle");
  };
  Status status = agree(make(), kWhat, exchange);

  if (status.ok()) {
    std::vector<Offer> offers(static_cast<size_t>(n_ranks()));
    status = exchange(&offer, sizeof offer, offers.data()).within(kWhat);
    if (status.ok()) {
      Status mine;
      for (int r = 0; r < n_ranks() && mine.ok(); ++r) {
        const auto i = static_cast<size_t>(r);
        if (r == rank()) continue;
        if (offers[i].n_bytes != segment.n_bytes) {
          mine = Status::error(Code::kValue,
                               format("this rank asks for %zu bytes, rank %d for %llu", segment.n_bytes, r,
                                      static_cast<unsigned long long>(offers[i].n_bytes)));
          break;
        }
        offers[i].bus_id[sizeof offer.bus_id - 1] = '\0';
        bool opened = false;
        mine = open_offer(device(), offers[i], &segment.bases[i], &opened, &over_pcie_)
                   .within(format("rank %d", r));
        segment.opened[i] = opened;
      }
      status = agree(std::move(mine), kWhat, exchange);
    }
  }
  if (!status.ok()) {  // no kernel knows of it, but a peer may have opened it: closed first, then freed
    for (int r = 0; r < n_ranks(); ++r) {
      const auto i = static_cast<size_t>(r);
      if (segment.opened[i]) (void)cudaIpcCloseMemHandle(segment.bases[i]);
    }
    if (exchange(&offer.n_bytes, sizeof offer.n_bytes,
                 std::vector<uint64_t>(static_cast<size_t>(n_ranks())).data())
            .ok()) {
      (void)cudaFree(segment.bases[static_cast<size_t>(rank())]);
    } else if (segment.bases[static_cast<size_t>(rank())] != nullptr) {
      leaked_bytes() += segment.n_bytes;
    }
    return status;
  }
  const std::lock_guard lock(mutex_);
  segments_.push_back(std::move(segment));
  if (first_free < segments_[index].n_bytes) {
    free_block(uint64_t{index} << kSegmentShift | first_free, segments_[index].n_bytes - first_free);
  }
  return {};
}

// ---- the heap: first fit, neighbours merged

void PeerMemory::free_block(uint64_t place, size_t n_bytes) {
  auto next = free_.lower_bound(place);
  if (next != free_.end() && place + n_bytes == next->first) {  // segments have a gap between their places
    n_bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == place) {
      before->second += n_bytes;
      return;
    }
  }
  free_[place] = n_bytes;
}

Status PeerMemory::allocate(size_t n_bytes, void** p) {
  const size_t wanted = round_up(std::max<size_t>(n_bytes, 1), kAlignment);
  if (wanted < n_bytes) return Status::error(Code::kValue, format("peer memory: %zu bytes", n_bytes));
  const std::lock_guard lock(mutex_);
  size_t largest = 0;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    largest = std::max(largest, it->second);
    if (it->second < wanted) continue;
    const uint64_t place = it->first;
    const size_t left = it->second - wanted;
    free_.erase(it);
    if (left > 0) free_[place + wanted] = left;
    used_[place] = {wanted, false};
    *p = segments_[place >> kSegmentShift].bases[static_cast<size_t>(rank())] +
         (place & ((uint64_t{1} << kSegmentShift) - 1));
    return {};
  }
  return Status::error(Code::kSystem,
                       format("peer memory: no room for %zu bytes; the largest free block has %zu. Make the "
                              "arena larger, or use ordinary CUDA memory, which is staged",
                              n_bytes, largest));
}

Status PeerMemory::release(void* p) {
  uint64_t place = 0;
  const bool ours = find(p, 1, &place);
  const std::lock_guard lock(mutex_);
  const auto it = ours ? used_.find(place) : used_.end();
  if (it == used_.end() || it->second.held) {
    return Status::error(Code::kValue,
                         format("peer memory: %p was not allocated here, or is free already", p));
  }
  if (quarantined_) {
    it->second.held = true;
    return {};
  }
  const size_t n_bytes = it->second.n_bytes;
  used_.erase(it);
  free_block(place, n_bytes);
  if (closed_ && used_.empty()) free_segments();
  return {};
}

bool PeerMemory::find(const void* p, size_t n_bytes, uint64_t* place) const {
  const std::lock_guard lock(mutex_);
  const auto at = reinterpret_cast<uintptr_t>(p);
  for (size_t s = 0; s < segments_.size(); ++s) {
    const auto base = reinterpret_cast<uintptr_t>(segments_[s].bases[static_cast<size_t>(rank())]);
    if (at < base || at >= base + segments_[s].n_bytes) continue;
    const uint64_t offset = at - base;
    const bool reserved = s == 0 && offset < round_up(options_.n_reserved_bytes, kAlignment);
    if (reserved || n_bytes > segments_[s].n_bytes - offset) return false;
    *place = uint64_t{s} << kSegmentShift | offset;
    return true;
  }
  return false;
}

size_t PeerMemory::n_bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [place, block] : used_) sum += block.n_bytes;
  return sum;
}

// ---- the end of peers' access

void PeerMemory::quarantine() {
  const std::lock_guard lock(mutex_);
  quarantined_ = true;
}

Status PeerMemory::settle(const Exchange& exchange) {
  PYCOMM_RETURN_IF_ERROR(agree({}, "peer memory: end of access", exchange));
  const std::lock_guard lock(mutex_);
  quarantined_ = false;
  for (auto it = used_.begin(); it != used_.end();) {
    if (it->second.held) {
      free_block(it->first, it->second.n_bytes);
      it = used_.erase(it);
    } else {
      ++it;
    }
  }
  return {};
}

// Peers' handles are closed before their owners free, as CUDA asks.
Status PeerMemory::close(const Exchange& exchange) {
  if (closed_) return {};
  const DeviceGuard guard(device());
  PYCOMM_RETURN_IF_ERROR(guard.status());
  PYCOMM_RETURN_IF_ERROR(settle(exchange));
  Status mine;
  for (Segment& s : segments_) {
    for (size_t r = 0; r < s.bases.size(); ++r) {
      if (!s.opened[r]) continue;
      Status closed = cuda_status(cudaIpcCloseMemHandle(s.bases[r]), "cudaIpcCloseMemHandle");
      if (mine.ok()) mine = std::move(closed);
      s.opened[r] = false;
    }
  }
  PYCOMM_RETURN_IF_ERROR(agree(std::move(mine), "peer memory: close", exchange));
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (used_.empty()) free_segments();
  return {};
}

void PeerMemory::free_segments() {
  const DeviceGuard guard(device());
  for (Segment& s : segments_) {
    if (cudaFree(s.bases[static_cast<size_t>(rank())]) != cudaSuccess) leaked_bytes() += s.n_bytes;
  }
  segments_.clear();
  free_.clear();
}

}  // namespace pycomm
