// The memory, its handles, and the heap in it; peer_retired.cc has its end. See peer_memory.h.
#include "transport/cuda/peer_memory.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "transport/cuda/device_memory.h"
#include "transport/cuda/runtime.h"

namespace pycomm {

namespace {

constexpr const char* kWhat = "peer memory";
constexpr size_t kGranularity = size_t{2} << 20;  // smaller allocations share their pages with others

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

}  // namespace

// What a rank tells its peers of its memory.
struct PeerMemory::Offer {
  uint64_t process;
  uint64_t pointer;
  uint64_t n_bytes;
  uint64_t let_go;  // offset of the words in its arena
  char bus_id[16];
  cudaIpcMemHandle_t handle;
};

// Every rank tells how it went; the first error is everybody's.
Status PeerMemory::agree(Status mine, const Exchange& exchange) const {
  Verdict verdict{static_cast<uint64_t>(mine.code()), {}};
  std::memcpy(verdict.message, mine.message().data(),
              utf8_prefix(mine.message(), sizeof verdict.message - 1));
  std::vector<Verdict> all(static_cast<size_t>(n_ranks()));
  PYCOMM_RETURN_IF_ERROR(exchange(&verdict, sizeof verdict, all.data()).within(kWhat));
  for (int r = 0; r < n_ranks(); ++r) {
    Verdict& v = all[static_cast<size_t>(r)];
    if (v.code == static_cast<uint64_t>(Code::kOk)) continue;
    v.message[sizeof v.message - 1] = '\0';
    return Status::error(static_cast<Code>(v.code), format("%s: rank %d: %s", kWhat, r, v.message));
  }
  return {};
}

Status PeerMemory::create(const Options& options, const Exchange& exchange,
                          std::shared_ptr<PeerMemory>* out) {
  std::shared_ptr<PeerMemory> memory(new PeerMemory(options));
  let_go_of_retired(options.device);
  PYCOMM_RETURN_IF_ERROR(memory->agree({}, exchange));
  free_retired(options.device);
  Status status = memory->make_and_map(exchange);
  if (status.ok()) {
    *out = std::move(memory);
    return {};
  }
  retire(memory);  // no kernel knows of it, but a peer may have opened it
  let_go_of_retired(options.device);
  if (memory->agree({}, exchange).ok()) free_retired(options.device);
  return status;
}

// This rank's own, which no peer knows so far.
Status PeerMemory::make(Offer* offer) {
  const DeviceGuard guard(device());
  PYCOMM_RETURN_IF_ERROR(guard.status());
  const size_t reserved = round_up(options_.n_reserved_bytes, kAlignment);
  n_bytes_ = round_up(std::max<size_t>(reserved + options_.n_heap_bytes, 1), kGranularity);
  *offer = {process_token(), 0, n_bytes_, 0, {}, {}};
  void* p = nullptr;
  size_t got = 0;
  PYCOMM_RETURN_IF_ERROR(device_malloc(device(), n_bytes_, n_bytes_, "memory of peers", &p, &got));
  peers_[static_cast<size_t>(rank())].base = static_cast<char*>(p);
  if (reserved < n_bytes_) free_[reserved] = n_bytes_ - reserved;
  offer->pointer = reinterpret_cast<uintptr_t>(p);
  if (options_.n_zero_bytes > 0) {  // before any peer knows the address
    PYCOMM_RETURN_IF_ERROR(cuda_status(cudaMemset(p, 0, options_.n_zero_bytes), "cudaMemset"));
    PYCOMM_RETURN_IF_ERROR(cuda_status(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
  }
  PYCOMM_RETURN_IF_ERROR(cuda_status(cudaDeviceGetPCIBusId(offer->bus_id, sizeof offer->bus_id, device()),
                                     "cudaDeviceGetPCIBusId"));
  if (n_ranks() == 1) return {};
  const size_t n_words_bytes = sizeof(LetGo) * static_cast<size_t>(n_ranks());
  Arena& arena = *options_.node->arena();
  PYCOMM_RETURN_IF_ERROR(arena.allocate(n_words_bytes, &peers_let_go_offset_));
  peers_let_go_ = reinterpret_cast<LetGo*>(arena.base() + peers_let_go_offset_);
  std::memset(static_cast<void*>(peers_let_go_), 0, n_words_bytes);
  offer->let_go = peers_let_go_offset_;
  return cuda_status(cudaIpcGetMemHandle(&offer->handle, p), "cudaIpcGetMemHandle");
}

Status PeerMemory::open(const Offer& offer, Peer* peer) {
  Path path;
  PYCOMM_RETURN_IF_ERROR(find_path(device(), offer.bus_id, &path));
  over_pcie_ |= path.is_pcie;
  if (offer.process == process_token()) {
    if (!path.visible) {
      return Status::error(Code::kSystem, format("its GPU %s has no number in this process", offer.bus_id));
    }
    peer->base = reinterpret_cast<char*>(offer.pointer);
    if (path.theirs == device()) return {};
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
  peer->base = static_cast<char*>(p);
  peer->opened = true;
  return {};
}

// Whom to tell is known before anything is opened.
Status PeerMemory::map(const std::vector<Offer>& offers) {
  const DeviceGuard guard(device());
  PYCOMM_RETURN_IF_ERROR(guard.status());
  for (int r = 0; r < n_ranks(); ++r) {
    if (r == rank()) continue;
    Peer& p = peers_[static_cast<size_t>(r)];
    const int node_rank = options_.node_ranks[static_cast<size_t>(r)];
    p.mapped = options_.node->mapping(node_rank);
    if (p.mapped == nullptr) return Status::error(Code::kPeerLost, format("rank %d has died", r));
    p.let_go = reinterpret_cast<LetGo*>(p.mapped->base() + offers[static_cast<size_t>(r)].let_go) + rank();
  }
  for (int r = 0; r < n_ranks(); ++r) {
    if (r == rank()) continue;
    const Offer& offer = offers[static_cast<size_t>(r)];
    if (offer.n_bytes != n_bytes_) {
      return Status::error(Code::kValue, format("this rank asks for %zu bytes, rank %d for %llu", n_bytes_, r,
                                                static_cast<unsigned long long>(offer.n_bytes)));
    }
    PYCOMM_RETURN_IF_ERROR(open(offer, &peers_[static_cast<size_t>(r)]).within(format("rank %d", r)));
  }
  return {};
}

Status PeerMemory::make_and_map(const Exchange& exchange) {
  Offer mine{};
  PYCOMM_RETURN_IF_ERROR(agree(make(&mine), exchange));
  is_told_ = true;
  std::vector<Offer> offers(static_cast<size_t>(n_ranks()));
  PYCOMM_RETURN_IF_ERROR(exchange(&mine, sizeof mine, offers.data()).within(kWhat));
  for (Offer& offer : offers) offer.bus_id[sizeof offer.bus_id - 1] = '\0';
  return agree(map(offers), exchange);
}

// ---- the heap: first fit, neighbours merged

void PeerMemory::free_block(uint64_t place, size_t n_bytes) {
  auto next = free_.lower_bound(place);
  if (next != free_.end() && place + n_bytes == next->first) {
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
    used_[place] = wanted;
    *p = base(rank()) + place;
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
  if (it == used_.end()) {
    return Status::error(Code::kValue,
                         format("peer memory: %p was not allocated here, or is free already", p));
  }
  if (!quarantined_) free_block(place, it->second);
  used_.erase(it);
  return {};
}

bool PeerMemory::find(const void* p, size_t n_bytes, uint64_t* place) const {
  const auto at = reinterpret_cast<uintptr_t>(p), begin = reinterpret_cast<uintptr_t>(base(rank()));
  if (at < begin + round_up(options_.n_reserved_bytes, kAlignment) || at >= begin + n_bytes_) return false;
  if (n_bytes > begin + n_bytes_ - at) return false;
  *place = at - begin;
  return true;
}

size_t PeerMemory::n_bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [place, n_bytes] : used_) sum += n_bytes;
  return sum;
}

size_t PeerMemory::n_bytes_free() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [place, n_bytes] : free_) sum += n_bytes;
  return sum;
}

void PeerMemory::quarantine() {
  const std::lock_guard lock(mutex_);
  quarantined_ = true;
}

}  // namespace pycomm
