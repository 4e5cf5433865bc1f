// The messages of this process to and from the processes of its job on other hosts.
//
// A *peer* is a process, by its rank in the job. Connections are made when the first message needs them, and
// each carries data one way (transport/tcp/sender.h, receiver.h); a pair may have several, its *lanes*:
// messages of one lane keep their order. Each *group* (a communicator) has a Sink here, which takes what
// comes; what comes for a group that does not exist yet on this process waits for it.
//
// Progress: whoever waits drives the loop himself (`wait`), so that a reply needs no switch of threads; while
// nobody waits, a background thread does. One mutex guards everything, sinks included; it is not held while
// the loop sleeps.
//
// Faults: a peer whose connection breaks is *lost*, once and for all, for every group. A process that ends in
// good order says goodbye first. An unreachable host is noticed by the kernel (TCP_USER_TIMEOUT), for which
// something must be under way: hence a beat on every quiet connection each kBeatS.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport/fork.h"
#include "transport/futex.h"
#include "transport/tcp/listener.h"
#include "transport/tcp/receiver.h"
#include "transport/tcp/sender.h"

namespace pycomm {

struct NetOptions {
  int rank = 0;
  int size = 1;
  Address at;       // of this host: where to listen, and to connect from; its port does not count
  PortRange ports;  // where to listen
  int n_lanes = 1;  // connections from a process to a peer, at most
  bool encrypt = false;
  ZeroCopy::Mode zero_copy = ZeroCopy::Mode::kAuto;
  std::string job;            // its name: run id, restart count, and which of the process's groups
  std::string settings_text;  // what must be the same in all processes, as a person writes it
  std::string host;
  double connect_timeout_s = 10;
  double heartbeat_s = 10;  // a host that acknowledges nothing for so long is gone
};

class Net final : public Forkable {
 public:
  static constexpr double kBeatS = 1.0;

  static Status create(NetOptions options, Secret secret, std::shared_ptr<Net>* out);
  ~Net() override;  // says goodbye, and waits a little for what is queued
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  const Address& address() const { return address_; }
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  int n_lanes() const { return options_.n_lanes; }
  // Of all processes, before the first message. `names`: "rank 3 (host b, pid 811)".
  void set_peers(std::vector<Address> addresses, std::vector<std::string> names);
  const std::string& name(int peer) const { return peers_[static_cast<size_t>(peer)].name; }
  // Which processes are on one host, so that one can tell of another.
  void set_hosts(std::vector<int> host_of);

  // ---- with the lock ----
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  void attach(uint64_t group, Sink* sink);
  // Nothing more comes to this sink, nothing of its memory is read or written. The peers that have talked
  // with this process are told that it has left the group, and later ones when they write to it.
  void detach(uint64_t group, const std::string& why);
  // Drops what the sink has under way; the group goes on.
  void forget(Sink* sink);
  // Queues a message, and sends what the socket takes. `data` stays the caller's until sink->sent(token).
  void send(int peer, int lane, const MessageHeader& header, const std::byte* data, Sink* sink,
            uint64_t token);
  // The same with a copy: the memory is the caller's at once.
  void send_copy(int peer, int lane, const MessageHeader& header, const void* data, Sink* sink = nullptr,
                 uint64_t token = 0);
  // Whether one of the two has connected to the other.
  bool connected(int peer) const;
  const Status& lost(int peer) const { return peers_[static_cast<size_t>(peer)].lost; }

  // Who waits for this peer asks what it does; at most once a second that is sent, to it and to others of its
  // host: it may be stopped, and they see that.
  void ask(int peer, uint64_t group, uint32_t call);
  // What is known of it since, in words that follow its name: ", which is stopped (SIGSTOP)".
  std::string state(int peer, uint64_t group) const;
  // For how long its host has acknowledged nothing; 0: it does.
  double silent_s(int peer) const { return peers_[static_cast<size_t>(peer)].silent_s; }

  // Drives the loop until `ready`, which is called with the lock. `check`, without the lock, every slice of
  // 100 ms: what may end the wait early; `before_block` once, before the first sleep.
  Status wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready, WaitClient& client);

