// Fuzz target: what ranks of other hosts say in collectives (engine/remote.h), and the schedules that run on
// it (engine/rounds.h, with and without codes: engine/compressed.h), told anything by peers.
//
// The input makes calls (begins one, expects messages, runs schedules, waits, refuses, ends it) and says what
// arrives, in any order: messages that a call expects, with keys, sizes and signatures near the right ones
// and then anything; openings, refusals, failures, greetings. A message arrives as the Receiver hands it
// over: first its header (*landing*), later its payload (*arrived*), and in between other messages of other
// connections, and the end of the call. Whatever comes: no byte goes beyond a landing, or to a landing whose
// receive has ended; what is kept is bounded; every call ends, well or with a Status that can be told.
#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include "engine/flight.h"
#include "engine/remote.h"
#include "world.h"

namespace pycomm {
namespace {

constexpr uint64_t kId = 11;

Signature signature(uint8_t choice) {
  Signature s;
  s.kind = static_cast<CallKind>(choice % 9);
  s.dtype = DType::kFloat32;
  s.count = choice / 16;
  return s;
}

struct Landing {  // of a receive that the input expects
  Remote::Key key;
  std::unique_ptr<std::byte[]> memory;
  size_t n_bytes;
  bool ended = false;
};

struct Coming {  // a message whose header has come
  int peer;
  MessageHeader header;
  std::byte* to;
  std::unique_ptr<std::byte[]> own;
};

class Calls {
 public:
  explicit Calls(FuzzInput* input)
      : in_(*input),
        groups_(world_.groups()),
        remote_(world_.net(), kId, World::job_ranks(), 0, *groups_[0]) {}

  void run() {
    for (int n = 0; n < 300 && !in_.empty(); n++) step();
    {
      auto lock = world_.net()->lock();
      end(false, lock);
    }
    while (!coming_.empty()) arrive(coming_.size() - 1);
    const Status failure = groups_[0]->failure();
    if (!groups_[0]->failed()) return;
    FUZZ_CHECK(failure.code() != Code::kOk && failure.code() != Code::kInterrupt);
    FUZZ_CHECK(failure.message().size() < 8000);
  }

 private:
  void step() {
    auto lock = world_.net()->lock();
    const uint8_t choice = in_.byte();
    switch (choice % 16) {
      case 0: return begin(lock);
      case 1: return end(choice & 128, lock);
      case 2:
      case 3: return expect();
      case 4: return fly();
      case 5: return remote_.when_opened(2 + choice / 16 % 2, [this] { n_opened_++; });
      case 6: return remote_.sent(1 + choice / 16);
      case 7: return choice / 16 % 4 != 0 ? remote_.tick() : look();
      case 8: return remote_.send(2 + choice / 128, {call_, 0, 0, 0, 0}, nullptr, 0, [] {});
      case 9: return coming_.empty() ? void() : arrive(in_.byte() % coming_.size());
      case 10: return choice > 240 ? remote_.left(choice % World::kJob, "done") : void();
      default: return hear();
    }
  }

  void begin(std::unique_lock<std::mutex>& lock) {
    end(true, lock);
    call_ += 1 + (in_.byte() > 250 ? 20 : 0);
    sig_ = signature(in_.byte());
    remote_.begin(call_, sig_);
    active_ = true;
  }

  // As engine/hierarchy.cc ends a call: then what it has used may go. The Net's forget() turns messages that
  // are coming away from it; Remote calls that where the call expected something or had something to leave,
  // and a header that has found a landing must be of such a call.
  void end(bool well, std::unique_lock<std::mutex>& lock) {
    if (active_) remote_.end(well);
    active_ = false;
    for (Coming& c : coming_) {
      if (c.own != nullptr || c.header.n_bytes == 0) continue;
      FUZZ_CHECK(!flights_.empty() || std::any_of(landings_.begin(), landings_.end(), [&](const Landing& l) {
        return !l.ended && l.memory.get() == c.to;
      }));
      c.own = std::make_unique<std::byte[]>(c.header.n_bytes);
      c.to = c.own.get();
    }
    landings_.clear();
    lock.unlock();  // which a Flight that goes takes itself
    flights_.clear();
    lock.lock();
    buffers_.clear();
  }

