// Peers of a Net that beat, leave a group, say goodbye, or are lost.
//
// *Left*: the process has left a group and goes on; the peer that still waits there is told why, after all
// that was sent before has arrived. *Goodbye*: it ends in good order, and its connections end behind that.
// *Broken*: nothing can be sent to it, but what it has sent may still be on its way. *Lost*: it is over;
// every group is told once, with the reason.
//
// With the Net's mutex, by whoever drives its loop. Cost: a beat is one empty message a second on each quiet
// connection.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "transport/tcp/net.h"

namespace pycomm {

namespace {
constexpr double kGoodbyeS = 2;      // for what is queued when a process ends
constexpr double kLastWordsS = 0.5;  // for what a peer has sent, when nothing can be sent to it any more
constexpr size_t kMaxWhy = 1000;     // bytes, of why a peer left
constexpr size_t kMaxLeft = 10000;   // groups that a peer left, and not all of whose messages have come
}  // namespace

class Net::Own final : public Sink {
 public:
  explicit Own(Net& net) : net_(net) {}
  std::byte* landing(int, const MessageHeader&) override { return nullptr; }
  void arrived(int peer, const MessageHeader& h, std::byte* data, std::unique_ptr<std::byte[]>) override {
    std::string text = printable({reinterpret_cast<const char*>(data), h.n_bytes}, kMaxWhy);
    auto& left = net_.peers_[static_cast<size_t>(peer)].left;
    if (h.kind == static_cast<uint8_t>(NetKind::kLeft)) {
      if (left.size() < kMaxLeft || left.contains(h.count)) left[h.count] = {h.extra, std::move(text)};
    } else if (h.kind == static_cast<uint8_t>(NetKind::kAsk)) {
      net_.answer(peer, h);
    } else if (h.kind == static_cast<uint8_t>(NetKind::kState)) {
      net_.note_state(peer, h, std::move(text));
    }
  }
  void sent(uint64_t) override {}
  void lost(int, const Status&) override {}
  void left(int, const std::string&) override {}
  void tick() override {}

 private:
  Net& net_;
};

std::unique_ptr<Sink> Net::make_own() { return std::make_unique<Own>(*this); }

// ---- in good order ---------------------------------------------------------------------------------------

void Net::tell_left(int peer, uint64_t group, const std::string& why) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (!p.told.insert(group).second) return;
  MessageHeader h;
  h.kind = static_cast<uint8_t>(NetKind::kLeft);
  h.count = group;
  h.extra = p.n_sent[group];
  h.n_bytes = utf8_prefix(why, kMaxWhy);
  send_copy(peer, 0, h, why.data());
}

// For what is queued, a little time.
void Net::say_goodbye(std::unique_lock<std::mutex>& l) {
  MessageHeader bye;
  bye.kind = static_cast<uint8_t>(NetKind::kGoodbye);
  for (size_t q = 0; q < peers_.size(); q++) {
    for (size_t lane = 0; lane < peers_[q].lanes.size(); lane++) {
      if (!peers_[q].lanes[lane].idle() && peers_[q].lost.ok())
        send_copy(static_cast<int>(q), static_cast<int>(lane), bye, nullptr);
    }
  }
  const double end_s = clock_s() + kGoodbyeS;
  const auto empty = [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) {
      return !p.lost.ok() || !p.broken.ok() ||
             std::all_of(p.lanes.begin(), p.lanes.end(),
                         [](const Sender& s) { return s.idle() || s.empty(); });
    });
  };
  while (!empty() && clock_s() < end_s) cv_.wait_for(l, std::chrono::milliseconds(10));
}

bool Net::holds_back(int peer) const {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  return !p.lost.ok() || !p.broken.ok() ||
         std::any_of(p.lanes.begin(), p.lanes.end(), [](const Sender& s) { return s.queued(); });
}

void Net::await_acknowledged(std::unique_lock<std::mutex>& l, double limit_s) {
  const double end_s = clock_s() + limit_s;
  const auto done = [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) {
      return std::all_of(p.lanes.begin(), p.lanes.end(), [](const Sender& s) { return s.acknowledged(); });
    });
  };
  while (!done() && clock_s() < end_s) {
    if (driving_)
      cv_.wait_for(l, std::chrono::milliseconds(1));
    else
      turn(l, 1);
  }
}

// ---- not in good order -----------------------------------------------------------------------------------

// Two processes that claim to be the same rank must not have their messages mixed: the first one stays.
Status Net::admit(const Receiver& fresh, int peer, uint32_t lane) const {
  for (const auto& [number, r] : receivers_) {
    if (r->peer() != peer || r->lane() != lane) continue;
    return Status::error(
        Code::kMismatch,
        format("%s at %s says that it is rank %d, connection %u, which %s is already: were two "
               "processes started with the same rank?",
               fresh.who().c_str(), fresh.from().to_string().c_str(), peer, lane,
               r->from().to_string().c_str()));
  }
  return Status();
}

