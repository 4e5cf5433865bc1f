// What a peer does, for whoever waits for it: told by itself or, when it is stopped, by others of its host.
//
// An *answer* is words of the process that was asked, about a rank of its own host (Sink::state), and counts
// for kFreshS. Without one the kernel's word is left: the host acknowledges (then the process is stopped or
// hung, and nobody else of the job is there), or it does not (then host or link is gone, or about to come
// back).
//
// With the Net's mutex. Bounded: a peer is asked about once a second, by three messages at most, and gets at
// most kMaxAnswers answers a second; an answer that nobody asked for is dropped.
#include <algorithm>

#include "transport/tcp/net.h"

namespace pycomm {

namespace {
constexpr double kAskS = 1;
constexpr double kFreshS = 3;
constexpr double kPatienceS = 0.5;
constexpr double kSilentS = 2;  // before that a lost packet may be the reason
constexpr int kMaxAnswers = 64;
constexpr int kMaxWitnesses = 2;
constexpr size_t kMaxState = 400;  // bytes
}  // namespace

void Net::set_hosts(std::vector<int> host_of) {
  std::lock_guard l(mutex_);
  host_of_ = std::move(host_of);
}

void Net::ask(int peer, uint64_t group, uint32_t call) {
  Peer& about = peers_[static_cast<size_t>(peer)];
  const double t_s = clock_s();
  Said& said = about.said[group];
  if (!about.lost.ok() || t_s - said.asked_at_s < kAskS) return;
  if (t_s - said.asked_at_s > kFreshS) said.asking_since_s = t_s;
  said.asked_at_s = t_s;
  MessageHeader h;
  h.kind = static_cast<uint8_t>(NetKind::kAsk);
  h.count = group;
  h.call = call;
  h.extra = static_cast<uint32_t>(peer);
  send_copy(peer, 0, h, nullptr);
  int n_witnesses = 0;
  for (size_t q = 0; q < host_of_.size() && n_witnesses < kMaxWitnesses; q++) {
    if (static_cast<int>(q) == peer || host_of_[q] != host_of_[static_cast<size_t>(peer)] ||
        !peers_[q].lost.ok())
      continue;
    send_copy(static_cast<int>(q), 0, h, nullptr);
    n_witnesses++;
  }
}

void Net::answer(int peer, const MessageHeader& question) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  const double t_s = clock_s();
  if (t_s - p.answers_since_s > 1) {
    p.answers_since_s = t_s;
    p.n_answers = 0;
  }
  if (++p.n_answers > kMaxAnswers || question.extra >= peers_.size()) return;
  const auto about = static_cast<int>(question.extra);
  const auto sink = sinks_.find(question.count);
  std::string text = sink == sinks_.end() ? "" : sink->second->state(about, question.call);
  // This process may not be of that group.
  for (auto it = sinks_.begin(); text.empty() && it != sinks_.end(); ++it) text = it->second->state(about, 0);
  if (text.empty()) return;
  MessageHeader h = question;
  h.kind = static_cast<uint8_t>(NetKind::kState);
  h.n_bytes = utf8_prefix(text, kMaxState);
  send_copy(peer, 0, h, text.data());
}

void Net::note_state(int witness, const MessageHeader& h, std::string text) {
  if (h.extra >= peers_.size() || host_of_.size() != peers_.size()) return;
  Peer& about = peers_[h.extra];
  const bool same_host = host_of_[h.extra] == host_of_[static_cast<size_t>(witness)];
  const auto asked = about.said.find(h.count);
  if (!same_host || asked == about.said.end()) return;
  asked->second.text = std::move(text);
  asked->second.at_s = clock_s();
}

std::string Net::state(int peer, uint64_t group) const {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  const auto said = p.said.find(group);
  if (said != p.said.end() && clock_s() - said->second.at_s < kFreshS) return ", which " + said->second.text;
  if (p.silent_s >= kSilentS) {
    const double silent_s = p.silent_s + clock_s() - p.beat_at_s;  // the first is as of the last beat
    return format(", whose host has not answered for %.1f s (error at %g s)", silent_s, options_.heartbeat_s);
  }
  if (said == p.said.end() || clock_s() - said->second.asking_since_s < kPatienceS) return "";
  return ", which is stopped or hung (the kernel of its host answers, no process of the job there does)";
}

}  // namespace pycomm
