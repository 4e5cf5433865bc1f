// What the ranks of a group are in, in words: for errors, for warnings, for a peer on another host that asks.
//
// All of it is read from memory that each rank has written (Shown, and the heads of its calls, control.h) and
// from /proc, so it can be told of a rank that hangs, or is stopped. Threads: any. Cost: a few microseconds,
// when somebody has waited for long.
#include <cstring>

#include "base/log.h"
#include "engine/group.h"

namespace pycomm {

namespace {
uint64_t ns_of(double s) { return static_cast<uint64_t>(1e9 * s); }

uint64_t word_of(int name) {
  return Shown::kInside | (name < 0 ? Shown::kAnybody : static_cast<uint32_t>(name));
}

std::string call_text(uint64_t call) {
  if ((call & ~Shown::kInside) == 0) return "none yet";
  return format("%s #%u", call_kind_name(static_cast<CallKind>(call >> 32 & 255)),
                static_cast<uint32_t>(call));
}

std::string rank_text(uint64_t word) {
  const auto rank = static_cast<uint32_t>(word);
  return rank == Shown::kAnybody ? "any rank" : format("rank %u", rank);
}
}  // namespace

void Group::show_wait(int name, double since_s) {
  Shown& s = own().shown;
  s.waits_since_ns.store(ns_of(since_s), std::memory_order_relaxed);
  s.waits_for.store(word_of(name), std::memory_order_relaxed);
}

void Group::show_transfer(bool is_send, int name, double since_s) {
  Shown& s = own().shown;
  s.transfer_since_ns.store(ns_of(since_s), std::memory_order_relaxed);
  s.transfer.store(word_of(name) | (is_send ? Shown::kSends : 0), std::memory_order_relaxed);
}

void Group::introduce(const std::string& job, const std::string& label, int rank, int size, int job_rank) {
  Identity& id = own().identity;
  const auto copy = [](char* to, size_t room, const std::string& text) {
    const size_t n = utf8_prefix(text, room - 1);
    std::memcpy(to, text.data(), n);
    to[n] = 0;
  };
  id.pid = node_->pid(node_->rank());
  id.rank = rank;
  id.size = size;
  id.job_rank = job_rank;
  copy(id.job, sizeof id.job, job);
  copy(id.label, sizeof id.label, label);
  copy(id.host, sizeof id.host, node_->host());
  id.set.store(Identity::kSet, std::memory_order_release);
  Listing& list = control_at(node_->arena()->base(), 0)->listing;
  for (std::atomic<uint64_t>& block : list.blocks) {  // a 17th communicator of a process is not shown
    uint64_t none = 0;
    if (block.compare_exchange_strong(none, control_offset_ + 1)) return;
  }
}

void Group::unlist() {
  if (own().identity.set.exchange(0) != Identity::kSet) return;
  Listing& list = control_at(node_->arena()->base(), 0)->listing;
  for (std::atomic<uint64_t>& block : list.blocks) {
    uint64_t mine = control_offset_ + 1;
    if (block.compare_exchange_strong(mine, 0)) return;
  }
}

std::string Group::own_call() const { return call_text(own().shown.call.load(std::memory_order_relaxed)); }

std::string Group::state(int q, uint32_t number) const {
  const std::string process = node_->process_state(node_rank(q));
  const std::string is = process == "stopped"   ? "is stopped (SIGSTOP)"
                         : process == "dead"    ? "has died"
                         : process == "unknown" ? "is in a state that /proc does not tell"
                                                : "is " + process;
  const uint64_t call = control(q).shown.call.load(std::memory_order_relaxed);
  const bool inside = (call & Shown::kInside) != 0;
  const std::string last = inside ? "" : format(" (its last: %s)", call_text(call).c_str());
  return is + " and " + where(q, number) + last;
}

std::string Group::where(int q, uint32_t number) const {
  const Shown& s = control(q).shown;
  const uint64_t call = s.call.load(std::memory_order_relaxed);
  const uint64_t waits = s.waits_for.load(std::memory_order_relaxed);
  const uint64_t transfer = s.transfer.load(std::memory_order_relaxed);
  const bool inside = (call & Shown::kInside) != 0;
  const auto at = static_cast<uint32_t>(call);
  std::string text;
  if (number != 0 && !reached(at, number))
    text = "has not entered this call" + (inside ? ": it is in " + call_text(call) : "");
  else if (number != 0 && at == number && inside)
    text = "is in this call";
  else if (number != 0)
    text = "has done its part of this call";
  else
    text = inside ? "is in " + call_text(call) : "is in no collective";
  if (inside && waits != 0) text += ", where it waits for " + rank_text(waits);
  if (transfer != 0) {
    text += format("; it waits in %s for %s", (transfer & Shown::kSends) != 0 ? "send" : "recv",
                   rank_text(transfer).c_str());
  }
  return text;
}

std::string Group::devices_behind(uint64_t call) const {
  std::string not_come, inside;
  bool any_passed = false;
  for (int q = 0; q < size(); q++) {
    const Shown& s = control(q).shown;
    const uint64_t passed = s.device_passed.load(std::memory_order_relaxed);
    any_passed |= passed >= call;
    if (passed >= call) continue;
    std::string& list = s.device_reached.load(std::memory_order_relaxed) >= call ? inside : not_come;
    list += format("%s%s (%llu of %llu calls passed)", list.empty() ? "" : ", ", describe(q).c_str(),
                   static_cast<unsigned long long>(passed), static_cast<unsigned long long>(call));
  }
  if (!not_come.empty()) {
    return "the device has not come to it on " + not_come +
           ": what is before it on the caller's stream is stuck or very slow";
  }
  return any_passed && !inside.empty() ? "it has ended on other ranks, but not on " + inside : "";
}

void Group::say_late(double waited_s, const std::string& here, const std::string& who) const {
  log_line(LogLevel::kWarning, format("rank %d has waited %.0f s in %s for %s", name(rank()), waited_s,
                                      here.c_str(), who.c_str()));
}

std::string Group::who(int q) const {
  const int r = node_rank(q);
  if (node_->pid(r) <= 0) return format("rank %d", name(q));
  return format("rank %d (host %s, pid %lld)", name(q), node_->host().c_str(),
                static_cast<long long>(node_->pid(r)));
}

std::string Group::describe(int q) const {
  const int r = node_rank(q);
  std::string s = format("rank %d", name(q));
  if (node_->pid(r) > 0)
    s += format(" (host %s, pid %lld, %s)", node_->host().c_str(), static_cast<long long>(node_->pid(r)),
                node_->process_state(r));
  return s;
}

std::string Group::last_call(int q) const {
  const Control& c = control(q);
  const Head* latest = &c.slots[0].head;
  uint32_t at = static_cast<uint32_t>(latest->word.load(std::memory_order_acquire) >> 32);
  for (const Slot& s : c.slots) {
    const auto p = static_cast<uint32_t>(s.head.word.load(std::memory_order_acquire) >> 32);
    if (reached(p, at)) {
      at = p;
      latest = &s.head;
    }
  }
  if (at == 0) return "no collective yet";
  return Signature::unpack(latest->signature, latest->count, latest->extra).text() +
         format(" #%u", latest->call);
}

}  // namespace pycomm
