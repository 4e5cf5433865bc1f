// The memory probe: how fast could the machine do it, if a collective were nothing but its memory traffic?
//
// Every rank makes one *segment* (a memfd, the kind of page that the arena is made of, first touched by its
// owner) and maps the segments of its peers. A *move* reads n_elems floats from some places, adds them, and
// writes the sum to some places; a *plan* is the moves of one rank (its shard of an all-reduce: read all
// buffers, write all buffers). `run` does the plan's moves, then one exchange of flags by spinning. It knows
// no dtype but float32, no agreement check, no staging, and it shares no code with the engine, so that
// measured time / probe time is an honest figure. The start line is the caller's: `exchange` before the clock
// is read. Offsets and sizes in bytes, from the first data byte of a segment (its first page holds the flag).
//
// Threads: one thread per process uses a Probe. A rank that does not arrive is a timeout error, not a hang.
// Cost of `run` for an in-place all-reduce of B bytes on n ranks: each rank reads and writes B bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"

namespace pycomm {

struct ProbePlace {
  int rank;         // whose segment
  uint64_t offset;  // bytes, a multiple of 4
};

struct ProbeMove {
  std::vector<const float*> src;
  std::vector<float*> dst;
  size_t n_elems;
};

using ProbePlan = std::vector<ProbeMove>;

class Probe {
 public:
  static constexpr int kMaxRanks = 64;

  // Makes this rank's segment of n_bytes data bytes, all of them touched (zero).
  static Status create(int rank, int n_ranks, uint64_t n_bytes, std::unique_ptr<Probe>* out);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // The memfd of this rank's segment; it is closed with the Probe.
  int fd() const { return fd_; }
  uint64_t n_bytes() const { return n_bytes_; }
  char* data() { return base_[static_cast<size_t>(rank_)] + kDataOffset; }

  // Maps a peer's segment; the descriptor stays the caller's.
  Status attach(int peer, int fd);
  // Checks ranks, ranges and alignment once, so that run need not.
  Status add_move(ProbePlan* plan, const std::vector<ProbePlace>& src, const std::vector<ProbePlace>& dst,
                  uint64_t n_elems);
  Status run(const ProbePlan& plan);
  // Returns when every rank has called it as often as this one.
  Status exchange();
  void set_timeout(double seconds) { timeout_s_ = seconds; }

 private:
  static constexpr uint64_t kDataOffset = 4096;

  Probe(int rank, int n_ranks, uint64_t n_bytes);
  Status address(const ProbePlace& place, uint64_t n_elems, float** out);
  Status wait_for(int peer);

  int rank_;
  int n_ranks_;
  uint64_t n_bytes_;
  int fd_ = -1;
  int n_polls_;            // before yielding: few when there are more ranks than cores
  uint64_t sequence_ = 0;  // of exchanges
  double timeout_s_ = 60.0;
  std::vector<char*> base_;  // per rank, null until attached
};

}  // namespace pycomm
