// Ranks of several hosts as threads of this process: shared memory within a "host", the real TCP between.
//
// run_hosts({0, 0, 1}, fn) makes a private folder for each host, joins its ranks there, gives every rank a
// Net on the loopback interface with the same secret, and a communicator of all; then it calls fn on each.
// `self.node` is that of the host: its ranks are the node's in their order. TSAN sees all of it.
#pragma once

#include <latch>
#include <map>

#include "engine/hierarchy.h"
#include "engine/run_ranks.h"

namespace pycomm {

struct HostsOptions {
  int n_lanes = 1;
  bool encrypt = false;
  ZeroCopy::Mode zero_copy = ZeroCopy::Mode::kAuto;
  double timeout_s = kDeadlineS;
};

inline Status loopback_net(int rank, int size, const HostsOptions& options, std::shared_ptr<Net>* out) {
  NetOptions o;
  o.rank = rank;
  o.size = size;
  PYCOMM_RETURN_IF_ERROR(Address::parse("127.0.0.1", &o.at));
  o.n_lanes = options.n_lanes;
  o.encrypt = options.encrypt;
  o.zero_copy = options.zero_copy;
  o.job = "test";
  o.settings_text = "test";
  o.host = "host";
  std::array<uint8_t, Secret::kBytes> bytes;
  for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(7 * i + 1);
  Secret secret;
  PYCOMM_RETURN_IF_ERROR(Secret::from_bytes(bytes.data(), bytes.size(), &secret));
  return Net::create(std::move(o), std::move(secret), out);
}

inline void run_hosts(const std::vector<int>& host_of, const std::function<void(TestRank&)>& fn,
                      const HostsOptions& options = {}) {
  setenv("PYCOMM_ARENA_MAX", "268435456", 0);
  const int n = static_cast<int>(host_of.size());
  std::map<int, PrivateFolder> folders;
  for (const int h : host_of) folders[h];
  std::vector<std::shared_ptr<Net>> nets(host_of.size());
  std::vector<Address> addresses;
  std::vector<std::string> names;
  for (int r = 0; r < n; r++) {
    PYCOMM_ASSERT_OK(loopback_net(r, n, options, &nets[static_cast<size_t>(r)]));
    addresses.push_back(nets[static_cast<size_t>(r)]->address());
    names.push_back(format("rank %d (host %d)", r, host_of[static_cast<size_t>(r)]));
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < n; r++) {
    threads.emplace_back([&, r] {
      std::shared_ptr<Net> net = std::move(nets[static_cast<size_t>(r)]);
      net->set_peers(addresses, names);
      net->set_hosts(host_of);
      const Placement placement(host_of, r);
      TestRank self{r, n, nullptr, nullptr};
      const std::string folder = folders.at(host_of[static_cast<size_t>(r)]).run();
      Status s = Node::join(folder, placement.local, placement.n_local(), kControlBytes, kDeadlineS, nullptr,
                            &self.node);
      ASSERT_TRUE(s.ok()) << "rank " << r << ": " << s.message();
      std::vector<int> ranks;
      Communicator::Across across{std::move(net), host_of, {}, 2, r};
      for (int q = 0; q < placement.n_local(); q++) ranks.push_back(q);
      for (int q = 0; q < n; q++) across.job_ranks.push_back(q);
      const std::vector<uint64_t> controls(ranks.size(), 0);
      s = Communicator::create(self.node, ranks, placement.local, options.timeout_s, controls,
                               std::move(across), &self.comm);
      ASSERT_TRUE(s.ok()) << "rank " << r << ": " << s.message();
      self.comm->group().set_policy({.polls = 20, .yields = 0});
      fn(self);
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace pycomm
