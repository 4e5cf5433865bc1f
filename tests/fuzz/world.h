// What the targets of the engine share: one process of a job, whose other hosts can only be heard.
//
// The *world* is made once: two ranks of this host, joined in a private folder, and rank 0's Net on the
// loopback interface, of a job of kJob processes. Nobody is at the addresses of the others, so whatever is
// sent to them is dropped; what they say, the input does: a target hands it to the sink, as the Net would.
// Ranks 0 and 1 of a communicator are here, 2 and 3 on two other hosts; job ranks 4 and 5 are in none.
//
// Per input a target makes Groups (fresh: a failed one stays failed) and sinks of its own. A Net's thread
// ticks them, so the lock of the Net is held wherever a sink is touched.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/control.h"
#include "engine/group.h"
#include "fuzz.h"
#include "transport/tcp/net.h"

namespace pycomm {

class World {
 public:
  static constexpr int kJob = 6;
  static constexpr int kRanks = 4;
  static constexpr int kHere = 2;

  static World& get() {
    static World* const world = new World;  // lives as long as the process
    return *world;
  }

  const std::shared_ptr<Net>& net() const { return net_; }
  static std::vector<int> job_ranks() { return {0, 1, 2, 3}; }
  static std::vector<int> host_of() { return {0, 0, 1, 2}; }

  // A communicator's ranks on this host, each as it sees itself.
  std::array<std::unique_ptr<Group>, kHere> groups() const {
    std::vector<uint64_t> controls(kHere);
    for (int i = 0; i < kHere; i++) FUZZ_CHECK(allocate_control(*nodes_[i], &controls[i]).ok());
    std::array<std::unique_ptr<Group>, kHere> out;
    for (int i = 0; i < kHere; i++)
      out[i] = std::make_unique<Group>(nodes_[i], std::vector<int>{0, 1}, i, 5.0, controls);
    return out;
  }

 private:
  World() {
    setenv("PYCOMM_ARENA_MAX", "268435456", 0);
    char folder[] = "/tmp/pycomm-fuzz-XXXXXX";
    FUZZ_CHECK(mkdtemp(folder) != nullptr);
    const std::string run = std::string(folder) + "/run";
    std::vector<std::thread> ranks;
    for (int i = 0; i < kHere; i++) {
      ranks.emplace_back(
          [&, i] { FUZZ_CHECK(Node::join(run, i, kHere, kControlBytes, 30, nullptr, &nodes_[i]).ok()); });
    }
    for (std::thread& t : ranks) t.join();
    rmdir(run.c_str());
    rmdir(folder);
    make_net();
  }

  void make_net() {
    NetOptions o;
    o.size = kJob;
    o.job = o.settings_text = o.host = "fuzz";
    FUZZ_CHECK(Address::parse("127.0.0.1", &o.at).ok());
    std::array<uint8_t, Secret::kBytes> bytes;
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(i);
    Secret secret;
    FUZZ_CHECK(Secret::from_bytes(bytes.data(), bytes.size(), &secret).ok());
    const Address nobody = o.at.with_port(1);
    FUZZ_CHECK(Net::create(std::move(o), std::move(secret), &net_).ok());
    std::vector<std::string> names;
    for (int q = 0; q < kJob; q++) names.push_back(format("rank %d (host %d)", q, q));
    net_->set_peers(std::vector<Address>(kJob, nobody), std::move(names));
    for (int q = 1; q < kJob; q++) {
      for (int n = 0; n < 3000; n++) {
        {
          const auto lock = net_->lock();
          if (!net_->lost(q).ok()) break;
          if (n == 0) net_->send_copy(q, 0, MessageHeader(), nullptr);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const auto lock = net_->lock();
      FUZZ_CHECK(!net_->lost(q).ok());
    }
  }

  std::array<std::shared_ptr<Node>, kHere> nodes_;
  std::shared_ptr<Net> net_;
};

// A payload in memory of exactly its size, so that the sanitizer sees a byte too many.
inline std::unique_ptr<std::byte[]> exactly(FuzzInput* input, size_t n_bytes) {
  if (n_bytes == 0) return nullptr;
  auto own = std::make_unique<std::byte[]>(n_bytes);
  const uint8_t seed = input->byte();
  for (size_t i = 0; i < n_bytes; i++) own[i] = static_cast<std::byte>(seed + i * 7);
  return own;
}

}  // namespace pycomm