  void expect() {
    if (!active_ || landings_.size() > 50) return;
    const Remote::Key key = some_key();
    const size_t n_bytes = in_.byte() % 64;
    const bool lands = in_.byte() % 4 != 0;
    if (!keys_used(key)) return;
    landings_.push_back({key, lands ? std::make_unique<std::byte[]>(n_bytes) : nullptr, n_bytes});
    Landing& landing = landings_.back();
    remote_.expect(key, landing.memory.get(), n_bytes, [&landing](const std::byte* data) {
      FUZZ_CHECK(!landing.ended);
      landing.ended = true;
      uint8_t sum = 0;  // all of it can be read
      for (size_t i = 0; i < landing.n_bytes; i++) sum += static_cast<uint8_t>(data[i]);
      if (sum == 255) std::fflush(stdout);
    });
  }

  // A call expects each key once.
  bool keys_used(const Remote::Key& key) {
    if (key.call != used_call_) used_.clear();
    used_call_ = key.call;
    return used_.insert(key).second;
  }

  Remote::Key some_key() {
    const uint8_t a = in_.byte();
    return {call_, a & 1u, a >> 1 & 3u, a >> 3 & 1u, 2 + (a >> 4 & 1)};
  }

  // A schedule of ranks 0, 2 and 3, on memory of exactly its size; runs from 8 on are schedules'.
  void fly() {
    if (!active_ || flights_.size() > 3) return;
    static const std::vector<const Algorithm*> algorithms = [] {
      std::vector<const Algorithm*> out;
      for (const Algorithm& a : catalog()) out.push_back(&a);
      return out;
    }();
    const Algorithm& a = *algorithms[in_.byte() % algorithms.size()];
    const uint8_t choice = in_.byte();
    const std::vector<int> members{0, 2, 3};
    static std::map<std::pair<const Algorithm*, int>, Schedule> schedules;
    const int root = choice % 3;
    Schedule& s = schedules[{&a, root}];
    if (s.part.empty() && !build_schedule(a, 0, 3, root, 1, &s).ok()) return;
    const uint64_t count = choice & 128 ? in_.byte() * 100u : in_.byte();
    auto flight = std::make_unique<Flight>(remote_, s, std::vector<uint64_t>{}, members);
    Rounds::Task& t = flight->task;
    t.call = call_;
    t.run = 8 + static_cast<uint32_t>(flights_.size());
    t.count = count;
    t.dtype = DType::kFloat32;
    t.op = choice & 64 ? ReduceOp::kMax : ReduceOp::kSum;
    if (std::string_view(a.name) == "direct" && (choice & 32) != 0 && t.op == ReduceOp::kSum)
      t.codec = Codec(static_cast<Compression>(1 + choice / 4 % 4), nullptr);
    // A share's input and output are never longer than the vector; what a rank has of it may be less.
    for (std::byte** p : {&t.in, &t.out}) {
      buffers_.push_back(std::make_unique<std::byte[]>(count * sizeof(float)));
      *p = buffers_.back().get();
      std::fill_n(*p, count * sizeof(float), std::byte{0});
    }
    flights_.push_back(std::move(flight));
    flights_.back()->begin();
  }

  void look() {
    const Status s = remote_.trouble();
    FUZZ_CHECK(s.ok() || (s.code() != Code::kOk && s.code() != Code::kInterrupt));
    FUZZ_CHECK(s.message().size() < 8000);
  }

