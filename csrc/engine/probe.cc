// The memory probe: segments, the spin exchange, and the loops that set the limit (see probe.h).
//
// The loops are plain C++ over 64-byte vectors of the compiler's own, compiled for AVX-512, AVX2 and the
// baseline and chosen by the loader; elsewhere (arm64, sanitizers) the one portable clone is used. Few
// sources and destinations get a body of their own so that the loop over ranks costs nothing in cache.
#include "engine/probe.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PYCOMM_PROBE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PYCOMM_PROBE_CLONES
#endif

namespace pycomm {

namespace {

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
constexpr size_t kVecElems = sizeof(Vec) / sizeof(float);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Two vectors a turn; kSrc or kDst = 0 means "as many as n_src, n_dst say".
template <int kSrc, int kDst>
__attribute__((always_inline)) inline void sum_loop(float* const* dst, size_t n_dst, const float* const* src,
                                                    size_t n_src, size_t n) {
  const size_t ns = kSrc ? kSrc : n_src, nd = kDst ? kDst : n_dst;
  size_t i = 0;
  for (; i + 2 * kVecElems <= n; i += 2 * kVecElems) {
    const float* p = src[0] + i;
    Vec a = *reinterpret_cast<const Vec*>(p), b = *reinterpret_cast<const Vec*>(p + kVecElems);
    for (size_t q = 1; q < ns; ++q) {
      p = src[q] + i;
      a += *reinterpret_cast<const Vec*>(p);
      b += *reinterpret_cast<const Vec*>(p + kVecElems);
    }
    for (size_t q = 0; q < nd; ++q) {
      *reinterpret_cast<Vec*>(dst[q] + i) = a;
      *reinterpret_cast<Vec*>(dst[q] + i + kVecElems) = b;
    }
  }
  for (; i < n; ++i) {
    float a = src[0][i];
    for (size_t q = 1; q < ns; ++q) a += src[q][i];
    for (size_t q = 0; q < nd; ++q) dst[q][i] = a;
  }
}

PYCOMM_PROBE_CLONES void sum(float* const* dst, size_t n_dst, const float* const* src, size_t n_src,
                             size_t n) {
  if (n_src == 2 && n_dst == 1) return sum_loop<2, 1>(dst, n_dst, src, n_src, n);
  if (n_src == 2 && n_dst == 2) return sum_loop<2, 2>(dst, n_dst, src, n_src, n);
  if (n_src == 4 && n_dst == 1) return sum_loop<4, 1>(dst, n_dst, src, n_src, n);
  if (n_src == 4 && n_dst == 4) return sum_loop<4, 4>(dst, n_dst, src, n_src, n);
  sum_loop<0, 0>(dst, n_dst, src, n_src, n);
}

std::atomic<uint64_t>* flag_of(char* base) { return reinterpret_cast<std::atomic<uint64_t>*>(base); }

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Probe::Probe(int rank, int n_ranks, uint64_t n_bytes)
    : rank_(rank), n_ranks_(n_ranks), n_bytes_(n_bytes), base_(static_cast<size_t>(n_ranks), nullptr) {
  n_polls_ = static_cast<unsigned>(n_ranks) <= std::thread::hardware_concurrency() ? 20000 : 20;
}

Probe::~Probe() {
  for (char* base : base_)
    if (base) munmap(base, kDataOffset + n_bytes_);
  if (fd_ >= 0) close(fd_);
}

Status Probe::create(int rank, int n_ranks, uint64_t n_bytes, std::unique_ptr<Probe>* out) {
  if (n_ranks < 1 || n_ranks > kMaxRanks || rank < 0 || rank >= n_ranks)
    return Status::error(
        Code::kValue,
        format("probe: rank %d of %d ranks; expected 0 <= rank < n_ranks <= %d", rank, n_ranks, kMaxRanks));
  std::unique_ptr<Probe> probe(new Probe(rank, n_ranks, n_bytes));
  probe->fd_ = memfd_create("pycomm-probe", MFD_CLOEXEC);
  if (probe->fd_ < 0) return Status::from_errno("probe: memfd_create", errno);
  // posix_fallocate so that a memory limit is an error here, not SIGBUS in the middle of a measurement.
  int err = posix_fallocate(probe->fd_, 0, static_cast<off_t>(kDataOffset + n_bytes));
  if (err)
    return Status::from_errno(format("probe: no room for %llu bytes of shared memory",
                                     static_cast<unsigned long long>(kDataOffset + n_bytes)),
                              err);
  PYCOMM_RETURN_IF_ERROR(probe->attach(rank, probe->fd_));
  memset(probe->data(), 0, n_bytes);
  *out = std::move(probe);
  return {};
}

Status Probe::attach(int peer, int fd) {
  if (peer < 0 || peer >= n_ranks_ || base_[static_cast<size_t>(peer)])
    return Status::error(
        Code::kValue, format("probe: attach(%d): expected a rank below %d, attached once", peer, n_ranks_));
  struct stat st;
  if (fstat(fd, &st)) return Status::from_errno(format("probe: segment of rank %d", peer), errno);
  if (static_cast<uint64_t>(st.st_size) != kDataOffset + n_bytes_)
    return Status::error(
        Code::kValue,
        format("probe: segment of rank %d has %lld bytes, expected %llu (one size for all)", peer,
               static_cast<long long>(st.st_size), static_cast<unsigned long long>(kDataOffset + n_bytes_)));
  void* base = mmap(nullptr, kDataOffset + n_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return Status::from_errno(format("probe: mapping rank %d", peer), errno);
  base_[static_cast<size_t>(peer)] = static_cast<char*>(base);
  return {};
}

Status Probe::address(const ProbePlace& place, uint64_t n_elems, float** out) {
  if (place.rank < 0 || place.rank >= n_ranks_ || !base_[static_cast<size_t>(place.rank)])
    return Status::error(Code::kValue, format("probe: rank %d is not attached", place.rank));
  if (place.offset % sizeof(float) || place.offset > n_bytes_ ||
      n_elems > (n_bytes_ - place.offset) / sizeof(float))
    return Status::error(Code::kValue, format("probe: %llu floats at byte %llu leave a segment of %llu bytes",
                                              static_cast<unsigned long long>(n_elems),
                                              static_cast<unsigned long long>(place.offset),
                                              static_cast<unsigned long long>(n_bytes_)));
  *out = reinterpret_cast<float*>(base_[static_cast<size_t>(place.rank)] + kDataOffset + place.offset);
  return {};
}

Status Probe::add_move(ProbePlan* plan, const std::vector<ProbePlace>& src,
                       const std::vector<ProbePlace>& dst, uint64_t n_elems) {
  if (src.empty() || dst.empty())
    return Status::error(Code::kValue, "probe: a move needs at least one source and one destination");
  ProbeMove move{{}, {}, static_cast<size_t>(n_elems)};
  float* address_of = nullptr;
  for (const ProbePlace& place : src) {
    PYCOMM_RETURN_IF_ERROR(address(place, n_elems, &address_of));
    move.src.push_back(address_of);
  }
  for (const ProbePlace& place : dst) {
    PYCOMM_RETURN_IF_ERROR(address(place, n_elems, &address_of));
    move.dst.push_back(address_of);
  }
  plan->push_back(std::move(move));
  return {};
}

Status Probe::run(const ProbePlan& plan) {
  for (const ProbeMove& move : plan) {
    if (move.src.size() == 1 && move.dst.size() == 1)
      memcpy(move.dst[0], move.src[0], move.n_elems * sizeof(float));
    else
      sum(move.dst.data(), move.dst.size(), move.src.data(), move.src.size(), move.n_elems);
  }
  return exchange();
}

Status Probe::exchange() {
  ++sequence_;
  flag_of(base_[static_cast<size_t>(rank_)])->store(sequence_, std::memory_order_release);
  for (int peer = 0; peer < n_ranks_; ++peer)
    if (peer != rank_) PYCOMM_RETURN_IF_ERROR(wait_for(peer));
  return {};
}

Status Probe::wait_for(int peer) {
  if (!base_[static_cast<size_t>(peer)])
    return Status::error(Code::kValue, format("probe: rank %d is not attached", peer));
  const std::atomic<uint64_t>* flag = flag_of(base_[static_cast<size_t>(peer)]);
  for (int i = 0; i < n_polls_; ++i) {
    if (flag->load(std::memory_order_acquire) >= sequence_) return {};
    relax();
  }
  const double deadline_s = now_s() + timeout_s_;
  while (flag->load(std::memory_order_acquire) < sequence_) {
    if (now_s() > deadline_s)
      return Status::error(Code::kTimeout,
                           format("probe: rank %d did not arrive at exchange %llu in %.3g s", peer,
                                  static_cast<unsigned long long>(sequence_), timeout_s_));
    sched_yield();
  }
  return {};
}

}  // namespace pycomm
