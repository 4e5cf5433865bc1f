// A rank's shared memory: one memfd that its peers on the same machine map too.
//
// The whole reserve (PYCOMM_ARENA_MAX bytes of address space) is mapped once and the file grows under it, so
// an *offset* from the base names a place in every process, and growing needs no message. Growth is
// fallocate'd: too little memory is an error here, not a SIGBUS later. The file is sealed against shrinking,
// has no name in any file system, and vanishes with the last process that holds it.
//
// Blocks are aligned to 128 bytes; freed blocks are merged and used again, because the first touch of a fresh
// page costs more than several all-reduces of it. Thread-safe. Peers attach with `attach`; threads of one
// process that attach the same memfd share one mapping (so that TSAN sees their races).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/status.h"

namespace pycomm {

class Arena {
 public:
  static Status create(std::shared_ptr<Arena>* out);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int fd() const { return fd_; }
  std::byte* base() const { return base_; }
  size_t reserved() const { return reserved_; }

  Status allocate(size_t n_bytes, uint64_t* offset);
  void release(uint64_t offset);
  // The block that holds `p` is never used again, even when released: a peer may still write into it.
  void quarantine(const void* p);
  bool owns(const void* p) const {
    return static_cast<size_t>(static_cast<const std::byte*>(p) - base_) < reserved_;
  }
  uint64_t offset_of(const void* p) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(p) - base_);
  }
  size_t bytes_in_use() const;
  // Called in a forked child: the descriptor must not keep the memory alive there.
  void close_descriptor();

 private:
  Arena() = default;
  Status grow(size_t n_bytes);

  int fd_ = -1;
  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
  mutable std::mutex mutex_;
  size_t size_ = 0;                  // bytes of the file
  std::map<uint64_t, size_t> free_;  // offset -> bytes, no two adjacent
  std::map<uint64_t, size_t> used_;
  std::set<uint64_t> quarantined_;  // offsets of used blocks
};

// A peer's arena mapped into this process.
class PeerArena {
 public:
  // Takes the descriptor (closes it). `reserved` is what the owner mapped.
  static Status attach(int fd, size_t reserved, std::shared_ptr<PeerArena>* out);
  ~PeerArena();
  std::byte* base() const { return base_; }

 private:
  PeerArena() = default;
  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
  std::shared_ptr<Arena> owner_;  // set when the owner is a thread of this process: its mapping is used
};

}  // namespace pycomm
