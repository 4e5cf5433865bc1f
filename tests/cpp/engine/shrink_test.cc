// Shrinking with ranks as threads: who does not come, who is excluded, who closed, on one host and on
// several; and with ranks as processes that are killed at random moments, also while they shrink.
//
// What must hold of every outcome: all who get a communicator have the same one, of a size that includes
// them, and it works; whoever is left out is told so.
#include "engine/shrink.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <random>

#include "engine/run_hosts.h"

namespace pycomm {
namespace {

using Hosts = std::vector<int>;
const std::vector<Hosts> kPlacements = {{0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 1}, {0, 1, 2, 0, 1}};

void run_on(const Hosts& hosts, const std::function<void(TestRank&)>& fn) {
  if (*std::max_element(hosts.begin(), hosts.end()) == 0)
    run_ranks(static_cast<int>(hosts.size()), fn);
  else
    run_hosts(hosts, fn);
}

Status shrink(TestRank& self, std::shared_ptr<Communicator>* out, double timeout_s = kDeadlineS,
              const std::vector<int>& exclude = {}) {
  return self.comm->shrink(exclude, timeout_s, nullptr, out);
}

// The sum of 1 .. size, by every kind of transfer that a new communicator has.
void expect_works(Communicator& comm) {
  const int n = comm.size();
  for (const uint64_t count : {uint64_t{3}, uint64_t{100000}}) {
    std::vector<float> v(count, static_cast<float>(comm.rank() + 1));
    PYCOMM_ASSERT_OK(all_reduce(comm, v.data(), count));
    for (const float x : v) ASSERT_EQ(x, static_cast<float>(n * (n + 1) / 2));
  }
  PYCOMM_ASSERT_OK(barrier(comm));
  const int64_t mine = comm.rank();
  int64_t got = -1;
  auto sent = comm.p2p().send((comm.rank() + 1) % n, 7, DType::kInt64, &mine, sizeof mine, kDeadlineS);
  auto come = comm.p2p().recv((comm.rank() + n - 1) % n, 7, DType::kInt64, &got, sizeof got, kDeadlineS);
  PYCOMM_ASSERT_OK(comm.p2p().finish(come, nullptr));
  PYCOMM_ASSERT_OK(comm.p2p().finish(sent, nullptr));
  EXPECT_EQ(got, (comm.rank() + n - 1) % n);
  std::shared_ptr<Communicator> half;
  PYCOMM_ASSERT_OK(comm.split(comm.rank() % 2, 0, 0, nullptr, &half));
  EXPECT_EQ(half->size(), (n + 1 - comm.rank() % 2) / 2);
  PYCOMM_ASSERT_OK(barrier(*half));
}

TEST(Shrink, OfAHealthyCommunicatorIsACopy) {
  for (const Hosts& hosts : kPlacements) {
    run_on(hosts, [](TestRank& self) {
      std::shared_ptr<Communicator> comm;
      PYCOMM_ASSERT_OK(shrink(self, &comm));
      ASSERT_EQ(comm->size(), self.size);
      EXPECT_EQ(comm->rank(), self.rank);
      expect_works(*comm);
      EXPECT_EQ(barrier(*self.comm).code(), Code::kClosed);  // the old one is over
      std::shared_ptr<Communicator> again;
      EXPECT_EQ(shrink(self, &again).code(), Code::kValue);
      EXPECT_EQ(again, nullptr);
    });
  }
}

TEST(Shrink, AfterAnAbort) {
  for (const Hosts& hosts : kPlacements) {
    run_on(hosts, [](TestRank& self) {
      if (self.rank == 1) self.comm->abort("the loss is NaN");
      std::vector<float> v(100000);
      Status s;
      while (s.ok()) s = all_reduce(*self.comm, v.data(), v.size());
      std::shared_ptr<Communicator> comm;
      PYCOMM_ASSERT_OK(shrink(self, &comm));
      ASSERT_EQ(comm->size(), self.size);
      PYCOMM_ASSERT_OK(self.comm->close(nullptr));
      self.comm.reset();
      expect_works(*comm);
    });
  }
}

TEST(Shrink, WithoutThoseThatAreExcluded) {
  for (const Hosts& hosts : kPlacements) {
    run_on(hosts, [](TestRank& self) {
      expect_usable(self);
      std::shared_ptr<Communicator> comm;
      if (self.rank == 1) {  // it is told in its next call
        Status s;
        while (s.ok()) s = barrier(*self.comm);
        std::shared_ptr<Communicator> none;
        const Status out = shrink(self, &none);
        EXPECT_EQ(out.code(), Code::kPeerLost);
        EXPECT_NE(out.message().find("went on without"), std::string::npos) << out.message();
        EXPECT_NE(self.comm->check_usable().message().find("went on without"), std::string::npos);
        return;
      }
      PYCOMM_ASSERT_OK(shrink(self, &comm, kDeadlineS, {1}));
      ASSERT_EQ(comm->size(), self.size - 1);
      EXPECT_EQ(comm->rank(), self.rank - (self.rank > 1 ? 1 : 0));
      expect_works(*comm);
    });
  }
}

TEST(Shrink, ExcludeIsWhatAnyRankNames) {
  run_ranks(4, [](TestRank& self) {
    std::shared_ptr<Communicator> comm;
    const Status s =
        shrink(self, &comm, kDeadlineS, self.rank == 3 ? std::vector<int>{1} : std::vector<int>{});
    if (self.rank == 1) {
      EXPECT_EQ(s.code(), Code::kPeerLost) << s.message();
      return;
    }
    PYCOMM_ASSERT_OK(s.clone());
    EXPECT_EQ(comm->size(), 3);
    expect_works(*comm);
  });
}

TEST(Shrink, RefusesRanksThatDoNotExist) {
  run_ranks(2, [](TestRank& self) {
    std::shared_ptr<Communicator> comm;
    for (const int q : {self.rank, -1, 2}) {
      EXPECT_EQ(shrink(self, &comm, 1, {q}).code(), Code::kValue);
    }
    expect_usable(self);  // nobody has been told anything
    PYCOMM_ASSERT_OK(self.comm->close(nullptr));
    EXPECT_EQ(shrink(self, &comm).code(), Code::kClosed);
  });
}

TEST(Shrink, WhoDoesNotComeIsLeftOutAfterTheTimeout) {
  for (const Hosts& hosts : kPlacements) {
    std::atomic<int> n_done{0};
    std::atomic<double> first_s{INFINITY};
    run_on(hosts, [&](TestRank& self) {
      const int absent = self.size - 1;
      expect_usable(self);
      if (self.rank == absent) {
        while (n_done.load() < self.size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        Status s;
        while (s.ok()) s = barrier(*self.comm);
        EXPECT_NE(self.comm->check_usable().message().find("went on without"), std::string::npos)
            << self.comm->check_usable().message();
        return;
      }
      double first = first_s.load();
      const double began_s = monotonic_s();
      while (began_s < first && !first_s.compare_exchange_weak(first, began_s)) {
      }
      std::shared_ptr<Communicator> comm;
      const Status s = shrink(self, &comm, 1.0);
      n_done++;
      PYCOMM_ASSERT_OK(s.clone());
      EXPECT_GE(monotonic_s() - first_s.load(), 1.0);
      ASSERT_EQ(comm->size(), self.size - 1);
      expect_works(*comm);
    });
  }
}

TEST(Shrink, WhoHasClosedIsNotWaitedFor) {
  for (const Hosts& hosts : kPlacements) {
    run_on(hosts, [](TestRank& self) {
      expect_usable(self);
      if (self.rank == 0) {
        PYCOMM_ASSERT_OK(self.comm->close(nullptr));
        return;
      }
      std::shared_ptr<Communicator> comm;
      const double began_s = monotonic_s();
      const Status s = shrink(self, &comm, kDeadlineS);
      EXPECT_LT(monotonic_s() - began_s, kDeadlineS);
      PYCOMM_ASSERT_OK(s.clone());
      EXPECT_EQ(comm->size(), self.size - 1);
      expect_works(*comm);
    });
  }
}

TEST(Shrink, DownToOneRankAStepAtATime) {
  for (const Hosts& hosts : kPlacements) {
    run_on(hosts, [](TestRank& self) {
      std::shared_ptr<Communicator> comm = self.comm;
      while (comm->size() > 1) {
        std::shared_ptr<Communicator> next;
        const int last = comm->size() - 1;
        if (comm->rank() == last) return;
        PYCOMM_ASSERT_OK(comm->shrink({last}, kDeadlineS, nullptr, &next));
        ASSERT_EQ(next->size(), last);
        expect_works(*next);
        PYCOMM_ASSERT_OK(comm->close(nullptr));
        comm = next;
      }
    });
  }
}

TEST(Shrink, OfAChild) {
  for (const Hosts& hosts : kPlacements) {
    run_on(hosts, [](TestRank& self) {
      std::shared_ptr<Communicator> half, comm;
      PYCOMM_ASSERT_OK(self.comm->split(self.rank % 2, -self.rank, 0, nullptr, &half));
      PYCOMM_ASSERT_OK(half->shrink({}, kDeadlineS, nullptr, &comm));
      ASSERT_EQ(comm->size(), half->size());
      EXPECT_EQ(comm->rank(), half->rank());
      expect_works(*comm);
      expect_usable(self);  // the parent is as it was
    });
  }
}

// ---- the vote of a host ----------------------------------------------------------------------------------

RankSet set_of(std::initializer_list<int> ranks) {
  RankSet s;
  for (const int q : ranks) s.add(q);
  return s;
}

TEST(Board, KeepsWhatItPromised) {
  run_ranks(1, [](TestRank& self) {
    Board& board = self.comm->group().board();
    const uint64_t low = Board::ballot(1, 3), high = Board::ballot(2, 0);
    EXPECT_EQ(board.promise(low).ballot, 0u);
    EXPECT_EQ(board.accept(low, set_of({1})).said, Board::Said::kYes);
    const Board::Answer a = board.promise(high);
    EXPECT_EQ(a.said, Board::Said::kYes);
    EXPECT_EQ(a.ballot, low);
    EXPECT_EQ(a.value, set_of({1}));
    EXPECT_EQ(board.promise(low).said, Board::Said::kNo);
    EXPECT_EQ(board.accept(low, set_of({2})).ballot, high);
    EXPECT_EQ(board.accept(high, set_of({2})).said, Board::Said::kYes);
    EXPECT_EQ(board.promise(Board::ballot(3, 0)).value, set_of({2}));
    RankSet decision;
    EXPECT_FALSE(board.decided(&decision));
    board.decide(set_of({2}));
    EXPECT_TRUE(board.decided(&decision));
    EXPECT_EQ(decision, set_of({2}));
    EXPECT_EQ(board.promise(Board::ballot(9, 0)).said, Board::Said::kDecided);
    EXPECT_EQ(board.accept(Board::ballot(9, 0), set_of({5})).value, set_of({2}));
  });
}

// Proposers in a race, each for another value: what is decided is one of them, and the same for all.
TEST(Board, DecidesOneValueInARace) {
  for (int round = 0; round < 50; round++) {
    std::array<RankSet, 4> seen;
    run_ranks(4, [&](TestRank& self) {
      Board& board = self.comm->group().board();
      const auto mine = set_of({0, 1, 2, 3, 10 + self.rank});
      PYCOMM_ASSERT_OK(barrier(*self.comm));
      for (uint64_t r = 1; !board.decided(&seen[static_cast<size_t>(self.rank)]); r++) {
        const uint64_t ballot = Board::ballot(r, self.rank);
        const Board::Answer a = board.promise(ballot);
        if (a.said != Board::Said::kYes) continue;
        const RankSet value = a.ballot != 0 ? a.value : mine;
        if (board.accept(ballot, value).said == Board::Said::kYes) board.decide(value);
      }
      PYCOMM_ASSERT_OK(barrier(*self.comm));
    });
    for (const RankSet& s : seen) EXPECT_EQ(s, seen[0]);
    int n = 0;
    for (int q = 0; q < 4; q++) n += seen[0] == set_of({0, 1, 2, 3, 10 + q}) ? 1 : 0;
    EXPECT_EQ(n, 1);
  }
}

// ---- processes that are killed ---------------------------------------------------------------------------

constexpr int kMost = 6;

// What the processes of one test show each other: anonymous memory, there before they are.
struct Shown {
  std::atomic<int> begun, n_over;
  char address[kMost][64];
  std::atomic<int> size[kMost];      // of the communicator that the rank ended with
  std::atomic<uint64_t> who[kMost];  // the old ranks in it
  char error[kMost][600];
};

class Processes {
 public:
  explicit Processes(Hosts hosts) : hosts_(std::move(hosts)) {
    void* p = mmap(nullptr, sizeof(Shown), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shown_ = new (p) Shown{};
    setenv("PYCOMM_ARENA_MAX", "268435456", 0);
    for (const int h : hosts_) folders_[h];
  }
  ~Processes() {
    for (const pid_t p : pids_) {
      kill(p, SIGKILL);
      waitpid(p, nullptr, 0);
    }
    munmap(shown_, sizeof(Shown));
  }
  Shown& shown() { return *shown_; }
  pid_t pid(int q) const { return pids_[static_cast<size_t>(q)]; }

  void start() {
    for (size_t r = 0; r < hosts_.size(); r++) {
      const pid_t p = fork();
      if (p == 0) {
        const Status s = rank(static_cast<int>(r));
        std::strncpy(shown_->error[r], s.message().c_str(), sizeof shown_->error[r] - 1);
        shown_->n_over++;
        pause();  // a rank that ends is a rank that died
        _exit(0);
      }
      pids_.push_back(p);
    }
  }

 private:
  Status meet(int r, TestRank* self) {
    const int n = static_cast<int>(hosts_.size());
    const Placement placement(hosts_, r);
    std::shared_ptr<Net> net;
    if (placement.n_hosts() > 1) PYCOMM_RETURN_IF_ERROR(loopback_net(r, n, {}, &net));
    if (net != nullptr) std::strncpy(shown_->address[r], net->address().to_string().c_str(), 63);
    shown_->begun++;
    while (shown_->begun.load() < n) usleep(1000);
    PYCOMM_RETURN_IF_ERROR(Node::join(folders_.at(hosts_[static_cast<size_t>(r)]).run(), placement.local,
                                      placement.n_local(), kControlBytes, kDeadlineS, nullptr, &self->node));
    std::vector<int> ranks;
    for (int q = 0; q < placement.n_local(); q++) ranks.push_back(q);
    const std::vector<uint64_t> controls(ranks.size(), 0);
    if (net == nullptr) return Communicator::create(self->node, ranks, r, kDeadlineS, controls, &self->comm);
    std::vector<Address> addresses(static_cast<size_t>(n));
    std::vector<std::string> names;
    Communicator::Across across{net, hosts_, {}, 2, r};
    for (int q = 0; q < n; q++) {
      PYCOMM_RETURN_IF_ERROR(Address::parse(shown_->address[q], &addresses[static_cast<size_t>(q)]));
      names.push_back(format("rank %d (host %d)", q, hosts_[static_cast<size_t>(q)]));
      across.job_ranks.push_back(q);
    }
    net->set_peers(addresses, names);
    return Communicator::create(self->node, ranks, placement.local, kDeadlineS, controls, std::move(across),
                                &self->comm);
  }

  // all_reduces until it is killed; shrinks whenever one fails.
  Status rank(int r) {
    TestRank self{r, static_cast<int>(hosts_.size()), nullptr, nullptr};
    PYCOMM_RETURN_IF_ERROR(meet(r, &self));
    std::shared_ptr<Communicator> comm = self.comm;
    for (;;) {
      // Who is in it, by old ranks.
      std::vector<float> v(2000);
      v[static_cast<size_t>(r)] = 1;
      if (const Status s = all_reduce(*comm, v.data(), v.size()); !s.ok()) {
        std::shared_ptr<Communicator> next;
        PYCOMM_RETURN_IF_ERROR(comm->shrink({}, kDeadlineS, nullptr, &next).within(s.message()));
        PYCOMM_RETURN_IF_ERROR(comm->close(nullptr));
        comm = next;
        continue;
      }
      uint64_t who = 0;
      for (size_t q = 0; q < hosts_.size(); q++) who |= static_cast<uint64_t>(v[q] != 0) << q;
      shown_->who[r] = who;
      shown_->size[r] = comm->size();
    }
  }

  Hosts hosts_;
  std::map<int, PrivateFolder> folders_;
  Shown* shown_;
  std::vector<pid_t> pids_;
};

void wait_until(const std::function<bool()>& condition, const char* what) {
  const double end_s = monotonic_s() + 2 * kDeadlineS;
  while (!condition()) {
    ASSERT_LT(monotonic_s(), end_s) << what;
    usleep(2000);
  }
}

// Kills `victims`, one after the other, and expects the others to go on with each other; the ranks of `cut`
// raise instead.
void kill_some(const Hosts& hosts, const std::vector<int>& victims, const std::vector<int>& pauses_us,
               const std::vector<int>& cut = {}) {
  Processes all(hosts);
  all.start();
  const int n = static_cast<int>(hosts.size());
  uint64_t left = (uint64_t{1} << n) - 1;
  Shown& shown = all.shown();
  wait_until([&] { return std::all_of(shown.size, shown.size + n, [&](auto& s) { return s.load() == n; }); },
             "all begin");
  for (size_t i = 0; i < victims.size(); i++) {
    usleep(static_cast<useconds_t>(pauses_us[i]));
    kill(all.pid(victims[i]), SIGKILL);
    left &= ~(uint64_t{1} << victims[i]);
  }
  const auto is_cut = [&](int q) { return std::count(cut.begin(), cut.end(), q) > 0; };
  const auto as_expected = [&] {
    for (int q = 0; q < n; q++) {
      if ((left >> q & 1) == 0) continue;
      if (is_cut(q) ? shown.error[q][0] == 0 : shown.who[q].load() != left) return false;
    }
    return true;
  };
  const double end_s = monotonic_s() + 2 * kDeadlineS;
  while (!as_expected() && monotonic_s() < end_s) usleep(2000);
  for (int q = 0; q < n; q++) {
    if ((left >> q & 1) == 0) continue;
    if (is_cut(q)) {
      EXPECT_NE(std::string(shown.error[q]).find("cannot go on"), std::string::npos) << shown.error[q];
    } else {
      EXPECT_EQ(shown.who[q].load(), left) << "rank " << q << ": " << shown.error[q];
      EXPECT_EQ(shown.error[q][0], 0) << "rank " << q << ": " << shown.error[q];
    }
  }
}

TEST(ShrinkProcesses, OneOfTwo) {
  kill_some({0, 0}, {1}, {0});
  kill_some({0, 0}, {0}, {0});
}
TEST(ShrinkProcesses, TwoOfFiveAtOnceAndAPieceAfterTheOther) {
  kill_some({0, 0, 0, 0, 0}, {1, 3}, {0, 0});
  kill_some({0, 0, 0, 0, 0}, {0, 4}, {0, 120'000});
}
TEST(ShrinkProcesses, AllButOne) { kill_some({0, 0, 0, 0}, {0, 2, 1}, {0, 100'000, 100'000}); }
TEST(ShrinkProcesses, OnTwoHosts) {
  kill_some({0, 0, 1, 1}, {3}, {0});
  kill_some({0, 0, 1, 1}, {0}, {0});
}
TEST(ShrinkProcesses, AWholeHost) {
  kill_some({0, 0, 1, 1}, {2, 3}, {0, 0});
  kill_some({0, 0, 1, 1, 2}, {0, 1}, {0, 0});
  kill_some({0, 1}, {1}, {0});
}
TEST(ShrinkProcesses, TheHalfWithoutRank0DoesNotGoOn) {
  kill_some({0, 1}, {0}, {0}, {1});
  kill_some({0, 0, 1, 1}, {0, 1}, {0, 0}, {2, 3});
}

// Random numbers of ranks and hosts, victims and moments: some kills meet a shrink under way.
class ShrinkSeeds : public testing::TestWithParam<unsigned> {};
TEST_P(ShrinkSeeds, RandomKills) {
  std::mt19937 random(GetParam());
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int n = 2 + below(kMost - 1);
  const int n_hosts = 1 + below(std::min(n, 3));
  Hosts hosts(static_cast<size_t>(n));
  for (int q = 0; q < n; q++) hosts[static_cast<size_t>(q)] = q < n_hosts ? q : below(n_hosts);
  std::vector<int> ranks(static_cast<size_t>(n));
  for (int q = 0; q < n; q++) ranks[static_cast<size_t>(q)] = q;
  std::shuffle(ranks.begin(), ranks.end(), random);
  // One of each host lives: otherwise it is the votes that decide, and those depend on the order.
  std::vector<int> victims, pauses;
  for (const int q : ranks) {
    const int host = hosts[static_cast<size_t>(q)];
    int n_left = 0;
    for (int p = 0; p < n; p++)
      n_left += hosts[static_cast<size_t>(p)] == host && std::count(victims.begin(), victims.end(), p) == 0;
    if (n_left < 2 || static_cast<int>(victims.size()) >= n / 2 + 1) continue;
    victims.push_back(q);
    pauses.push_back(below(3) == 0 ? 0 : below(250'000));
  }
  kill_some(hosts, victims, pauses);
}
INSTANTIATE_TEST_SUITE_P(Seeds, ShrinkSeeds, testing::Range(0u, 20u));

}  // namespace
}  // namespace pycomm
