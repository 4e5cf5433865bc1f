// The ranks of one job on one machine: their arenas, their processes, and how they found each other.
//
// `join` is the rendezvous: every rank listens on a unix socket <folder>/<rank>.sock in a folder of mode 0700
// that belongs to this user, connects to all lower ranks, accepts all higher ones, checks the peer's user
// with SO_PEERCRED, and swaps a Hello and the descriptor of its arena. The sockets are unlinked when all are
// connected. A peer's death is seen through a pidfd, or where its pid is not visible here (another PID
// namespace) through the hang-up of its socket. Set-up is n-1 short exchanges per rank.
//
// Forked children: our descriptors are closed there (transport/fork.h), and `forked()` is true.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/arena.h"
#include "transport/fork.h"

namespace pycomm {

class Node final : public Forkable {
 public:
  // Blocks until all `size` ranks have joined or timeout_s has passed (the error names who is missing).
  // `poll` is called about every 100 ms (Ctrl-C). The first `first_block` bytes of every arena are allocated
  // and zero before any peer can see it.
  static Status join(const std::string& folder, int rank, int size, size_t first_block, double timeout_s,
                     Status (*poll)(), std::shared_ptr<Node>* out);
  ~Node() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const std::string& host() const { return host_; }
  std::byte* base(int rank) const { return peers_[rank].base; }
  // Keeps a peer's arena mapped; null for our own.
  std::shared_ptr<PeerArena> mapping(int rank) const;
  int64_t pid(int rank) const { return peers_[rank].pid; }
  bool alive(int rank) const;
  // "sleeping", "stopped", "running", … from /proc, or "dead", or "unknown".
  const char* process_state(int rank) const;
  bool forked() const { return fork_generation_ != fork_generation(); }
  // Lets go of a peer that is dead: its descriptors now, its arena with the last mapping() that is held.
  void forget(int rank);

  // Two allocations of our arena (0: none) that are free when `count`, which lies in the first one, has
  // reached `until`: a dead peer never counts, so they then go with the arena. free_retired() frees what it
  // can.
  void retire(std::array<uint64_t, 2> offsets, const std::atomic<uint64_t>& count, uint64_t until);
  void free_retired();

 private:
  struct Peer {
    std::byte* base = nullptr;
    int64_t pid = 0;  // 0: not visible in this PID namespace
    int pidfd = -1;
    int socket = -1;
    std::shared_ptr<PeerArena> arena;
    bool forgotten = false;
    bool met = false;
    std::string trouble;  // why it cannot join
  };
  struct Offer {  // what a rank says of itself when it joins
    size_t reserved = 0;
    std::string trouble;
  };
  Node() = default;
  void lock_for_fork() override { peers_mutex_.lock(); }
  void unlock_after_fork() override { peers_mutex_.unlock(); }
  void close_in_child() override;
  Status make_arena(size_t first_block);
  Status trouble() const;
  Status exchange(const std::string& folder, double timeout_s, Status (*poll)());
  Status greet(int socket, int* peer_rank, int* fd, Offer* offer) const;
  Status adopt(int peer_rank, int socket, int fd, Offer offer);

  int rank_ = 0;
  int size_ = 1;
  uint64_t fork_generation_ = 0;
  std::string host_;
  std::shared_ptr<Arena> arena_;
  mutable std::mutex peers_mutex_;  // of what forget() takes away
  std::vector<Peer> peers_;
  struct Retired {
    std::array<uint64_t, 2> offsets;
    const std::atomic<uint64_t>* count;
    uint64_t until;
  };
  std::mutex retired_mutex_;
  std::vector<Retired> retired_;
};

// Makes `folder` with mode 0700, or checks that it exists, is a folder of ours and closed to others.
Status make_run_folder(const std::string& folder);

}  // namespace pycomm
