// Nets of one process over its loopback interface: connections that claim what another one is, and lines that
// are logged.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>

#include "transport/tcp/net.h"

namespace pycomm {
namespace {

constexpr uint64_t kGroup = 2;

// Notes what comes, and from whom peers are lost.
class Notes final : public Sink {
 public:
  std::vector<std::pair<int, uint32_t>> came;  // from, part
  std::map<int, std::string> gone;
  std::byte* landing(int, const MessageHeader&) override { return nullptr; }
  void arrived(int peer, const MessageHeader& h, std::byte*, std::unique_ptr<std::byte[]>) override {
    came.emplace_back(peer, h.part);
  }
  void sent(uint64_t) override {}
  void lost(int peer, const Status& why) override { gone[peer] = why.message(); }
  void left(int, const std::string&) override {}
  void tick() override {}
};

std::shared_ptr<Net> make_net(int rank, const std::string& host, const std::string& settings = "test") {
  NetOptions o;
  o.rank = rank;
  o.size = 2;
  o.job = "test";
  o.settings_text = settings;
  o.host = host;
  std::array<uint8_t, Secret::kBytes> bytes;
  for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(7 * i + 1);
  Secret secret;
  std::shared_ptr<Net> net;
  Status s = Address::parse("127.0.0.1", &o.at);
  if (s.ok()) s = Secret::from_bytes(bytes.data(), bytes.size(), &secret);
  if (s.ok()) s = Net::create(std::move(o), std::move(secret), &net);
  EXPECT_TRUE(s.ok()) << s.message();
  return net;
}

bool eventually(Net& net, const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < end) {
    {
      const auto lock = net.lock();
      if (condition()) return true;
    }
    usleep(1000);
  }
  return false;
}

void send(Net& net, int to, uint32_t part) {
  MessageHeader h;
  h.group = kGroup;
  h.part = part;
  const auto lock = net.lock();
  net.send_copy(to, 0, h, nullptr);
}

// Two processes that say that they are rank 1: the second one's messages never come, and it learns so.
TEST(Net, ASecondProcessOfTheSameRankIsRefused) {
  Notes at0, at1, twins;
  const auto zero = make_net(0, "a"), one = make_net(1, "b"), twin = make_net(1, "c");
  const std::vector<Address> addresses{zero->address(), one->address()};
  for (const auto& net : {zero, one, twin}) net->set_peers(addresses, {"rank 0", "rank 1"});
  const auto attach = [](Net& net, Notes& notes) {
    const auto lock = net.lock();
    net.attach(kGroup, &notes);
  };
  attach(*zero, at0), attach(*one, at1), attach(*twin, twins);
  send(*one, 0, 1);
  ASSERT_TRUE(eventually(*zero, [&] { return at0.came.size() == 1; }));
  testing::internal::CaptureStderr();
  send(*twin, 0, 666);
  EXPECT_TRUE(eventually(*twin, [&] { return twins.gone.contains(0); }));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("pycomm: rank 0 refused a connection: host c, pid"), std::string::npos) << said;
  EXPECT_NE(said.find("says that it is rank 1, connection 0, which 127.0.0.1:"), std::string::npos) << said;
  send(*one, 0, 2);
  ASSERT_TRUE(eventually(*zero, [&] { return at0.came.size() >= 2; }));
  const std::vector<std::pair<int, uint32_t>> wanted{{1, 1}, {1, 2}};
  {
    const auto lock = zero->lock();
    EXPECT_EQ(at0.came, wanted);
    EXPECT_TRUE(at0.gone.empty());
  }
  for (const auto& net : {zero, one, twin}) {
    const auto lock = net->lock();
    net->detach(kGroup, "");
  }
}

// It ends when it is told; then it is not there any more for our own connection, which is not the reason.
TEST(Net, AProcessOfOtherSettingsIsNamedWithThemAfterItsEnd) {
  Notes at0, at1;
  const auto zero = make_net(0, "a", "sockets 2");
  auto one = make_net(1, "b", "sockets 3");
  const std::vector<Address> addresses{zero->address(), one->address()};
  for (const auto& [net, notes] : {std::pair(zero, &at0), std::pair(one, &at1)}) {
    net->set_peers(addresses, {"rank 0", "rank 1"});
    const auto lock = net->lock();
    net->attach(kGroup, notes);
  }
  send(*one, 0, 1);
  ASSERT_TRUE(eventually(*one, [&] { return at1.gone.contains(0); }));
  {
    const auto lock = one->lock();
    one->detach(kGroup, "");
  }
  one.reset();
  send(*zero, 1, 1);
  ASSERT_TRUE(eventually(*zero, [&] { return at0.gone.contains(1); }));
  const auto lock = zero->lock();
  for (const char* what : {"rank 1 (host b, pid", "sockets 2", "sockets 3"})
    EXPECT_NE(at0.gone[1].find(what), std::string::npos) << at0.gone[1];
  zero->detach(kGroup, "");
}

}  // namespace
}  // namespace pycomm
