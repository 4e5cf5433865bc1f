#include "transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace pycomm {

namespace {
constexpr size_t kAlign = 128;
constexpr size_t kGrowStep = size_t{2} << 20;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Address space only; twice the machine's memory leaves room for fragmentation.
Status reserve_bytes(size_t* out) {
  struct sysinfo info;
  sysinfo(&info);
  *out = round_up(static_cast<size_t>(info.totalram) * info.mem_unit * 2, kGrowStep);
  if (const char* text = std::getenv("PYCOMM_ARENA_MAX")) {
    char* end = nullptr;
    const unsigned long long n = std::strtoull(text, &end, 10);
    if (end == text || *end != '\0' || n < kGrowStep) {
      return Status::error(
          Code::kValue,
          format("PYCOMM_ARENA_MAX must be a number of bytes of at least %zu, got '%s'", kGrowStep, text));
    }
    *out = round_up(n, kGrowStep);
  }
  return Status();
}

// Arenas of this process by inode, so that thread-ranks share one mapping of each.
std::mutex registry_mutex;
std::map<ino_t, std::weak_ptr<Arena>>& registry() {
  static auto* r = new std::map<ino_t, std::weak_ptr<Arena>>;
  return *r;
}
ino_t inode_of(int fd) {
  struct stat st;
  return fstat(fd, &st) == 0 ? st.st_ino : 0;
}
}  // namespace

Status Arena::create(std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> a(new Arena);
  PYCOMM_RETURN_IF_ERROR(reserve_bytes(&a->reserved_));
  a->fd_ = memfd_create("pycomm-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (a->fd_ < 0) return Status::from_errno("shared arena: memfd_create", errno);
  if (fcntl(a->fd_, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
    return Status::from_errno("shared arena: F_SEAL_SHRINK", errno);
  void* p = mmap(nullptr, a->reserved_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a->fd_, 0);
  if (p == MAP_FAILED) {
    return Status::from_errno(
        format("shared arena: mapping %zu bytes of address space (lower PYCOMM_ARENA_MAX?)", a->reserved_),
        errno);
  }
  a->base_ = static_cast<std::byte*>(p);
  {
    std::lock_guard lock(registry_mutex);
    std::erase_if(registry(), [](const auto& e) { return e.second.expired(); });
    registry()[inode_of(a->fd_)] = a;
  }
  *out = std::move(a);
  return Status();
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, reserved_);
  if (fd_ >= 0) ::close(fd_);
}

void Arena::close_descriptor() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Status Arena::grow(size_t n_bytes) {
  const size_t step = round_up(n_bytes, kGrowStep);
  if (size_ + step > reserved_) {
    return Status::error(Code::kSystem,
                         format("shared arena: %zu bytes wanted, %zu in use, the limit is %zu: raise "
                                "PYCOMM_ARENA_MAX or free arena tensors",
                                n_bytes, size_, reserved_));
  }
  int err;
  do {
    err = posix_fallocate(fd_, static_cast<off_t>(size_), static_cast<off_t>(step));
  } while (err == EINTR);
  if (err != 0) {
    return Status::from_errno(
        format(
            "shared arena: no memory for %zu more bytes (%zu in use; see ulimit -f and vm.overcommit_memory)",
            step, size_),
        err);
  }
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  if (last != free_.end() && last->first + last->second == size_) {
    last->second += step;
  } else {
    free_[size_] = step;
  }
  size_ += step;
  return Status();
}

Status Arena::allocate(size_t n_bytes, uint64_t* offset) {
  const size_t need = round_up(std::max<size_t>(n_bytes, 1), kAlign);
  std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second >= need && (best == free_.end() || it->second < best->second)) best = it;
  }
  if (best == free_.end()) {
    size_t tail = 0;
    if (!free_.empty()) {
      const auto last = std::prev(free_.end());
      if (last->first + last->second == size_) tail = last->second;
    }
    PYCOMM_RETURN_IF_ERROR(grow(need - tail));
    best = std::prev(free_.end());
  }
  *offset = best->first;
  const size_t left = best->second - need;
  free_.erase(best);
  if (left > 0) free_[*offset + need] = left;
  used_[*offset] = need;
  return Status();
}

void Arena::release(uint64_t offset) {
  std::lock_guard lock(mutex_);
  const auto it = used_.find(offset);
  if (it == used_.end() || quarantined_.contains(offset)) return;
  auto freed = free_.emplace(offset, it->second).first;
  used_.erase(it);
  const auto next = std::next(freed);
  if (next != free_.end() && freed->first + freed->second == next->first) {
    freed->second += next->second;
    free_.erase(next);
  }
  if (freed != free_.begin()) {
    const auto prev = std::prev(freed);
    if (prev->first + prev->second == freed->first) {
      prev->second += freed->second;
      free_.erase(freed);
    }
  }
}

void Arena::quarantine(const void* p) {
  if (!owns(p)) return;
  const uint64_t at = offset_of(p);
  std::lock_guard lock(mutex_);
  const auto next = used_.upper_bound(at);
  if (next == used_.begin()) return;
  const auto block = std::prev(next);
  if (at < block->first + block->second) quarantined_.insert(block->first);
}

size_t Arena::bytes_in_use() const {
  std::lock_guard lock(mutex_);
  size_t n = 0;
  for (const auto& [offset, bytes] : used_) n += bytes;
  return n;
}

Status PeerArena::attach(int fd, size_t reserved, std::shared_ptr<PeerArena>* out) {
  std::shared_ptr<PeerArena> a(new PeerArena);
  a->reserved_ = reserved;
  {
    std::lock_guard lock(registry_mutex);
    const auto it = registry().find(inode_of(fd));
    if (it != registry().end()) a->owner_ = it->second.lock();
    if (a->owner_ != nullptr) a->base_ = a->owner_->base();
  }
  if (a->base_ == nullptr) {
    void* p = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    const int err = errno;
    if (p == MAP_FAILED) {
      ::close(fd);
      return Status::from_errno(
          format("mapping a peer's shared arena of %zu bytes (lower PYCOMM_ARENA_MAX?)", reserved), err);
    }
    a->base_ = static_cast<std::byte*>(p);
  }
  ::close(fd);
  *out = std::move(a);
  return Status();
}

PeerArena::~PeerArena() {
  if (owner_ == nullptr && base_ != nullptr) munmap(base_, reserved_);
}

}  // namespace pycomm
