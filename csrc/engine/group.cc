#include "engine/group.h"

#include <time.h>

#include <cstring>

namespace pycomm {

double monotonic_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

Status allocate_control(Node& node, uint64_t* offset) {
  node.free_retired();
  PYCOMM_RETURN_IF_ERROR(node.arena()->allocate(kControlBytes, offset));
  // The block may be recycled memory: the flags must start from zero, the stages need not.
  Control* c = control_at(node.arena()->base(), *offset);
  std::memset(static_cast<void*>(c), 0, offsetof(Control, slots));
  for (Slot& s : c->slots) std::memset(static_cast<void*>(&s.head), 0, sizeof s.head);
  return Status();
}

Group::Group(std::shared_ptr<Node> node, std::vector<int> node_ranks, int rank, double timeout_s,
             const std::vector<uint64_t>& controls)
    : node_(std::move(node)),
      node_ranks_(std::move(node_ranks)),
      rank_(rank),
      timeout_s_(timeout_s),
      policy_(WaitPolicy::choose(node_->size())),  // all of them want the cores, whoever they talk to
      board_(controls_, rank) {
  control_offset_ = controls[static_cast<size_t>(rank_)];
  for (int q = 0; q < size(); q++) {
    bases_.push_back(node_->base(node_ranks_[q]));
    controls_.push_back(control_at(bases_[q], controls[q]));
    mappings_.push_back(node_->mapping(node_ranks_[q]));
  }
}

Group::~Group() {
  if (node_ == nullptr || node_->forked()) return;
  leave("");
  // Our block and pipes stay until every peer has let go of them: it may still look at our flags.
  // The node's first block stays for ever: 0 is also how a control block says "no pipes".
  if (control_offset_ == 0) return;
  node_->retire({control_offset_, own().pipes.word.load(std::memory_order_relaxed)}, own().departed.word,
                static_cast<uint64_t>(size()) - 1);
  for (int q = 0; q < size(); q++) {
    if (q != rank_) control(q).departed.word.fetch_add(1, std::memory_order_acq_rel);
  }
}

void Group::leave(const std::string& why) {
  if (node_->forked()) return;  // the block is the parent's
  std::lock_guard lock(failure_mutex_);
  if (own().state.word.load(std::memory_order_relaxed) != static_cast<uint64_t>(RankState::kActive)) return;
  unlist();
  tell(0, why);
  own().state.word.store(static_cast<uint64_t>(RankState::kLeft), std::memory_order_release);
}

void Group::set_note(uint64_t note) {
  if (!node_->forked()) own().note.word.store(note, std::memory_order_relaxed);
}

void Group::tell(char code, const std::string& text) {
  own().failure[0] = code;
  const size_t n = utf8_prefix(text, sizeof(own().failure) - 2);
  std::memcpy(own().failure + 1, text.data(), n);
  own().failure[1 + n] = 0;
}

void Group::fail(const Status& status) {
  std::lock_guard lock(failure_mutex_);
  if (!failure_.ok()) return;
  failure_ = status.clone();
  failed_.store(true, std::memory_order_release);
  if (node_->forked()) return;
  // A peer may be reading why this rank left; nobody waits for it any more.
  if (own().state.word.load(std::memory_order_relaxed) == static_cast<uint64_t>(RankState::kLeft)) return;
  tell(static_cast<char>(status.code()), status.message());
  own().state.word.store(static_cast<uint64_t>(RankState::kFailed), std::memory_order_release);
}

void Group::abort(const std::string& why) { fail(Status::error(Code::kClosed, why)); }

Status Group::left_out() const {
  RankSet went_on;
  if (!board_.decided(&went_on) || went_on.has(name(rank_))) return Status();
  return Status::error(
      Code::kPeerLost,
      format("the other ranks went on without %s: it did not come to their shrink() in time, "
             "could not be reached, or was excluded there; this process cannot join them "
             "again, so end it (or restart the job)",
             describe(rank_).c_str()));
}

Status Group::failure() const {
  PYCOMM_RETURN_IF_ERROR(left_out());
  std::lock_guard lock(failure_mutex_);
  return failure_.clone();
}

const char* Group::gone(int q) const {
  if (control(q).state.word.load(std::memory_order_acquire) == static_cast<uint64_t>(RankState::kLeft))
    return "closed its communicator";
  return node_->alive(node_rank(q)) ? nullptr : "died";
}

Status Group::failed_peer(const std::string& here) const {
  PYCOMM_RETURN_IF_ERROR(left_out());
  for (int q = 0; q < size(); q++) {
    const Control& c = control(q);
    if (q == rank() ||
        c.state.word.load(std::memory_order_acquire) != static_cast<uint64_t>(RankState::kFailed))
      continue;
    return Status::error(static_cast<Code>(c.failure[0]),
                         format("%s: %s failed: %s", here.c_str(), describe(q).c_str(), c.failure + 1));
  }
  return Status();
}

// Whether a dead peer still matters is for whoever waits for it to say: it may have done its part and gone.
Status Group::dead_peer(const std::string& here) const {
  for (int q = 0; q < size(); q++) {
    if (q == rank() || node_->alive(node_rank(q))) continue;
    const uint64_t state = control(q).state.word.load(std::memory_order_acquire);
    if (state != static_cast<uint64_t>(RankState::kLeft)) return trouble(q, here, "");
  }
  return Status();
}

Status Group::trouble(int peer, const std::string& here, const std::string& progress) const {
  PYCOMM_RETURN_IF_ERROR(failed_peer(here));
  if (peer < 0) {
    // Any rank would do: hopeless only when none is left.
    for (int q = 0; q < size(); q++) {
      if (q != rank() && gone(q) == nullptr) return Status();
    }
    peer = rank() == 0 ? size() - 1 : 0;
  }
  const char* how = peer == rank() ? nullptr : gone(peer);
  if (how == nullptr) return Status();
  const bool left =
      control(peer).state.word.load(std::memory_order_acquire) == static_cast<uint64_t>(RankState::kLeft);
  const std::string why =
      left && control(peer).failure[1] != 0 ? format(": %s", control(peer).failure + 1) : "";
  return Status::error(Code::kPeerLost, format("%s: %s %s%s; its last collective was %s%s", here.c_str(),
                                               describe(peer).c_str(), how, why.c_str(),
                                               last_call(peer).c_str(), progress.c_str()));
}

void Waiting::before_block() {
  if (hooks_ != nullptr) hooks_->before_block();
  started_s_ = monotonic_s();
  late_.restart();
}

void Waiting::show_end() {
  shown_ = false;
  group_.show_no_wait();
}

std::string Waiting::here() const {
  return algorithm_ == nullptr ? format("%s #%u", what_, call_)
                               : format("%s/%s #%u", what_, algorithm_, call_);
}

std::string Waiting::progress_text() const {
  if (progress.n_rounds == 0) return "";
  return format("; round %u of %u, %llu of %llu bytes done", progress.round + 1, progress.n_rounds,
                static_cast<unsigned long long>(progress.n_bytes),
                static_cast<unsigned long long>(progress.of_bytes));
}

Status Waiting::check(int peer) {
  if (group_.failed()) return group_.failure();
  if (hooks_ != nullptr) PYCOMM_RETURN_IF_ERROR(hooks_->poll());
  PYCOMM_RETURN_IF_ERROR(group_.trouble(peer, here(), progress_text()));
  const double waited = monotonic_s() - started_s_;
  group_.show_wait(peer < 0 ? -1 : group_.name(peer), started_s_);
  shown_ = true;
  const uint32_t number = group_.own_number();
  if (waited > timeout_s_) {
    const std::string who =
        peer < 0 ? "any rank"
                 : format("%s, which %s; its last collective was %s", group_.describe(peer).c_str(),
                          group_.where(peer, number).c_str(), group_.last_call(peer).c_str());
    return Status::error(Code::kTimeout, format("%s: waited %.1f s for %s (timeout %.1f s)%s", here().c_str(),
                                                waited, who.c_str(), timeout_s_, progress_text().c_str()));
  }
  if (late_.due(waited)) {
    group_.say_late(waited, group_.own_call(),
                    peer < 0 ? "any rank" : group_.who(peer) + ", which " + group_.state(peer, number));
  }
  return Status();
}

}  // namespace pycomm
