// What a communicator's ranks on other hosts say to this one: messages that find their receive, and failures.
//
// Every message of a collective has a *key*: the call's number, its run and tile (engine/rounds.h), the
// number of the message among those, and the sender. A receive is *expected* under that key and ends with a
// function; a message that comes before it is kept. Messages of calls that are over are dropped.
//
// Agreement: each message bears the signature of its call; one that differs from ours fails the communicator
// on both sides (kMismatch), with both texts. A rank whose own call was invalid tells its peers (kRefused).
// A message that no receive of its call wanted shows that the calls differed, too; and who has waited for
// kProbeS sends its signature to those whom it waits for, since these may be waiting for it. They answer when
// they are in the call: then they are not to blame for its being late, and whoever waits for the one that is
// says so first.
// A large call waits, before it sends to a peer, until that peer has *opened* it: has entered the call.
// So nobody keeps much for others.
//
// Who waits for a peer has *greeted* it: there is a connection whose end tells that the peer has gone, and
// the peer answers when it has left the communicator.
//
// Guarded by the Net's mutex, as all of a Sink. Ranks are the communicator's.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "engine/call.h"
#include "engine/group.h"
#include "transport/tcp/net.h"

namespace pycomm {

enum class RemoteKind : uint8_t { kData, kOpen, kRefuse, kFail, kGreet };

class Remote final : public Sink {
 public:
  struct Key {
    uint32_t call, run, tile, index;
    int from;
    auto operator<=>(const Key&) const = default;
  };
  static constexpr double kProbeS = 0.2;
  // On the peer's host somebody may be waiting for the rank that is to blame, and names it at its deadline.
  static constexpr double kGraceS = 0.5;
  static constexpr uint16_t kAsks = 1;  // in the flags of kGreet
  // What is kept of calls that this rank has not made yet; more of them, and the communicator fails. Only
  // what is small is sent so early, so this is thousands of calls.
  static constexpr size_t kMaxAheadBytes = size_t{1} << 30;
  static constexpr size_t kMaxRefusal = 1000, kMaxFailure = 4000;  // bytes of text
  // Where a message's payload is: at its landing, or in memory that the receiver may keep.
  using Then = std::function<void(const std::byte* data)>;

  // `job_ranks`: of each rank of the communicator. `group`: the local ranks' (engine/group.h).
  Remote(std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks, int rank, Group& group);
  ~Remote() override;
  // Leaves the communicator, and tells why it has failed, if it has; `why` is for peers that still wait.
  void leave(const std::string& why);
  // Tells the peers why the communicator has failed, without waiting for the next tick.
  void tell_now();

  Net& net() { return *net_; }
  uint64_t id() const { return id_; }
  int rank() const { return rank_; }
  const std::string& name(int q) const;

  // ---- with the Net's lock ----
  // From here on the messages of this call count, and those of earlier ones do not.
  void begin(uint32_t call, const Signature& sig);
  // The call is over, well or (refused, failed) badly: nothing of its memory is read or written from here on.
  void end(bool well);
  void expect(const Key& key, std::byte* landing, size_t n_bytes, Then then);
  // Tiles take the first n_sockets connections to the peer in turn (0: all).
  void send(int to, const Key& key, const std::byte* data, size_t n_bytes, std::function<void()> left,
            int n_sockets = 0);
  void open(int to);
  bool has_opened(int from) const { return opened_.contains({call_, from}); }
  // Calls `then` once the peer has opened the call; at once when it has.
  void when_opened(int from, std::function<void()> then);
  // A peer's size is not what we expect of it.
  void differ(int from, uint64_t theirs, uint64_t ours);
  // Waits until `done`, or something ends the call, or nothing has come or left for timeout_s and kGraceS.
  Status wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, CallerHooks* hooks,
              double timeout_s, const std::string& here);
  void refuse(uint32_t call, const std::string& why);
  void tell_failure(const Status& status);
  // What ends this call: a failure, a refusal, a peer that is gone.
  Status trouble() const;
  // A rank of another host that is lost, whether something is expected of it or not; one that has left in
  // good order is none. Takes the lock.
  Status lost_rank(const std::string& here) const;

  std::byte* landing(int peer, const MessageHeader& header) override;
  void arrived(int peer, const MessageHeader& header, std::byte* data,
               std::unique_ptr<std::byte[]> own) override;
  void sent(uint64_t token) override;
  void lost(int peer, const Status& why) override;
  void left(int peer, const std::string& why) override;
  void tick() override;
  std::string state(int peer, uint32_t call) override;

 private:
  struct Expected {
    std::byte* landing;
    size_t n_bytes;
    Then then;
    bool is_landing = false;  // a message is being received there
  };
  struct Kept {
    MessageHeader header;
    std::unique_ptr<std::byte[]> own;
  };
  struct Leaving {
    int to;
    std::function<void()> then;
  };
  class Waiting;
  std::string described(int q) const;  // with what is known of what it does

  int rank_of(int peer) const;
  MessageHeader header(RemoteKind kind) const;
  bool agrees(int from, const MessageHeader& header);
  bool needs(int q) const;  // something is expected of it, or to leave for it
  void greet(int to);
  void probe();
  void answer(int to);
  bool all_needed_entered() const;
  void send_failure(const Status& status, const std::function<bool(int)>& to);
  void compare(int from, const MessageHeader& header);
  void unwanted(int from, const MessageHeader& header);
  void take(int from, const MessageHeader& header, const std::byte* data);
  bool may_keep(int from, const MessageHeader& header);
  int awaited() const;  // a rank that something is expected of, -1: none

  std::shared_ptr<Net> net_;
  uint64_t id_;
  std::vector<int> job_ranks_;
  std::map<int, int> ranks_;  // by job rank
  int rank_;
  Group& group_;
  std::vector<bool> is_here_;  // the rank is on this host

  uint32_t call_ = 0;
  bool active_ = false;
  Signature sig_;
  Status verdict_;  // of this call: refused, or why the communicator failed
  std::map<Key, Expected> expected_;
  std::map<Key, Kept> kept_;
  std::map<uint32_t, size_t> ahead_;                          // bytes kept, by call that has not begun
  size_t n_ahead_bytes_ = 0;                                  // their sum
  std::map<std::pair<uint32_t, int>, MessageHeader> opened_;  // by call and rank
  std::map<std::pair<uint32_t, int>, MessageHeader> probes_;  // of calls that we have not entered
  std::vector<bool> greeted_;                                 // by rank
  std::vector<bool> probed_, entered_;                        // in this call, by rank
  std::array<Signature, 16> history_;                         // of the latest calls
  std::multimap<int, std::function<void()>> blocked_;
  std::map<uint32_t, std::pair<int, std::string>> refused_;  // by call: who, why
  std::set<uint32_t> not_well_;                              // calls that were refused
  std::map<uint64_t, Leaving> leaving_;                      // by token
  uint64_t next_token_ = 1;
  struct Gone {
    std::string why;
    bool left;  // in good order
  };
  std::map<int, Gone> gone_;  // by rank
  bool told_ = false;         // the peers know why the communicator has failed
  bool heard_ = false;        // from one of them
  double began_at_s_ = 0;     // the call
  double moved_at_s_ = 0;     // when something came or left last
};

}  // namespace pycomm