bool Net::connected(int peer) const {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  return !p.lanes.empty() && p.lost.ok() && (!p.lanes[0].idle() || receives_from(peer));
}

bool Net::receives_from(int peer) const {
  return std::any_of(receivers_.begin(), receivers_.end(),
                     [peer](const auto& r) { return r.second->peer() == peer; });
}

// A process that ends closes what it receives on at once, while its last words may still be on their way: its
// connections to us say when it is over, or else the time.
void Net::cannot_send(int peer, Status why) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (!p.lost.ok() || !p.broken.ok()) return;
  if (!receives_from(peer)) return lose(peer, p.differs.ok() ? std::move(why) : p.differs.clone());
  p.broken = std::move(why);
  p.broken_at_s = clock_s();
  for (Sender& s : p.lanes) s.abandon();
}

// Who only sends to a peer learns of its end here, not when it next has something to send.
void Net::hung_up(int peer, int lane) {
  Sender& sender = peers_[static_cast<size_t>(peer)].lanes[static_cast<size_t>(lane)];
  if (!sender.is_open()) return;
  Status s = sender.ended();
  if (!s.ok()) cannot_send(peer, std::move(s));
}

// A process whose settings are others ends when it is told so: that our own connection to it is then refused
// or reset is not the reason.
void Net::note_difference(const Receiver& receiver, const Status& why) {
  const Terms& its = receiver.claims();
  if (its.job != terms().job || its.from_rank >= peers_.size()) return;
  Status& differs = peers_[its.from_rank].differs;
  if (differs.ok()) differs = why.clone();
}

void Net::end(Receiver* receiver, const Status& why) {
  const int peer = receiver->peer();
  if (peer < 0 && !receiver->authenticated() && listener_->note_stranger(receiver->from())) {
    log_line(LogLevel::kWarning, format("rank %d refused a connection: %s (%s)", options_.rank,
                                        why.message().c_str(), listener_->strangers().c_str()));
  } else if (receiver->refused()) {
    log_line(LogLevel::kWarning,
             format("rank %d refused a connection: %s", options_.rank, why.message().c_str()));
  } else if (peer < 0 && why.code() == Code::kMismatch) {
    note_difference(*receiver, why);
  }
  again_.erase(receiver->number);
  receivers_.erase(receiver->number);
  if (peer < 0) return;
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (!p.said_goodbye) return lose(peer, why.clone());
  if (receives_from(peer)) return;  // its other lanes may still have something
  lose(peer, Status::error(Code::kPeerLost, format("%s has ended", p.name.c_str())));
}

void Net::lose(int peer, Status why) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (!p.lost.ok()) return;
  p.lost = std::move(why);
  for (Sender& s : p.lanes) s.abandon();
  for (const auto& [group, last] : p.left) {  // the reason that it gave counts more than that it has ended
    const auto sink = sinks_.find(group);
    if (sink != sinks_.end()) sink->second->left(peer, last.why);
  }
  p.left.clear();
  for (const auto& [group, sink] : sinks_) sink->lost(peer, p.lost);
}

// ---- from time to time -----------------------------------------------------------------------------------

void Net::beat(double now_s) {
  MessageHeader header;
  header.kind = static_cast<uint8_t>(NetKind::kBeat);
  for (size_t q = 0; q < peers_.size(); q++) {
    Peer& p = peers_[q];
    if (!p.lost.ok() || !p.broken.ok() || now_s - p.beat_at_s < kBeatS) continue;
    p.beat_at_s = now_s;
    p.silent_s = 0;
    for (size_t lane = 0; lane < p.lanes.size(); lane++) {
      Sender& s = p.lanes[lane];
      p.silent_s = std::max(p.silent_s, s.look(now_s).silent_s);
      if (s.is_open() && s.empty())
        send_copy(static_cast<int>(q), static_cast<int>(lane), header, nullptr);
      else if (!s.idle())
        pump(static_cast<int>(q), static_cast<int>(lane));  // deadlines of connecting and greeting
    }
  }
}

void Net::look_at_peers(double now_s) {
  for (size_t q = 0; q < peers_.size(); q++) {
    Peer& p = peers_[q];
    const auto peer = static_cast<int>(q);
    // A process that was not given the processor for so long has not read them yet.
    const double quiet_s = now_s - std::max(p.broken_at_s, p.heard_at_s);
    if (p.lost.ok() && !p.broken.ok() && quiet_s > kLastWordsS) lose(peer, p.broken.clone());
    const bool in_message = std::any_of(receivers_.begin(), receivers_.end(), [peer](const auto& r) {
      return r.second->peer() == peer && r.second->in_message();
    });
    for (auto it = p.left.begin(); it != p.left.end() && !in_message;) {
      if (p.n_received[it->first] < it->second.n_sent) {
        ++it;
        continue;
      }
      const auto sink = sinks_.find(it->first);
      if (sink != sinks_.end()) sink->second->left(peer, it->second.why);
      it = p.left.erase(it);
    }
  }
}

}  // namespace pycomm