  // Whether something for this peer is still here, or never left; the kernel's own does not count.
  bool holds_back(int peer) const;
  // Waits, for so long at most, until the kernel has no more use for any memory that was sent without a copy.
  void await_acknowledged(std::unique_lock<std::mutex>& lock, double limit_s);

  // "3 foreign connections: …", or nothing.
  std::string strangers() const;
  uint64_t bytes_sent() const;
  bool forked() const { return fork_generation_ != fork_generation(); }

 private:
  struct Left {
    uint32_t n_sent;  // to us, before it left
    std::string why;
  };
  struct Said {
    std::string text;
    double at_s = 0;  // 0: nobody has said anything yet
    double asked_at_s = 0, asking_since_s = 0;
  };
  struct Peer {
    Address address;
    std::string name;
    std::vector<Sender> lanes;
    Status lost;
    Status differs;  // why its first connection to us was turned away, where it and we do not fit together
    // Nothing can be sent to it any more; but what it has sent may still be on its way, and counts.
    Status broken;
    double broken_at_s = 0;
    double heard_at_s = 0;  // when something of it was read last
    bool said_goodbye = false;
    double beat_at_s = 0;
    double silent_s = 0;
    double answers_since_s = 0;                       // to it
    int n_answers = 0;                                // since then
    std::map<uint64_t, Said> said;                    // of it, by group
    std::map<uint64_t, uint32_t> n_sent, n_received;  // messages, by group
    std::map<uint64_t, Left> left;                    // groups that it has left, not told to the sink yet
    std::set<uint64_t> told;                          // groups that it knows that we have left
  };
  struct Early {  // came before its group
    int peer;
    MessageHeader header;
    std::unique_ptr<std::byte[]> own;
  };
  class Waiting;  // takes what has no group yet
  class Own;      // takes what is for the Net itself (loss.cc)

  Net() = default;
  void serve();
  void turn(std::unique_lock<std::mutex>& lock, int timeout_ms);
  void accept_all();
  void pump(Receiver* receiver);
  void pump(int peer, int lane);
  void queue(int peer, int lane, Outgoing message);
  void open(int peer, int lane);
  void watch(int fd, uint64_t what);
  void lose(int peer, Status why);
  void cannot_send(int peer, Status why);
  void hung_up(int peer, int lane);
  void answer(int peer, const MessageHeader& question);
  void note_state(int witness, const MessageHeader& header, std::string text);
  Status admit(const Receiver& fresh, int peer, uint32_t lane) const;
  std::unique_ptr<Sink> make_own();
  void say_goodbye(std::unique_lock<std::mutex>& lock);
  bool receives_from(int peer) const;
  void tell_left(int peer, uint64_t group, const std::string& why);
  void look_at_peers(double now_s);
  void end(Receiver* receiver, const Status& why);
  void note_difference(const Receiver& receiver, const Status& why);
  void tick();
  void beat(double now_s);
  Terms terms() const;
  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork() override { mutex_.unlock(); }
  void close_in_child() override;

  NetOptions options_;
  Secret secret_;
  uint64_t fork_generation_ = 0;
  std::unique_ptr<Listener> listener_;
  Address address_;
  int epoll_fd_ = -1;
  int kick_fd_ = -1;
  std::mutex mutex_;
  std::condition_variable cv_;
  std::vector<Peer> peers_;
  std::vector<int> host_of_;
  std::map<uint64_t, std::unique_ptr<Receiver>> receivers_;  // by number
  uint64_t next_receiver_ = 0;
  std::set<uint64_t> again_;  // receivers that have more to read
  std::map<uint64_t, Sink*> sinks_;
  std::set<uint64_t> closed_;  // groups that were here
  std::map<uint64_t, std::list<Early>> early_;
  std::unique_ptr<Waiting> waiting_;
  std::unique_ptr<Sink> own_;
  bool driving_ = false;     // somebody is in the loop
  bool background_ = false;  // it is the thread
  int callers_ = 0;
  double left_at_s_ = 0;  // when the last caller left
  double ticked_s_ = 0;
  int polls_ = 0;
  bool accept_again_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pycomm
