// Segment: the memory that the ranks of one communicator share, and the channels in it.
//
// A *channel* is a ring of bytes from one rank to another; head counts bytes written, tail bytes read. There
// are two for each ordered pair (a rank with itself included): collectives and point-to-point do not wait for
// each other. A rank's *bell* is rung whenever something of its has moved; it sleeps on it. The segment is a
// file in shared memory that is named after the unique id, and is unlinked as soon as all ranks have it. The
// ranks of one process share one mapping, so that ThreadSanitizer sees that it is the same memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace loopback {

constexpr size_t kChannelBytes = 16 << 10;
constexpr int kMaxRanks = 64;

enum class Lane : int { kCollective, kPointToPoint };

struct alignas(64) Channel {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) char data[kChannelBytes];
};

struct RankState {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> attached;  // pid and device below are valid
  int pid, device;
};

struct Shared {
  std::atomic<uint32_t> n_attached;
  RankState ranks[kMaxRanks];
  Channel channels[1];  // of (from, to, lane)
};

class Segment {
 public:
  // Maps the segment of that name, or finds this process's mapping of it. Null when the system refuses.
  static std::shared_ptr<Segment> attach(const std::string& name, int n_ranks);
  ~Segment();

  Shared& shared() { return *shared_; }
  int n_ranks() const { return n_ranks_; }
  Channel& channel(int from, int to, Lane lane) {
    return shared_->channels[(from * n_ranks_ + to) * 2 + static_cast<int>(lane)];
  }
  // Waits until ready() or stop(); both are called often. False when stopped.
  bool wait(int rank, const std::function<bool()>& ready, const std::function<bool()>& stop);
  void ring(int rank);
  void ring_all();
  uint32_t bell(int rank) const { return shared_->ranks[rank].bell.load(std::memory_order_acquire); }
  // Sleeps until the bell is no longer at `seen`, or for a millisecond.
  void sleep(int rank, uint32_t seen);
  void unlink() const;

 private:
  Segment(std::string name, Shared* shared, size_t n_bytes, int n_ranks)
      : name_(std::move(name)), shared_(shared), n_bytes_(n_bytes), n_ranks_(n_ranks) {}
  std::string name_;
  Shared* shared_;
  size_t n_bytes_;
  int n_ranks_;
};

}  // namespace loopback
