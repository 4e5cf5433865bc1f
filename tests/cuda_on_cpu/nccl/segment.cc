#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <map>
#include <mutex>

namespace loopback {

namespace {

struct Mappings {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Segment>> all;
};
Mappings& mappings() {
  static Mappings* const m = new Mappings;
  return *m;
}

void futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

std::shared_ptr<Segment> Segment::attach(const std::string& name, int n_ranks) {
  Mappings& m = mappings();
  const std::lock_guard lock(m.mutex);
  if (auto mine = m.all[name].lock()) return mine;
  const size_t n_channels = static_cast<size_t>(n_ranks) * static_cast<size_t>(n_ranks) * 2;
  const size_t n_bytes = sizeof(Shared) + n_channels * sizeof(Channel);
  const int fd = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  // New pages are zero, and so is every counter in them.
  if (ftruncate(fd, static_cast<off_t>(n_bytes)) != 0) {
    close(fd);
    return nullptr;
  }
  void* at = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return nullptr;
  std::shared_ptr<Segment> made(new Segment(name, static_cast<Shared*>(at), n_bytes, n_ranks));
  m.all[name] = made;
  return made;
}

Segment::~Segment() { munmap(shared_, n_bytes_); }

void Segment::unlink() const { shm_unlink(name_.c_str()); }

void Segment::ring(int rank) {
  std::atomic<uint32_t>& bell = shared_->ranks[rank].bell;
  bell.fetch_add(1, std::memory_order_release);
  futex(&bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void Segment::ring_all() {
  for (int r = 0; r < n_ranks_; r++) ring(r);
}

void Segment::sleep(int rank, uint32_t seen) {
  const timespec timeout{0, 1'000'000};
  futex(&shared_->ranks[rank].bell, FUTEX_WAIT, seen, &timeout);
}

bool Segment::wait(int rank, const std::function<bool()>& ready, const std::function<bool()>& stop) {
  for (;;) {
    const uint32_t seen = bell(rank);
    if (ready()) return true;
    if (stop()) return false;
    sleep(rank, seen);
  }
}

}  // namespace loopback
