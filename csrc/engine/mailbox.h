// The mailbox of one rank: which recv gets which message (engine/p2p.h).
//
// A *posted* recv has found no message yet; an *arrival* is a message of which at least the first cell has
// come. Each arrival goes to the first posted recv that asked for its source and tag, each recv to the first
// arrival that fits: both lists are in order, so messages of one (source, tag) keep theirs, and a recv from
// any source takes what came first. An arrival that nobody has asked for is kept in memory of its own; one
// that found its recv at the first cell goes straight to the recv's tensor, unless the sizes differ.
//
// Nothing here touches shared memory or waits. Not thread-safe (PointToPoint's mutex guards it).
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <vector>

#include "engine/pipes.h"
#include "engine/work.h"

namespace pycomm {

struct Posted {
  int peer;  // -1: any source
  int tag;
  DType dtype;
  std::byte* data;
  size_t n_bytes;
  double deadline_s;
  std::shared_ptr<Work> work;

  bool wants(int from, int with_tag) const { return (peer < 0 || peer == from) && tag == with_tag; }
};

struct Arrival {
  int from = 0;
  int tag = 0;
  DType dtype = DType::kUInt8;
  size_t n_bytes = 0;
  size_t have = 0;
  std::byte* data = nullptr;  // the recv's tensor, or `own`
  std::unique_ptr<std::byte[]> own;
  bool matched = false;
  Posted posted{};  // when matched

  bool whole() const { return have == n_bytes; }
  // Gives a whole, matched message to its recv. kMismatch when that expected another size or type.
  Status deliver(int rank) const;
};

class Mailbox {
 public:
  explicit Mailbox(int n_ranks) : arriving_(static_cast<size_t>(n_ranks)) {}

  // The arrival that serves this recv, matched to it; null: none has come, and the recv was posted.
  std::shared_ptr<Arrival> take(const Posted& recv);
  // Adds the next cell from a rank; returns the message when that was its last cell. Throws bad_alloc when
  // there is no memory for a message that nobody has asked for yet.
  std::shared_ptr<Arrival> add(int from, const CellHeader& header, const std::byte* data);
  // Calls fn(Posted, source or -1) for every recv that still waits, posted ones first, until one fails.
  template <class Fn>
  Status for_each_pending(Fn fn) const {
    for (const Posted& p : posted_) PYCOMM_RETURN_IF_ERROR(fn(p, p.peer));
    for (const auto& a : arriving_) {
      if (a != nullptr && a->matched) PYCOMM_RETURN_IF_ERROR(fn(a->posted, a->from));
    }
    return Status();
  }
  // Ends all recvs that still wait.
  void fail_all(const Status& status);

 private:
  void begin(int from, const CellHeader& header);

  std::list<Posted> posted_;
  std::list<std::shared_ptr<Arrival>> unexpected_;  // in order of arrival, over all sources
  std::vector<std::shared_ptr<Arrival>> arriving_;  // from each rank
};

}  // namespace pycomm
