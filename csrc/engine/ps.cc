#include "engine/ps.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

#include "engine/call.h"
#include "engine/control.h"
#include "engine/group.h"

namespace pycomm {

namespace {
constexpr size_t kHeadBytes = offsetof(Control, slots);

// The control block's part without the slots, as it is in this moment.
struct alignas(alignof(Control)) Copy {
  std::byte bytes[kHeadBytes];
  const Control& control() const { return *reinterpret_cast<const Control*>(bytes); }
};

bool copy_block(int fd, uint64_t offset, Copy* out) {
  const uint64_t at = (offset + alignof(Control) - 1) / alignof(Control) * alignof(Control);
  return pread(fd, out->bytes, kHeadBytes, static_cast<off_t>(at)) == static_cast<ssize_t>(kHeadBytes);
}

std::string text_of(const char* text, size_t room) { return std::string(text, strnlen(text, room)); }

uint64_t load(const std::atomic<uint64_t>& word) { return word.load(std::memory_order_relaxed); }

int rank_of(uint64_t word) {
  const auto rank = static_cast<uint32_t>(word);
  return rank == Shown::kAnybody ? -1 : static_cast<int>(rank);
}

double since_s(uint64_t ns) { return std::max(0.0, monotonic_s() - 1e-9 * static_cast<double>(ns)); }

PsRow row_of(const Control& c) {
  const Identity& id = c.identity;
  PsRow r;
  r.pid = id.pid;
  r.job = text_of(id.job, sizeof id.job);
  r.label = text_of(id.label, sizeof id.label);
  r.host = text_of(id.host, sizeof id.host);
  r.job_rank = id.job_rank;
  r.rank = id.rank;
  r.size = id.size;
  r.failed = load(c.state.word) == static_cast<uint64_t>(RankState::kFailed);
  if (r.failed) r.why = text_of(c.failure + 1, sizeof c.failure - 1);
  const uint64_t call = load(c.shown.call), kind = call >> 32 & 255;
  r.inside = (call & Shown::kInside) != 0;
  r.number = static_cast<uint32_t>(call);
  if (r.number != 0 && kind <= static_cast<uint64_t>(CallKind::kRefused))
    r.call = call_kind_name(static_cast<CallKind>(kind));
  const uint64_t waits = load(c.shown.waits_for), transfer = load(c.shown.transfer);
  if (r.inside && waits != 0) {
    r.waits_for = rank_of(waits);
    r.waited_s = since_s(load(c.shown.waits_since_ns));
  }
  if (transfer != 0) {
    r.transfer = (transfer & Shown::kSends) != 0 ? "send" : "recv";
    r.transfer_peer = rank_of(transfer);
    r.transfer_s = since_s(load(c.shown.transfer_since_ns));
  }
  return r;
}
}  // namespace

Status read_arena(const std::string& path, std::vector<PsRow>* out) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Status::from_errno("open " + path, errno);
  const auto first = std::make_unique<Copy>(), block = std::make_unique<Copy>();
  if (copy_block(fd, 0, first.get())) {
    for (const std::atomic<uint64_t>& listed : first->control().listing.blocks) {
      const uint64_t offset = load(listed);
      if (offset == 0 || offset > (uint64_t{1} << 46) || !copy_block(fd, offset - 1, block.get())) continue;
      if (load(block->control().identity.set) == Identity::kSet) out->push_back(row_of(block->control()));
    }
  }
  ::close(fd);
  return Status();
}

}  // namespace pycomm
