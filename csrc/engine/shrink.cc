#include "engine/shrink.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/hierarchy.h"

namespace pycomm {

namespace {
void sleep_ms(int ms) {
  const timespec t{0, ms * 1000000L};
  nanosleep(&t, nullptr);
}

constexpr uint64_t kWillNotCome = ~uint64_t{0};  // the beat of a rank that has closed the communicator

template <size_t N>
RankSet load(const std::atomic<uint64_t> (&from)[N]) {
  RankSet set;
  for (size_t i = 0; i < N; i++) set.words[i] = from[i].load(std::memory_order_acquire);
  return set;
}

template <size_t N>
void store(const RankSet& set, std::atomic<uint64_t> (&to)[N]) {
  for (size_t i = 0; i < N; i++) to[i].store(set.words[i], std::memory_order_release);
}
}  // namespace

Shrink::Shrink(Group& group) : group_(group), rank_(group.rank()), n_(group.size()) {
  host_of_.assign(static_cast<size_t>(n_), 0);
  local_of_.resize(static_cast<size_t>(n_));
  std::iota(local_of_.begin(), local_of_.end(), 0);
  votes_ = {n_};
  beats_.resize(static_cast<size_t>(n_));
}

Shrink::Shrink(Group& group, const Placement& placement, std::shared_ptr<Net> net, uint64_t id,
               std::vector<int> job_ranks)
    : group_(group),
      net_(std::move(net)),
      id_(id),
      rank_(placement.rank),
      n_(placement.n_ranks()),
      job_ranks_(std::move(job_ranks)),
      host_of_(placement.host_of),
      local_of_(placement.local_of),
      host_(placement.host) {
  for (size_t q = 0; q < job_ranks_.size(); q++) ranks_[job_ranks_[q]] = static_cast<int>(q);
  for (const auto& there : placement.ranks) votes_.push_back(static_cast<int>(there.size()));
  beats_.resize(static_cast<size_t>(group_.size()));
  const auto l = net_->lock();
  net_->attach(id_, this);
}

Shrink::~Shrink() {
  if (net_ != nullptr && !net_->forked()) detach("");
}

void Shrink::detach(const std::string& why) {
  const auto l = net_->lock();
  net_->detach(id_, why);
}

void Shrink::leave(const std::string& why) {
  if (group_.node()->forked()) return;
  own().beat.store(kWillNotCome);
  if (net_ != nullptr) detach(why);
}

std::unique_lock<std::mutex> Shrink::lock() {
  return net_ != nullptr ? net_->lock() : std::unique_lock(mutex_);
}

// ---- the caller ------------------------------------------------------------------------------------------

Status Shrink::run(const RankSet& excluded, uint64_t control, double timeout_s, CallerHooks* hooks,
                   const std::function<void()>& revoke, RankSet* survivors) {
  {
    const auto l = lock();
    if (running_) return Status::error(Code::kValue, "shrink: another thread is in it already");
    running_ = true;
    began_s_ = monotonic_s();
    timeout_s_ = timeout_s;
    said_s_ = ready_s_ = next_s_ = 0;
    phase_ = Phase::kIdle;
    beats_.assign(beats_.size(), {});
    store(excluded, own().excluded);
    if (own().joined.load() == 0) own().joined.store(control);
  }
  if (hooks != nullptr) hooks->before_block();
  bool done = false, revoked = false;
  Status s;
  double looked_s = began_s_;
  while (s.ok() && !done) {
    const double now_s = monotonic_s();
    {
      const auto l = lock();
      s = step(now_s, &done);
    }
    if (done || !s.ok()) break;
    if (!revoked && now_s - began_s_ > kRevokeS) {
      revoked = true;
      revoke();
    }
    if (hooks != nullptr && now_s - looked_s > 1e-3 * kSliceMs) {
      looked_s = now_s;
      s = hooks->poll();
    }
    sleep_ms(now_s - began_s_ < 0.05 ? 1 : 5);
  }
  const auto l = lock();
  running_ = false;
  PYCOMM_RETURN_IF_ERROR(std::move(s));
  PYCOMM_RETURN_IF_ERROR(group_.left_out().within("shrink"));
  *survivors = decision_;
  return Status();
}

Status Shrink::step(double now_s, bool* done) {
  own().beat.fetch_add(1);
  if (group_.board().decided(&decision_)) {
    decide(decision_);
    *done = true;
    return Status();
  }
  const Picture picture = look(now_s);
  if (net_ != nullptr) say_here(now_s);
  PYCOMM_RETURN_IF_ERROR(out_of_reach(picture));
  const double waited_s = now_s - began_s_;
  if (waited_s > timeout_s_ + kAgreeS) return too_late(picture, waited_s);
  const bool ready = picture.all_known || waited_s > timeout_s_;
  if (!ready) ready_s_ = 0;
  if (!ready || picture.excluded.has(rank_)) return Status();  // the others decide without us
  if (ready_s_ == 0) ready_s_ = now_s;
  proposal_ = candidates(picture);
  int turn = 0;
  for (int q = 0; q < rank_; q++) turn += proposal_.has(q) ? 1 : 0;
  if (phase_ != Phase::kIdle && now_s > ballot_s_ + kBallotS) {
    phase_ = Phase::kIdle;
    next_s_ = now_s + kTurnS * turn;
  }
  if (phase_ == Phase::kIdle && now_s >= std::max(next_s_, ready_s_ + kTurnS * turn)) begin_ballot(now_s);
  return Status();
}

// ---- who is there ----------------------------------------------------------------------------------------

RankSet Shrink::gone_here() const {
  RankSet gone;
  for (int i = 0; i < group_.size(); i++) {
    const Control& c = group_.control(i);
    const bool left =
        c.state.word.load(std::memory_order_acquire) == static_cast<uint64_t>(RankState::kLeft) ||
        c.shrink.beat.load() == kWillNotCome;
    if (i != group_.rank() && (left || !group_.node()->alive(group_.node_rank(i)))) gone.add(group_.name(i));
  }
  return gone;
}

void Shrink::look_here(double now_s, Picture* picture) {
  picture->gone = gone_here();
  for (int i = 0; i < group_.size(); i++) {
    const int q = group_.name(i);
    const ShrinkArea& area = group_.control(i).shrink;
    if (picture->gone.has(q) || area.joined.load() == 0) continue;
    Beat& beat = beats_[static_cast<size_t>(i)];
    const uint64_t value = area.beat.load();
    if (value != beat.value && beat.value != 0) beat.at_s = now_s;
    beat.value = value;
    if (q == rank_ || now_s - beat.at_s < kFreshS) picture->come.add(q);
    picture->excluded.add(load(area.excluded));
  }
}

Shrink::Picture Shrink::look(double now_s) {
  Picture picture;
  look_here(now_s, &picture);
  picture.gone.add(lost_);
  picture.gone.add(left_);
  for (const auto& [q, view] : views_) {
    picture.gone.add(view.gone);
    picture.excluded.add(view.excluded);
  }
  for (int q = 0; q < n_; q++) {
    const auto view = views_.find(q);
    if (view != views_.end() && view->second.at_s >= began_s_ && now_s - view->second.at_s < kFreshS &&
        !picture.gone.has(q))
      picture.come.add(q);
    if (!picture.come.has(q) && !picture.gone.has(q) && !picture.excluded.has(q)) picture.all_known = false;
  }
  return picture;
}

RankSet Shrink::lost_by(int q) const {
  if (q == rank_) return lost_;
  if (is_here(q)) return load(group_.control(local_of_[static_cast<size_t>(q)]).shrink.lost);
  const auto view = views_.find(q);
  return view != views_.end() ? view->second.lost : RankSet{};
}

// This rank and, from the lowest on, whoever can reach all that are chosen.
RankSet Shrink::candidates(const Picture& picture) const {
  RankSet chosen;
  std::vector<int> list = {rank_};
  chosen.add(rank_);
  for (int q = 0; q < n_; q++) {
    if (q == rank_ || !picture.come.has(q) || picture.excluded.has(q)) continue;
    const RankSet lost = lost_by(q);
    if (std::any_of(list.begin(), list.end(), [&](int c) { return lost.has(c) || lost_by(c).has(q); }))
      continue;
    chosen.add(q);
    list.push_back(q);
  }
  return chosen;
}

bool Shrink::quorum(const std::vector<bool>& hosts) const {
  int votes = 0;
  for (size_t h = 0; h < votes_.size(); h++) votes += hosts[h] ? votes_[h] : 0;
  return 2 * votes > n_ || (2 * votes == n_ && hosts[static_cast<size_t>(host_of_[0])]);
}

Status Shrink::out_of_reach(const Picture& picture) const {
  std::vector<bool> reached(votes_.size());
  int votes = 0;
  std::string gone;
  for (int q = 0; q < n_; q++) {
    if (!picture.gone.has(q))
      reached[static_cast<size_t>(host_of_[static_cast<size_t>(q)])] = true;
    else
      gone += format("%s%d", gone.empty() ? "" : ", ", q);
  }
  if (quorum(reached)) return Status();
  for (size_t h = 0; h < votes_.size(); h++) votes += reached[h] ? votes_[h] : 0;
  return Status::error(
      Code::kPeerLost,
      format("shrink: rank %d cannot go on: it reaches hosts that had %d of the %d ranks, and more than half "
             "are needed, or half with rank 0's host (rank(s) %s are gone or cut off, and in the second case "
             "may go on without this one); end this process, or restart the job",
             rank_, votes, n_, gone.c_str()));
}

Status Shrink::too_late(const Picture& picture, double waited_s) const {
  std::string silent;
  for (int q = 0; q < n_; q++) {
    if (picture.come.has(q) || picture.gone.has(q) || picture.excluded.has(q)) continue;
    silent += (silent.empty() ? "" : ", ") + (is_here(q) ? group_.describe(local_of_[static_cast<size_t>(q)])
                                                         : net_->name(job_ranks_[static_cast<size_t>(q)]));
  }
  if (silent.empty()) silent = "none";
  return Status::error(
      Code::kTimeout,
      format("shrink: rank %d found no agreement in %.1f s (timeout %.1f s and %.0f s more); it needs hosts "
             "that had more than half of the %d ranks, or half with rank 0's; silent: %s%s. It may be called "
             "again",
             rank_, waited_s, timeout_s_, kAgreeS, n_, silent.c_str(),
             picture.excluded.has(rank_) ? "; and another rank excludes this one" : ""));
}

// ---- ballots ---------------------------------------------------------------------------------------------

void Shrink::begin_ballot(double now_s) {
  if (highest_round_ >= Board::kMaxRound) return;
  ballot_ = Board::ballot(++highest_round_, rank_);
  phase_ = Phase::kPrepare;
  ballot_s_ = now_s;
  best_ = 0;
  yes_.assign(votes_.size(), false);
  tell_all(ShrinkKind::kPrepare, ballot_, {});
  heed(host_, group_.board().promise(ballot_));
}

void Shrink::heed(int host, const Board::Answer& a) {
  switch (a.said) {
    case Board::Said::kDecided: return decide(a.value);
    case Board::Said::kNo:
      highest_round_ = std::max(highest_round_, Board::round(a.ballot));
      if (phase_ != Phase::kIdle) next_s_ = monotonic_s() + kTurnS * (1 + rank_ % 8);
      phase_ = Phase::kIdle;
      return;
    case Board::Said::kYes: break;
  }
  if (phase_ == Phase::kIdle) return;
  yes_[static_cast<size_t>(host)] = true;
  if (phase_ == Phase::kPrepare && a.ballot > best_) {
    best_ = a.ballot;
    value_ = a.value;
  }
  if (!quorum(yes_)) return;
  if (phase_ == Phase::kAccept) return decide(value_);
  accept_all();
}

void Shrink::accept_all() {
  if (best_ == 0) value_ = proposal_;
  phase_ = Phase::kAccept;
  yes_.assign(votes_.size(), false);
  tell_all(ShrinkKind::kAccept, ballot_, {value_});
  heed(host_, group_.board().accept(ballot_, value_));
}

// Everybody who learns it tells everybody: whoever decided may be dead.
void Shrink::decide(const RankSet& value) {
  phase_ = Phase::kIdle;
  group_.board().decide(value);
  if (announced_) return;
  announced_ = true;
  tell_all(ShrinkKind::kDecided, 0, {value});
}

// ---- messages --------------------------------------------------------------------------------------------

void Shrink::say_here(double now_s) {
  store(lost_, own().lost);
  std::vector<RankSet> sets = {gone_here(), lost_, load(own().excluded)};
  if (sets == said_ && now_s - said_s_ < kSayS) return;
  said_ = std::move(sets);
  said_s_ = now_s;
  tell_all(ShrinkKind::kHere, 0, said_);
}

void Shrink::tell(int q, ShrinkKind kind, uint64_t ballot, uint64_t accepted,
                  const std::vector<RankSet>& sets) {
  const size_t n_bytes = static_cast<size_t>(n_ + 63) / 64 * 8;
  std::vector<std::byte> payload(n_bytes * sets.size());
  for (size_t i = 0; i < sets.size(); i++)
    std::memcpy(payload.data() + i * n_bytes, sets[i].words.data(), n_bytes);
  MessageHeader h;
  h.kind = static_cast<uint8_t>(kind);
  h.group = id_;
  h.count = ballot;
  h.signature = accepted;
  h.n_bytes = payload.size();
  net_->send_copy(job_ranks_[static_cast<size_t>(q)], 0, h, payload.data());
}

void Shrink::tell_all(ShrinkKind kind, uint64_t ballot, const std::vector<RankSet>& sets) {
  for (int q = 0; q < n_; q++) {
    if (!is_here(q) && !lost_.has(q)) tell(q, kind, ballot, 0, sets);
  }
}

void Shrink::answer(int q, ShrinkKind yes, uint64_t ballot, const Board::Answer& a) {
  switch (a.said) {
    case Board::Said::kYes: return tell(q, yes, ballot, a.ballot, {a.value});
    case Board::Said::kNo: return tell(q, ShrinkKind::kNo, ballot, a.ballot, {a.value});
    case Board::Said::kDecided: return tell(q, ShrinkKind::kDecided, 0, 0, {a.value});
  }
}

void Shrink::arrived(int peer, const MessageHeader& h, std::byte* data, std::unique_ptr<std::byte[]>) {
  const auto found = ranks_.find(peer);
  if (found == ranks_.end() || h.kind > static_cast<uint8_t>(ShrinkKind::kDecided)) return;
  const int from = found->second;
  if (is_here(from)) return;
  const auto kind = static_cast<ShrinkKind>(h.kind);
  RankSet sets[3];
  const size_t n_sets = kind == ShrinkKind::kHere ? 3 : kind == ShrinkKind::kPrepare ? 0 : 1;
  const size_t n_bytes = static_cast<size_t>(n_ + 63) / 64 * 8;
  if (h.n_bytes != n_sets * n_bytes) return;  // not ours
  for (size_t i = 0; i < n_sets; i++) {
    std::memcpy(sets[i].words.data(), data + i * n_bytes, n_bytes);
    if (n_ % 64 != 0) sets[i].words[static_cast<size_t>(n_) / 64] &= (uint64_t{1} << n_ % 64) - 1;
  }
  if (h.count > Board::ballot(Board::kMaxRound, kMaxRanks - 1)) return;
  const bool ours = h.count == ballot_;
  const int host = host_of_[static_cast<size_t>(from)];
  Board& board = group_.board();
  switch (kind) {
    case ShrinkKind::kHere: {
      const bool first = !views_.contains(from);
      views_[from] = {monotonic_s(), sets[0], sets[1], sets[2]};
      RankSet value;
      if (board.decided(&value)) return tell(from, ShrinkKind::kDecided, 0, 0, {value});
      if (first && running_) said_s_ = 0;  // it need not wait to hear from us
      return;
    }
    case ShrinkKind::kPrepare: return answer(from, ShrinkKind::kPromise, h.count, board.promise(h.count));
    case ShrinkKind::kAccept:
      return answer(from, ShrinkKind::kAccepted, h.count, board.accept(h.count, sets[0]));
    case ShrinkKind::kPromise:
      if (ours && phase_ == Phase::kPrepare) heed(host, {Board::Said::kYes, h.signature, sets[0]});
      return;
    case ShrinkKind::kAccepted:
      if (ours && phase_ == Phase::kAccept) heed(host, {Board::Said::kYes, 0, {}});
      return;
    case ShrinkKind::kNo:
      if (ours) heed(host, {Board::Said::kNo, h.signature, {}});
      return;
    case ShrinkKind::kDecided: return board.decide(sets[0]);
  }
}

void Shrink::lost(int peer, const Status&) {
  const auto found = ranks_.find(peer);
  if (found != ranks_.end() && !is_here(found->second)) lost_.add(found->second);
}

void Shrink::left(int peer, const std::string&) {
  const auto found = ranks_.find(peer);
  if (found != ranks_.end() && !is_here(found->second)) left_.add(found->second);
}

}  // namespace pycomm
