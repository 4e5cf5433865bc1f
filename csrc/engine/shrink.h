// shrink(): the ranks that are left of a communicator agree who they are, and go on as a new one.
//
// A rank that calls it has *come*. One that died, left the communicator, or cannot be reached is *gone* (for
// good: nobody comes back). The lowest rank that has come proposes those who have, as soon as every rank has
// come, is gone or is excluded, or else when timeout_s is over: whoever has not come by then is left out.
// The next ranks propose when it is slow. A rank has come while it says so: by its `beat` within a host, by
// kHere each kSayS between hosts; no more than kFreshS may have passed since.
//
// Agreement is Paxos': proposers are the ranks, acceptors the *hosts*, whose votes lie in shared memory
// (engine/board.h). A host has as many votes as it had ranks. A quorum is more than half of all votes, or
// half with the host of rank 0. Two quorums have a host in common: two that have more than half between them
// overlap, and two halves both have the host of rank 0. So:
//   One decision. A value that a quorum accepted with ballot b is what every higher ballot proposes: of the
//     quorum that promised it, one host was in the first quorum, and reports b's value or a later one's,
//     which by induction is the same. Views may be as wrong as they like.
//   No split brain. Ranks that cannot reach a quorum's hosts decide nothing, and raise.
//   Termination. Each wait has an end: timeout_s for those who do not come, kAgreeS more for the agreement,
//     in which some proposer is alone after at most a few turns (kTurnS by rank), as far as messages and
//     processes move at all. Otherwise CommTimeoutError, and shrink() may be called again: decisions and
//     votes stay.
// A host all of whose ranks died is a host out of reach: the two look alike. On a single host its vote is the
// only one, so one rank is enough.
//
// A rank that dies between the decision and its first call is in the new communicator, which then fails as
// any would, and may be shrunk again. Who is alive and left out reads the decision, and raises.
//
// Threads: all under the Net's mutex, or where there is none its own. The Sink is there from the start, so a
// rank that has not come (it sleeps, or computes) votes for its host all the same. Cost: n-1 messages of at
// most 1 KiB to each rank, and two round trips.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/board.h"
#include "engine/group.h"
#include "transport/tcp/net.h"

namespace pycomm {

struct Placement;

enum class ShrinkKind : uint8_t { kHere, kPrepare, kPromise, kAccept, kAccepted, kNo, kDecided };

class Shrink final : public Sink {
 public:
  static constexpr int kMaxRanks = static_cast<int>(kShrinkWords) * 64;
  static constexpr double kSayS = 0.5;
  static constexpr double kFreshS = 2.5;
  static constexpr double kTurnS = 0.3;    // by which the next rank waits longer before it proposes, too
  static constexpr double kBallotS = 1.0;  // after which a ballot has come to nothing
  static constexpr double kAgreeS = 10.0;
  static constexpr double kRevokeS = 1.0;

  explicit Shrink(Group& group);
  // Of a communicator of several hosts. `id`: of its messages.
  Shrink(Group& group, const Placement& placement, std::shared_ptr<Net> net, uint64_t id,
         std::vector<int> job_ranks);
  ~Shrink() override;
  void leave(const std::string& why);

  // Blocks until it is decided who goes on. `control`: this rank's block for the new communicator, read when
  // it comes for the first time. `revoke` ends the old communicator for those who still use it: called when
  // kRevokeS have passed.
  Status run(const RankSet& excluded, uint64_t control, double timeout_s, CallerHooks* hooks,
             const std::function<void()>& revoke, RankSet* survivors);
  bool come() const { return own().joined.load() != 0; }
  // Where local rank i of this host has its block for the new communicator.
  uint64_t control_of(int i) const { return group_.control(i).shrink.joined.load(); }

  std::byte* landing(int, const MessageHeader&) override { return nullptr; }
  void arrived(int peer, const MessageHeader& header, std::byte* data,
               std::unique_ptr<std::byte[]> own) override;
  void sent(uint64_t) override {}
  void lost(int peer, const Status& why) override;
  void left(int peer, const std::string& why) override;
  void tick() override {}

 private:
  enum class Phase : uint8_t { kIdle, kPrepare, kAccept };
  struct View {  // what a rank of another host said last
    double at_s = 0;
    RankSet gone, lost, excluded;  // gone: of its host
  };
  struct Beat {
    uint64_t value = 0;
    double at_s = 0;  // when it rose; 0: has not since this rank came
  };
  struct Picture {
    RankSet come, gone, excluded;
    bool all_known = true;
  };

  ShrinkArea& own() const { return group_.own().shrink; }
  bool is_here(int q) const { return host_of_[static_cast<size_t>(q)] == host_; }
  std::unique_lock<std::mutex> lock();
  void detach(const std::string& why);
  Status step(double now_s, bool* done);
  Picture look(double now_s);
  void look_here(double now_s, Picture* picture);
  RankSet candidates(const Picture& picture) const;
  RankSet lost_by(int q) const;
  RankSet gone_here() const;
  bool quorum(const std::vector<bool>& hosts) const;
  Status out_of_reach(const Picture& picture) const;
  Status too_late(const Picture& picture, double waited_s) const;

  void begin_ballot(double now_s);
  void heed(int host, const Board::Answer& answer);  // of the ballot under way
  void accept_all();
  void decide(const RankSet& value);
  void say_here(double now_s);
  void tell(int q, ShrinkKind kind, uint64_t ballot, uint64_t accepted, const std::vector<RankSet>& sets);
  void tell_all(ShrinkKind kind, uint64_t ballot, const std::vector<RankSet>& sets);
  void answer(int q, ShrinkKind yes, uint64_t ballot, const Board::Answer& a);

  Group& group_;
  std::shared_ptr<Net> net_;  // null: all ranks are on this host
  uint64_t id_ = 0;
  int rank_, n_;
  std::vector<int> job_ranks_, host_of_, local_of_;
  std::map<int, int> ranks_;  // by job rank
  std::vector<int> votes_;    // of each host
  int host_ = 0;
  std::mutex mutex_;

  std::map<int, View> views_;  // by rank
  std::vector<Beat> beats_;    // by local rank
  RankSet lost_, left_;        // of other hosts
  bool running_ = false;
  double began_s_ = 0, timeout_s_ = 0, said_s_ = 0;
  std::vector<RankSet> said_;

  Phase phase_ = Phase::kIdle;
  uint64_t ballot_ = 0, highest_round_ = 0;
  uint64_t best_ = 0;  // the highest ballot accepted among the promises
  RankSet value_, proposal_;
  std::vector<bool> yes_;  // hosts
  double ready_s_ = 0, ballot_s_ = 0, next_s_ = 0;
  RankSet decision_;
  bool announced_ = false;
};

}  // namespace pycomm