  MessageHeader header() {
    const uint8_t odd = in_.byte(), choice = in_.byte();
    const Remote::Key key = some_key();
    MessageHeader h = header_of(key, 0);
    h.kind = choice < 128 ? 0 : choice % 5;
    if (choice & 1) h.run += 8;
    if ((odd & 15) == 1) h.signature = signature(in_.byte()).packed();
    h.n_bytes = h.kind == 0 ? in_.byte() % 64 : h.kind == 2 || h.kind == 3 ? in_.byte() : 0;
    switch (odd >> 4) {
      case 1: h.call += in_.byte() % 3; break;
      case 2: h.call -= in_.byte() % 20; break;
      case 3: h.call = ~0u - in_.byte(); break;
      case 4: h.kind = in_.byte(); break;
      case 5: h.flags = static_cast<uint16_t>(in_.byte() * 257); break;
      case 6: h.part = in_.byte() << 8; break;
      case 7: h.signature = in_.byte() * 0x0101010101010101u; break;
      case 8: h.n_bytes = in_.byte() * 100u; break;
      default: break;
    }
    return h;
  }

  void hear() {
    if (coming_.size() > 8) return arrive(0);
    const uint8_t choice = in_.byte();
    const int peer = choice & 8 ? choice % World::kJob : 2 + (choice & 1);
    Coming c{peer, MessageHeader(), nullptr, nullptr};
    if (choice & 128)
      fit(&c.header);
    else
      c.header = header();
    c.to = remote_.landing(peer, c.header);
    if (c.to == nullptr && c.header.n_bytes > 0) {
      c.own = std::make_unique<std::byte[]>(c.header.n_bytes);
      c.to = c.own.get();
    }
    coming_.push_back(std::move(c));
    if (choice & 32) arrive(coming_.size() - 1);
  }

  // A message that the call does expect: of the key and size of a receive, or of a schedule's part.
  void fit(MessageHeader* h) {
    const uint8_t which = in_.byte();
    if (which % 2 == 0 && !landings_.empty()) {
      auto at = landings_.begin();
      std::advance(at, static_cast<ptrdiff_t>(which / 2 % landings_.size()));
      *h = header_of(at->key, at->n_bytes);
    } else if (!flights_.empty()) {
      const Rounds::Task& t = flights_[which / 2 % flights_.size()]->task;
      const uint64_t part = which / 16 % 4;
      const uint64_t base = part == 3 ? t.count : (t.count + 2) / 3;
      const uint64_t line = part == 3 ? base : (base + 15) / 16 * 16;
      const uint64_t at = part == 3 ? 0 : std::min(t.count, line * part);
      const uint64_t n = std::min(line, t.count - at);
      const size_t n_bytes = t.codec.is_active() ? t.codec.message_bytes(n) : n * sizeof(float);
      *h = header_of({call_, t.run, 0, which / 64u % 4, 0}, n_bytes);
    }
  }

  MessageHeader header_of(const Remote::Key& key, size_t n_bytes) const {
    MessageHeader h;
    h.group = kId;
    h.call = key.call;
    h.run = key.run;
    h.part = key.tile;
    h.flags = static_cast<uint16_t>(key.index);
    h.signature = sig_.packed();
    h.count = sig_.count;
    h.extra = sig_.extra;
    h.n_bytes = n_bytes;
    return h;
  }

  void arrive(size_t i) {
    auto at = coming_.begin();
    std::advance(at, static_cast<ptrdiff_t>(i));
    Coming c = std::move(*at);
    coming_.erase(at);
    const uint8_t seed = in_.byte();
    for (size_t k = 0; k < c.header.n_bytes; k++) c.to[k] = static_cast<std::byte>(seed * (k + 1));
    remote_.arrived(c.peer, c.header, c.to, std::move(c.own));
  }

  FuzzInput& in_;
  World& world_ = World::get();
  std::array<std::unique_ptr<Group>, World::kHere> groups_;
  Remote remote_;
  uint32_t call_ = 0;
  bool active_ = false;
  Signature sig_;
  int n_opened_ = 0;
  std::set<Remote::Key> used_;
  uint32_t used_call_ = 0;
  std::list<Landing> landings_;
  std::list<Coming> coming_;
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;
};

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  pycomm::FuzzInput input(data, n_bytes);
  pycomm::Calls(&input).run();
  return 0;
}
