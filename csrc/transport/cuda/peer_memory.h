// Device memory that the ranks of one machine map into each other's address space.
//
// Each rank's is one cudaMalloc (so that it has an IPC handle, which memory of torch's expandable segments
// has not), of the same size on all ranks. It begins with n_reserved_bytes, the first n_zero_bytes of them
// zero at first, for the owner of the PeerMemory (flags, staging); the rest is a heap. The *place* of a
// pointer, its offset, means the same memory in every process. Allocating is a rank's own affair: no order
// and no sizes have to agree.
//
// create is collective: it speaks through an Exchange, which the caller provides, and it gives the same
// success on every rank; an error names the rank that had it. Handles are opened once, threads of one process
// use each other's pointers. Every rank checks that its GPU reaches those of its peers that it sees; where a
// job shows each rank its own GPU only, opening their handles shows it.
//
// The end (peer_retired.cc). Memory that a peer may still write into is never given back, nor is any while a
// peer has it mapped. When a communicator closes, its memory is *retired*, which waits for nobody and makes
// no call of CUDA: what unmaps memory may wait for the whole device, and so for kernels that wait for peers.
// In the next create on that device, which calls cudaMalloc anyway, the rank *lets go* of what it has
// retired: it closes its peers' handles, and tells each peer so by a word in that peer's arena on the host
// (of the Node, which stays until then). Then the ranks meet, and each frees what every peer has let go of,
// or has died with, and where no block is in use. So of communicators of the same ranks, one after another,
// two wait to be freed at most; ranks that make no other one keep what they, and their peers, have. A rank
// whose kernels may still run, or will in a graph, never lets go, nor does one that a failure kept from
// hearing of its peers' memory.
//
// Thread-safe, except create.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "transport/node.h"

namespace pycomm {

// All-gather among the ranks, in rank order: `all` has n_ranks * n_bytes. Between ranks that are alive; an
// error means that agreement was not possible.
using Exchange = std::function<Status(const void* mine, size_t n_bytes, void* all)>;

class PeerMemory {
 public:
  static constexpr size_t kAlignment = 256;  // of allocations

  struct Options {
    int device = 0;
    int rank = 0;
    int n_ranks = 1;
    size_t n_reserved_bytes = 0;
    size_t n_zero_bytes = 0;  // at the start of what is reserved
    size_t n_heap_bytes = 0;
    std::shared_ptr<Node> node;   // null: this rank is the only one
    std::vector<int> node_ranks;  // of each rank
  };
  static Status create(const Options& options, const Exchange& exchange, std::shared_ptr<PeerMemory>* out);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int device() const { return options_.device; }
  int rank() const { return options_.rank; }
  int n_ranks() const { return options_.n_ranks; }
  // Some GPU that this process sees is reached over PCIe: writes go better there than reads.
  bool is_over_pcie() const { return over_pcie_; }
  // Where a rank's memory is mapped here.
  char* base(int rank) const { return peers_[static_cast<size_t>(rank)].base; }

  // kSystem when there is no room: use ordinary memory.
  Status allocate(size_t n_bytes, void** p);
  Status release(void* p);
  // False when the bytes are not all inside this rank's memory, behind what is reserved.
  bool find(const void* p, size_t n_bytes, uint64_t* place) const;
  size_t n_bytes_in_use() const;
  size_t n_bytes_free() const;
  // Peers may still write into any block that is in use now: none of them is used again.
  void quarantine();

  // A graph may be replayed that touches the memory, this rank's and its peers': all of it stays until the
  // process ends.
  void keep() { kept_.store(true, std::memory_order_release); }
  // What is on the device does not end, and so would nothing that waits for it: all memory of this process
  // there stays, and what it has mapped.
  static void abandon(int device);
  // Pinned memory of its user's, to be freed with this: freeing it may wait for the device, too.
  void free_with(void* pinned) { pinned_ = pinned; }
  // Nothing but the blocks in use is needed any more, and this rank's kernels have ended, or it was kept or
  // its device abandoned.
  static void retire(std::shared_ptr<PeerMemory> memory);
  // Lets go of what was retired on the device, and frees what can be. May wait for the device.
  static void free_retired(int device);

 private:
  using LetGo = std::atomic<uint32_t>;  // in the owner's arena, one of each rank: not 0 once that has let go
  struct Peer {
    char* base = nullptr;
    bool opened = false;                // by cudaIpcOpenMemHandle
    LetGo* let_go = nullptr;            // mine, in its arena; null: not known, or done
    std::shared_ptr<PeerArena> mapped;  // that arena
  };
  struct Offer;
  explicit PeerMemory(const Options& options)
      : options_(options), peers_(static_cast<size_t>(options.n_ranks)) {}
  Status make(Offer* offer);
  Status open(const Offer& offer, Peer* peer);
  Status map(const std::vector<Offer>& offers);
  Status make_and_map(const Exchange& exchange);
  Status agree(Status mine, const Exchange& exchange) const;
  void free_block(uint64_t place, size_t n_bytes);
  // peer_retired.cc
  static void let_go_of_retired(int device);
  bool let_go();
  bool all_let_go() const;
  bool free_memory();

  const Options options_;
  std::vector<Peer> peers_;  // of this rank, too; changed by create and when retired
  size_t n_bytes_ = 0;
  bool over_pcie_ = false;
  bool is_told_ = false;           // peers may know of this memory
  LetGo* peers_let_go_ = nullptr;  // in this rank's arena
  uint64_t peers_let_go_offset_ = 0;
  void* pinned_ = nullptr;
  std::atomic<bool> kept_{false};

  mutable std::mutex mutex_;         // of all below
  std::map<uint64_t, size_t> free_;  // place -> bytes, no two adjacent
  std::map<uint64_t, size_t> used_;
  bool quarantined_ = false;
};

}  // namespace pycomm
