#include "engine/device_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/log.h"
#include "engine/cuda/device_impl.h"
#include "kernels/cuda/kernels.h"

namespace pycomm {

namespace {

// Of memory that peers reach, for tensors of comm.empty(device=...).
constexpr size_t kHeapBytes = size_t{64} << 20;

PeerOptions peer_options() {
  PeerOptions o;
#if defined(PYCOMM_CUDA_EMULATED)  // where each CUDA thread is a fiber
  o.half_bytes = 256 << 10;
  o.max_blocks = 2;
  o.n_threads = 32;
  o.one_shot_bytes = 8 << 10;
#endif
  return o;
}

Status heap_bytes(size_t* out) {
  *out = kHeapBytes;
  const char* const text = std::getenv("PYCOMM_DEVICE_ARENA");
  if (text == nullptr || *text == 0) return Status();
  char* rest = nullptr;
  const unsigned long long n = std::strtoull(text, &rest, 10);
  if (*rest == 0 && text[0] >= '0' && text[0] <= '9') {
    *out = n;
    return Status();
  }
  return Status::error(Code::kValue, format("PYCOMM_DEVICE_ARENA must be a number of bytes, got '%s'", text));
}

// What a rank says of itself when the communicator first meets a device.
struct Facts {
  uint64_t heap_bytes = 0;
  int device = 0;
  int nccl_version = 0;  // 0: none
  bool good = false;
  bool shares_device = false;  // NCCL_MULTI_RANK_GPU_ENABLE is on
  DeviceId id;
  char boot_id[40] = {};  // of the machine's start: GPUs of copied virtual machines may be called alike
  char pci[24] = {};      // for people, as is the host's name
  char host[40] = {};
  char why[1000] = {};  // with the remedy, which comes last
};

Status gather_facts(int device, Facts* mine) {
  const DeviceGuard guard(device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  PYCOMM_RETURN_IF_ERROR(
      cuda_status(cudaDeviceGetPCIBusId(mine->pci, sizeof mine->pci, device), "cudaDeviceGetPCIBusId"));
  PYCOMM_RETURN_IF_ERROR(device_id(device, &mine->id));
  std::ifstream("/proc/sys/kernel/random/boot_id").read(mine->boot_id, sizeof mine->boot_id - 1);
  size_t n = 0;
  PYCOMM_RETURN_IF_ERROR(heap_bytes(&n));
  mine->heap_bytes = n;
  return Status();
}

template <size_t N>
void keep_text(const std::string& text, char (&out)[N]) {
  const size_t n = utf8_prefix(text, N - 1);
  std::memcpy(out, text.data(), n);
  out[n] = 0;
}

}  // namespace

const char* DeviceEngine::why_not_built() { return nullptr; }
int DeviceEngine::device_count() { return cuda::device_count(); }
bool DeviceEngine::is_emulated() {
#if defined(PYCOMM_CUDA_EMULATED)
  return true;
#else
  return false;
#endif
}
DeviceEngine::DeviceEngine() : impl_(std::make_unique<Impl>()) {}

nccl::Patience DeviceEngine::Impl::patience(double timeout_s) {
  return {timeout_s, [this] {
            PYCOMM_RETURN_IF_ERROR(failure->get());
            PYCOMM_RETURN_IF_ERROR(link.trouble());
            return link.poll();
          }};
}

// Peers' memory, where all ranks are on one host and reach each other; why_no_peers says why there is none.
Status DeviceEngine::Impl::make_peers() {
  if (!link.one_host) {
    why_no_peers = "peers' memory is of ranks on one host";
    return Status();
  }
  if (link.n_ranks > cuda::kMaxPeers) {
    why_no_peers =
        format("peers' memory serves at most %d ranks, here are %d", cuda::kMaxPeers, link.n_ranks);
    return Status();
  }
  size_t n_heap = 0;
  PYCOMM_RETURN_IF_ERROR(heap_bytes(&n_heap));
  PeerOptions options = peer_options();
  options.timeout_s = 0;  // calls say how long they may take
  options.describe = link.describe;
  options.trouble = link.trouble;
  Status s = PeerMemory::create(
      {device, link.rank, link.n_ranks, PeerCollectives::reserved_bytes(options.half_bytes),
       PeerCollectives::zero_bytes(), n_heap, link.node, link.node_ranks},
      link.exchange, &memory);
  if (s.ok()) s = PeerCollectives::create(memory.get(), options, link.exchange, &peers);
  PYCOMM_RETURN_IF_ERROR(link.trouble());
  if (!s.ok()) {
    why_no_peers = "the GPUs' memory is not shared: " + s.message();
    peers.reset();
    PeerMemory::retire(std::move(memory));
    return Status();
  }
  arena = std::make_shared<cuda::DeviceArena>(memory, context, n_heap);
  return Status();
}

Status DeviceEngine::Impl::make_nccl(double timeout_s) {
  nccl::UniqueId id{};
  if (link.rank == 0) PYCOMM_RETURN_IF_ERROR(nccl::NcclComm::make_id(&id));
  std::vector<nccl::UniqueId> ids(static_cast<size_t>(link.n_ranks));
  PYCOMM_RETURN_IF_ERROR(link.exchange(&id, sizeof id, ids.data()).within("the id of NCCL's communicator"));
  return nccl::NcclComm::init(ids[0], link.n_ranks, link.rank, device, patience(timeout_s), &comm);
}

// The first rank's trouble, if any has some; its text is the log's affair there.
Status DeviceEngine::Impl::all_good(Status mine) {
  const uint8_t good = mine.ok() ? 1 : 0;
  std::vector<uint8_t> all(static_cast<size_t>(link.n_ranks));
  PYCOMM_RETURN_IF_ERROR(link.exchange(&good, sizeof good, all.data()));
  PYCOMM_RETURN_IF_ERROR(std::move(mine));
  const auto bad = std::find(all.begin(), all.end(), 0);
  if (bad == all.end()) return Status();
  return Status::error(Code::kSystem,
                       link.describe(static_cast<int>(bad - all.begin())) + " could not, and says why");
}

// By ncclCommShrink, from the communicator before; `comm` stays as it was where that does not do.
Status DeviceEngine::Impl::inherit_nccl(double timeout_s) {
  constexpr double kLongest_s = 10;  // the other way must be left some time
  const std::shared_ptr<DeviceHeritage> from = std::exchange(link.heritage, nullptr);
  nccl::NcclComm made;
  Status mine;
  if (from == nullptr) {
    mine = Status::error(Code::kSystem, "there is none to shrink here");
  } else if (from->comm.device() != device ||
             from->comm.n_ranks() - static_cast<int>(from->excluded.size()) != link.n_ranks) {
    mine = Status::error(Code::kSystem, "the device or the ranks are others");
  }
  PYCOMM_RETURN_IF_ERROR(all_good(std::move(mine)));
  mine = from->comm.shrink(from->excluded, true, patience(std::min(timeout_s / 2, kLongest_s)), &made);
  PYCOMM_RETURN_IF_ERROR(all_good(std::move(mine)));
  if (made.rank() != link.rank) return Status::error(Code::kSystem, "NCCL has numbered the ranks otherwise");
  comm = std::move(made);
  const std::lock_guard lock(history_mutex);
  history += "; by ncclCommShrink";
  return Status();
}

Status DeviceEngine::Impl::need_nccl(double timeout_s) {
  if (comm.valid()) return Status();
  if (link.was_shrunk) {
    const Status s = inherit_nccl(timeout_s);
    PYCOMM_RETURN_IF_ERROR(link.trouble());
    if (!s.ok())
      log_line(LogLevel::kInfo, format("rank %d makes NCCL's communicator anew after shrink(): %s", link.rank,
                                       s.message().c_str()));
  }
  if (!comm.valid()) PYCOMM_RETURN_IF_ERROR(make_nccl(timeout_s));
  has_comm.store(true, std::memory_order_release);
  rounds = std::make_unique<cuda::NcclRounds>(comm, context->streams());
  return Status();
}

Status DeviceEngine::create(int device, Link link, std::unique_ptr<DeviceEngine>* out) {
  std::unique_ptr<DeviceEngine> made(new DeviceEngine);
  Impl& d = *made->impl_;
  d.link = std::move(link);
  d.device = device;
  d.failure->tell = [&d](const Status& why) {
    d.link.fail(why);
    if (d.peers != nullptr) d.peers->abort(why.clone());
  };

  Facts mine;
  mine.device = device;
  Status own = cuda::DeviceContext::get(device, &d.context);
  if (own.ok()) own = gather_facts(device, &mine);
  const nccl::Library* library = nullptr;
  const Status found = nccl::open(&library);
  if (found.ok()) mine.nccl_version = library->version;
  const char* const several = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  mine.shares_device =
      several != nullptr && std::strcmp(several, "1") == 0 && mine.nccl_version >= nccl::kSharedGpuVersion;
  mine.good = own.ok();
  keep_text(own.ok() ? found.message() : own.message(), mine.why);
  gethostname(mine.host, sizeof mine.host - 1);

  const auto n = static_cast<size_t>(d.link.n_ranks);
  std::vector<Facts> all(n);
  PYCOMM_RETURN_IF_ERROR(d.link.exchange(&mine, sizeof mine, all.data()));
  for (size_t q = 0; q < n; q++) {
    const auto who = d.link.describe(static_cast<int>(q));
    if (!all[q].good) return Status::error(Code::kSystem, who + ": " + all[q].why);
    if (all[q].heap_bytes != all[0].heap_bytes) {
      return Status::error(Code::kMismatch,
                           format("PYCOMM_DEVICE_ARENA is %llu on rank 0, %llu on %s",
                                  static_cast<unsigned long long>(all[0].heap_bytes),
                                  static_cast<unsigned long long>(all[q].heap_bytes), who.c_str()));
    }
    if (!d.why_no_nccl.empty()) continue;
    if (all[q].nccl_version == 0)
      d.why_no_nccl = format("NCCL is not usable on %s: %s", who.c_str(), all[q].why);
    for (size_t p = 0; p < q && d.why_no_nccl.empty(); p++) {
      const bool same = all[p].id == all[q].id && std::strcmp(all[p].boot_id, all[q].boot_id) == 0;
      if (!same || (all[q].shares_device && all[p].shares_device)) continue;
      d.why_no_nccl = format(
          "ranks %zu and %zu are both on GPU %s of %s, and NCCL takes one rank a GPU (give "
          "each a GPU of its own: torch.cuda.set_device; NCCL 2.30 and newer take several with "
          "NCCL_MULTI_RANK_GPU_ENABLE=1)",
          p, q, all[p].pci, all[p].host);
    }
  }
  d.has_nccl = d.why_no_nccl.empty();
  d.nccl_text = d.has_nccl ? format("NCCL %s, %s (%s)", nccl::version_text(library->version).c_str(),
                                    library->path.c_str(), library->how.c_str())
                           : d.why_no_nccl;
  PYCOMM_RETURN_IF_ERROR(d.make_peers());
  *out = std::move(made);
  return Status();
}

// Peers may still reach this rank's memory, and nobody waits for them here: it is freed later (PeerMemory).
DeviceEngine::~DeviceEngine() {
  Impl& d = *impl_;
  if (d.context == nullptr) return;
  const DeviceGuard guard(d.device);
  const bool has_ended = d.await_end();  // the watch ends what would not end
  d.end();
  if (Status s = failure(); !s.ok()) d.fail(s);  // of a replay: the others shall know
  d.failure->forget_engine();
  if (!has_ended) {
    d.keep();
  } else if (d.has_captured && d.peers != nullptr) {
    PeerCollectives::keep(std::move(d.peers));  // a graph that is left would touch it
  }
  d.peers.reset();
  if (has_ended && d.arena != nullptr) d.arena->end();
  PeerMemory::retire(std::move(d.memory));
  if (!has_ended) return;
  if (d.comm.valid() && !d.comm_is_revoked) (void)d.comm.finalize({nccl::NcclComm::kAbortTimeout_s, {}});
}

int DeviceEngine::device() const { return impl_->device; }

void DeviceEngine::abort(const Status& why) { impl_->fail(why); }

std::shared_ptr<DeviceHeritage> DeviceEngine::bequeath(std::vector<int> excluded) {
  Impl& d = *impl_;
  d.end_nccl();
  const auto lock = d.lock_comm();
  if (!lock.owns_lock() || !d.comm_is_revoked || d.failure->get().ok()) return nullptr;
  d.comm_is_revoked = false;
  d.has_comm = false;
  return std::make_shared<DeviceHeritage>(DeviceHeritage{std::move(d.comm), std::move(excluded)});
}

bool DeviceEngine::is_idle() const { return impl_->failure->failed.load() || !impl_->is_busy(); }

Status DeviceEngine::failure() const {
  PYCOMM_RETURN_IF_ERROR(impl_->failure->get());
  return impl_->peers != nullptr ? impl_->peers->failure() : Status();  // before the watch has seen it
}

Status DeviceEngine::allocate(size_t n_bytes, void* stream, CallerHooks* hooks,
                              std::unique_ptr<DeviceBlock>* out) {
  if (impl_->arena == nullptr) return Status::error(Code::kSystem, impl_->why_no_peers);
  PYCOMM_RETURN_IF_ERROR(
      impl_->arena->allocate(n_bytes, static_cast<cuda::Stream>(stream), hooks, out)
          .within("memory on CUDA (PYCOMM_DEVICE_ARENA says how many bytes each rank has)"));
  // It may have been a call's that has just given up, and is not in quarantine yet: a late peer writes there.
  Status s = failure();
  if (!s.ok()) out->reset();
  return s;
}

std::string DeviceEngine::describe() const {
  Impl& d = *impl_;
  const char* const peers = d.peers == nullptr   ? d.why_no_peers.c_str()
                            : !d.peers->pushes() ? "yes"
                                                 : "yes, written to and not read, since PCIe is between GPUs";
  const std::lock_guard lock(d.history_mutex);
  return format("CUDA device %d\npeers' memory: %s\nNCCL: %s%s", d.device, peers, d.nccl_text.c_str(),
                d.history.c_str());
}

}  // namespace pycomm
