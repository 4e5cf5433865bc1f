// The watchdog of PeerCollectives: what kernels say in pinned memory, and what the host answers.
//
// Every kLookS it compares, for each block, the call that the block has entered with the last one that it has
// left. A block that waits longer than the timeout, a kernel that stopped by itself, or trouble() end in one
// word, abort, at which every wait ends; the kernels then name the peers that had not come. Everything here
// is reads and writes of memory, so that a graph's replays, of which the host knows nothing, are watched too.
#include <atomic>
#include <chrono>

#include "engine/cuda/peer_collectives.h"

namespace pycomm {

using cuda::PeerKind;
using cuda::PeerTrouble;

namespace {

constexpr double kLookS = 0.01;
constexpr double kWordS = 0.5;
constexpr double kAnswerS = 5;  // a kernel whose GPU is shared by processes may have to wait for its turn

uint64_t load(uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }
void store(uint64_t& word, uint64_t v) { std::atomic_ref(word).store(v, std::memory_order_relaxed); }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const char* name_of(PeerKind kind) {
  switch (kind) {
    case PeerKind::kOneShot: return "all_reduce/one_shot";
    case PeerKind::kTwoShot: return "all_reduce/two_shot";
    case PeerKind::kReduceScatter: return "reduce_scatter";
    case PeerKind::kAllGather: return "all_gather";
    case PeerKind::kBroadcast: return "broadcast";
    case PeerKind::kBroadcastTwoShot: return "broadcast/two_shot";
  }
  return "?";
}

}  // namespace

bool PeerCollectives::is_idle() const {
  for (int b = 0; b < cuda::kMaxPeerBlocks; ++b) {
    if (load(words_->entered[b]) != load(words_->left[b])) return false;
  }
  return true;
}

// A kernel that stopped by itself is a failure as soon as its stream has passed; the watchdog finds out why.
Status PeerCollectives::failure() const {
  std::unique_lock lock(mutex_);
  if (failure_.ok() && words_ != nullptr && load(words_->stopped) != 0) {
    failure_known_.wait(lock, [this] { return !failure_.ok(); });
  }
  return failure_.clone();
}

void PeerCollectives::abort(Status why) {
  memory_->quarantine();  // before anybody can know
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = std::move(why);
    failed_.store(true, std::memory_order_release);
  }
  failure_known_.notify_all();
  if (words_ != nullptr) store(words_->abort, 1);
}

void PeerCollectives::allow(double timeout_s) {
  if (timeout_s > limit_s_.load()) limit_s_.store(timeout_s);  // calls are made by one thread at a time
}

bool PeerCollectives::give_up(double waited_s) {
  if (is_idle()) return false;
  given_up_s_.store(waited_s);
  return true;
}

void PeerCollectives::end_watch() {
  if (!watchdog_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  watchdog_.join();
}

void PeerCollectives::keep(std::unique_ptr<PeerCollectives> peers) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<PeerCollectives>>;
  peers->end_watch();
  peers->memory_->keep();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(peers));
}

std::string PeerCollectives::name(int rank) const {
  return options_.describe ? options_.describe(rank) : format("rank %d", rank);
}

