// Device memory that the ranks of one machine map into each other's address space.
//
// Memory comes in *segments*, each of one cudaMalloc (so that it has an IPC handle, which memory of torch's
// expandable segments has not), of the same size on all ranks. Segment 0 begins with n_reserved bytes, zero
// at first, for the owner of the PeerMemory (flags, staging); the rest of it and further segments are a heap.
// `place` of a pointer (segment << 56 | offset) means the same memory in every process. Allocating is a
// rank's own affair: no order and no sizes have to agree.
//
// create, grow, settle and close are collective: they speak through an Exchange, which the caller provides,
// and they give the same success on every rank; an error names the rank that had it. Handles are opened once,
// threads of one process use each other's pointers. Every rank checks that its GPU reaches those of its peers
// that it sees; where a job shows each rank its own GPU only, opening their handles shows it.
//
// Memory that peers may still write into is never given back: after quarantine() blocks that are released
// stay unused until settle(), by which every rank that is alive has said that its kernels have ended; what
// was not closed in agreement is leaked on purpose, until the process ends. Thread-safe, except create and
// close.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"

namespace pycomm {

// All-gather among the ranks, in rank order: `all` has n_ranks * n_bytes. Between ranks that are alive; an
// error means that agreement was not possible.
using Exchange = std::function<Status(const void* mine, size_t n_bytes, void* all)>;

class PeerMemory {
 public:
  static constexpr int kMaxSegments = 8;
  static constexpr size_t kAlignment = 256;  // of allocations

  struct Options {
    int device = 0;
    int rank = 0;
    int n_ranks = 1;
    size_t n_reserved_bytes = 0;
    size_t n_zero_bytes = 0;  // at the start of what is reserved
    size_t n_heap_bytes = 0;
  };
  static Status create(const Options& options, const Exchange& exchange, std::unique_ptr<PeerMemory>* out);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int device() const { return options_.device; }
  int rank() const { return options_.rank; }
  int n_ranks() const { return options_.n_ranks; }
  // Some GPU that this process sees is reached over PCIe: writes go better there than reads.
  bool is_over_pcie() const { return over_pcie_; }
  // Where a rank's segment is mapped here; null: there is none.
  char* base(int rank, int segment) const;
  void bases(char* (*of_rank)[kMaxSegments]) const;  // of all of them

  // One more segment of at least that many bytes. kValue on all ranks when there are kMaxSegments.
  Status grow(size_t n_bytes, const Exchange& exchange);
  // kSystem when no segment has room: grow(), or use ordinary memory.
  Status allocate(size_t n_bytes, void** p);
  Status release(void* p);
  // False when the bytes are not all inside one of this rank's segments, behind what is reserved.
  bool find(const void* p, size_t n_bytes, uint64_t* place) const;
  size_t n_bytes_in_use() const;

  // Peers may still write into any block that is in use now.
  void quarantine();
  // To be called when this rank's own streams have passed everything that touches peers' memory. OK: all
  // ranks that are alive have come here, and the blocks released meanwhile are free again.
  Status settle(const Exchange& exchange);
  // As settle; then peers' handles are closed, and this rank's memory is given back when its last block is
  // released. Without it, or when it fails, the memory stays until the process ends.
  Status close(const Exchange& exchange);
  static size_t n_bytes_leaked();  // of this process

 private:
  struct Segment {
    size_t n_bytes = 0;
    std::vector<char*> bases;  // of each rank
    std::vector<bool> opened;  // by cudaIpcOpenMemHandle
  };
  struct Block {
    size_t n_bytes;
    bool held;  // released while in quarantine
  };
  explicit PeerMemory(const Options& options) : options_(options) {}
  Status add_segment(size_t n_bytes, size_t first_free, const Exchange& exchange);
  Status agree(Status mine, const char* what, const Exchange& exchange) const;
  void free_block(uint64_t place, size_t n_bytes);
  void free_segments();

  Options options_;
  std::vector<Segment> segments_;
  mutable std::mutex mutex_;
  std::map<uint64_t, size_t> free_;  // place -> bytes, no two adjacent
  std::map<uint64_t, Block> used_;
  bool quarantined_ = false;
  bool closed_ = false;
  bool over_pcie_ = false;
};

}  // namespace pycomm