// What the kernels blame their peers for, and what peers that gave up blamed others for; `otherwise` is why
// the host said abort, if it did.
Status PeerCollectives::told_by_kernels(const Status& otherwise) const {
  const int n = memory_->n_ranks();
  uint64_t mine = 0, theirs = 0;
  for (uint64_t& blamed : words_->blamed) mine |= load(blamed);
  for (uint64_t& blamed : words_->told) theirs |= load(blamed);
  const auto names = [&](uint64_t blamed, PeerTrouble trouble) {
    std::string list;
    for (int r = 0; r < n; ++r) {
      if (cuda::blames(blamed, trouble, r)) list += (list.empty() ? "" : ", ") + name(r);
    }
    return list;
  };
  const uint64_t label = load(words_->label);
  const std::string call =
      format("%s of %llu bytes over peer memory, call %llu", name_of(static_cast<PeerKind>(label & 0xff)),
             static_cast<unsigned long long>(label >> 8),
             static_cast<unsigned long long>(load(words_->stopped) - 1));
  const std::string stopped = names(mine, PeerTrouble::kStopped);
  if (const std::string who = names(mine, PeerTrouble::kDiffers); !who.empty()) {
    return Status::error(
        Code::kMismatch,
        format("%s: %s called something else: collective, dtype, operation, size or root differ",
               call.c_str(), who.c_str()));
  }
  if (const std::string who = names(mine, PeerTrouble::kAbsent); !who.empty()) {
    return Status::error(otherwise.ok() ? Code::kPeerLost : otherwise.code(),
                         format("%s: %s did not come%s%s", call.c_str(), who.c_str(),
                                otherwise.ok() ? "" : "; ", otherwise.message().c_str()));
  }
  if (const std::string who = names(theirs, PeerTrouble::kDiffers); !who.empty()) {
    return Status::error(Code::kMismatch, format("%s: %s gave up, as %s called something else", call.c_str(),
                                                 stopped.c_str(), who.c_str()));
  }
  if (const std::string who = names(theirs, PeerTrouble::kAbsent); !who.empty()) {
    return Status::error(Code::kPeerLost, format("%s: %s gave up, waiting for %s", call.c_str(),
                                                 stopped.c_str(), who.c_str()));
  }
  if (!stopped.empty()) {
    return Status::error(Code::kPeerLost, format("%s: %s gave up", call.c_str(), stopped.c_str()));
  }
  return otherwise.clone();
}

// False: there is nothing left to watch for.
bool PeerCollectives::look(double now_s) {
  if (failed_.load(std::memory_order_acquire)) return false;
  const Status timeout = Status::error(Code::kTimeout, format("waited %g s", waited_s_));
  if (load(words_->stopped) != 0) {
    store(words_->abort, 1);  // for its other blocks, which have peers to blame as well
    if (ending_since_s_ == 0) ending_since_s_ = now_s;
    if (!is_idle() && now_s - ending_since_s_ < kAnswerS) return true;
    Status why = gave_up_s_ == 0 && options_.trouble ? options_.trouble() : Status();
    // Peers gave up, and know why: their word comes by the host's ways, which names the kind of error as
    // well.
    if (why.ok() && gave_up_s_ == 0 && options_.trouble && now_s - ending_since_s_ < kWordS) return true;
    if (why.ok()) why = told_by_kernels(gave_up_s_ > 0 ? timeout.clone() : Status());
    if (why.ok()) why = Status::error(Code::kPeerLost, "a call over peer memory stopped");
    abort(std::move(why));
    return false;
  }
  if (gave_up_s_ > 0) {
    if (now_s - gave_up_s_ < kAnswerS) return true;
    abort(
        Status::error(Code::kTimeout, format("a call over peer memory: waited %g s, and the kernel does not "
                                             "answer",
                                             waited_s_)));
    return false;
  }
  if (options_.trouble) {
    Status why = options_.trouble();
    if (!why.ok()) {
      abort(std::move(why));
      return false;
    }
  }
  const auto give_up_after = [&](double waited_s) {
    waited_s_ = waited_s;
    gave_up_s_ = now_s;
    store(words_->abort, 1);
    return true;
  };
  if (const double given_up_s = given_up_s_.load(); given_up_s > 0) return give_up_after(given_up_s);
  const double limit_s = limit_s_.load();
  for (int b = 0; b < cuda::kMaxPeerBlocks; ++b) {
    const uint64_t entered = load(words_->entered[b]);
    if (entered == load(words_->left[b])) {
      seen_[b] = {};
    } else if (seen_[b].entered != entered) {
      seen_[b] = {entered, now_s};
    } else if (now_s - seen_[b].since_s >= limit_s) {
      return give_up_after(limit_s);
    }
  }
  return true;
}

void PeerCollectives::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    const bool more = look(now());
    lock.lock();
    if (!more) {
      wake_.wait(lock, [this] { return stop_; });
    } else {
      wake_.wait_for(lock, std::chrono::duration<double>(kLookS), [this] { return stop_; });
    }
  }
}

}  // namespace pycomm
