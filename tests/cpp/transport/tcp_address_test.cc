// Addresses as text, and the choice among interfaces: of made-up hosts, of this one, and of a network
// namespace.
#include <gtest/gtest.h>
#include <net/if.h>
#include <unistd.h>

#include <cstdlib>

#include "transport/tcp/address.h"

namespace pycomm {
namespace {

Address address(const std::string& text) {
  Address a;
  const Status status = Address::parse(text, &a);
  EXPECT_TRUE(status.ok()) << status.message();
  return a;
}

bool mentions(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

TEST(TcpAddress, TextsAndBack) {
  for (const char* text : {"10.0.0.2:50001", "10.0.0.2", "[fd00::2]:50001", "fd00::2", "[::1]:65535",
                           "[fe80::1%lo]:5", "fe80::1%lo", "255.255.255.255:1"})
    EXPECT_EQ(address(text).to_string(), text);
  EXPECT_EQ(address("[::ffff:10.0.0.2]:5").to_string(), "10.0.0.2:5");
  EXPECT_EQ(address("[::1]").to_string(), "::1");
  EXPECT_EQ(address("0:0:0:0:0:0:0:1"), address("::1"));
  EXPECT_EQ(address("fe80::1%lo").interface_index, if_nametoindex("lo"));
  EXPECT_EQ(Address().to_string(), "no address");
  for (const char* text : {"10.0.0.2:50001", "[fd00::2]:50001", "[fe80::1%lo]:5"}) {
    sockaddr_storage raw;
    EXPECT_GT(address(text).to_sockaddr(&raw), 0u);
    EXPECT_EQ(Address::from_sockaddr(reinterpret_cast<sockaddr*>(&raw)), address(text));
  }
}

TEST(TcpAddress, BadTextsAreRefused) {
  for (const char* text : {"", "host", "10.0.0", "10.0.0.2:", "10.0.0.2:x", "10.0.0.2:65536", "10.0.0.2:-1",
                           "[::1", "[::1]5", "[::1]:", "::1::", "[10.0.0.2]:5", "10.0.0.2:5:5",
                           "fe80::1%none0", "010.0.0.1.1", "10.0.0.2 ", "%lo"}) {
    Address a;
    const Status status = Address::parse(text, &a);
    EXPECT_EQ(status.code(), Code::kValue) << text;
    EXPECT_TRUE(mentions(status, "10.0.0.2:50001")) << status.message();
    EXPECT_EQ(a.family, AF_UNSPEC);
  }
}

TEST(TcpAddress, Kinds) {
  EXPECT_TRUE(address("127.3.2.1").is_loopback() && address("::1").is_loopback());
  EXPECT_FALSE(address("128.0.0.1").is_loopback() || address("::2").is_loopback());
  EXPECT_TRUE(address("169.254.3.3").is_link_local() && address("fe80::7").is_link_local());
  EXPECT_TRUE(address("0.0.0.0").is_any() && address("::").is_any());
}

Interface make(const std::string& name, const std::string& text, int prefix_bits, bool is_up = true) {
  Interface i;
  i.name = name;
  i.address = address(text);
  i.prefix_bits = prefix_bits;
  i.is_up = is_up;
  i.is_loopback = name == "lo";
  i.is_host_bridge = name == "docker0";
  return i;
}

class TcpChoice : public testing::Test {
 protected:
  std::string choose(const std::string& pattern, const std::string& towards, const std::string& by_route) {
    const Address to = towards.empty() ? Address() : address(towards);
    const Address route = by_route.empty() ? Address() : address(by_route);
    Address out;
    status_ = choose_among(host_, pattern, to, route, &out);
    return status_.ok() ? out.to_string() : "error";
  }
  // A host as they are: two networks, a fast one, a container engine, a card without a cable.
  std::vector<Interface> host_ = {
      make("lo", "127.0.0.1", 8),         make("lo", "::1", 128),       make("docker0", "172.17.0.1", 16),
      make("eth0", "192.168.1.5", 24),    make("eth1", "10.0.0.5", 16), make("eth10", "10.9.0.5", 16),
      make("ib0", "10.5.0.5", 16, false), make("eth0", "fd00::5", 64),  make("eth1", "fe80::5", 64)};
  Status status_;
};

TEST_F(TcpChoice, TheRouteDecides) {
  EXPECT_EQ(choose("", "10.0.7.7", "10.0.0.5"), "10.0.0.5");
  EXPECT_EQ(choose("", "8.8.8.8", "192.168.1.5"), "192.168.1.5");
  EXPECT_EQ(choose("", "fd00::9", "fd00::5"), "fd00::5");
  EXPECT_EQ(choose("", "", "192.168.1.5"), "192.168.1.5");
  EXPECT_EQ(choose("", "", ""), "192.168.1.5") << "no default route: the first that serves";
}

TEST_F(TcpChoice, NeverLoopbackOrABridgeForOtherHosts) {
  EXPECT_EQ(choose("", "172.17.0.9", "172.17.0.1"), "error");
  EXPECT_TRUE(mentions(status_, "through docker0, which no other host reaches")) << status_.message();
  EXPECT_EQ(choose("", "10.77.0.1", ""), "error");
  EXPECT_TRUE(mentions(status_, "no route from this host to its peer at 10.77.0.1")) << status_.message();
  EXPECT_TRUE(mentions(status_, "eth1 10.0.0.5/16") && mentions(status_, "ib0 10.5.0.5/16 (down)"));
  EXPECT_EQ(choose("", "", "172.17.0.1"), "192.168.1.5");
}

TEST_F(TcpChoice, ThisHostItselfIsReachedOverAnything) {
  EXPECT_EQ(choose("", "127.0.0.1", "127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(choose("", "10.0.0.5", "10.0.0.5"), "10.0.0.5");
  EXPECT_EQ(choose("", "172.17.0.1", "172.17.0.1"), "172.17.0.1");
  EXPECT_EQ(choose("", "::1", "::1"), "::1");
}

TEST_F(TcpChoice, Patterns) {
  EXPECT_EQ(choose("eth1", "192.168.1.9", "192.168.1.5"), "10.0.0.5") << "this name, not eth10";
  EXPECT_EQ(choose("=eth1", "192.168.1.9", "192.168.1.5"), "10.0.0.5");
  EXPECT_EQ(choose("eth", "10.9.3.3", "10.9.0.5"), "10.9.0.5") << "a beginning, as NCCL";
  EXPECT_EQ(choose("eth1?", "", ""), "10.9.0.5");
  EXPECT_EQ(choose("e*", "10.0.3.3", ""), "10.0.0.5") << "the network that the peer is in";
  EXPECT_EQ(choose("10.0.0.0/16", "192.168.1.9", "192.168.1.5"), "10.0.0.5");
  EXPECT_EQ(choose("10.0.0.0/8", "10.9.1.1", "10.9.0.5"), "10.9.0.5");
  EXPECT_EQ(choose("10.9.0.5", "", ""), "10.9.0.5");
  EXPECT_EQ(choose("fd00::/8", "", ""), "fd00::5");
  EXPECT_EQ(choose("ib0, eth1", "", ""), "10.0.0.5") << "what is down is passed over";
  EXPECT_EQ(choose("docker0", "172.17.0.9", "172.17.0.1"), "172.17.0.1") << "named, so it is meant";
  EXPECT_EQ(choose("lo", "", ""), "127.0.0.1");
  EXPECT_EQ(choose("^eth0", "192.168.1.9", "192.168.1.5"), "10.0.0.5");
  EXPECT_EQ(choose("^docker,eth0", "", "192.168.1.5"), "10.0.0.5") << "^ before a list excludes all of it";
  EXPECT_EQ(choose("e*,^eth1", "10.0.0.9", "10.0.0.5"), "192.168.1.5");
  EXPECT_EQ(choose("^10.0.0.0/8", "", "10.0.0.5"), "192.168.1.5");
  EXPECT_EQ(choose("eth1", "fe80::9%lo", ""), "fe80::5");
}

TEST_F(TcpChoice, PatternsThatMatchNothingListWhatThereIs) {
  for (const char* pattern : {"wlan0", "=eth", "ib0", "192.0.2.0/24", "^e*,ib0", "enp*"}) {
    EXPECT_EQ(choose(pattern, "10.0.0.9", "10.0.0.5"), "error") << pattern;
    EXPECT_EQ(status_.code(), Code::kValue);
    EXPECT_TRUE(mentions(status_, std::string("PYCOMM_SOCKET_IFNAME=") + pattern + " matches no interface"))
        << status_.message();
    EXPECT_TRUE(mentions(status_, "this host has: lo 127.0.0.1/8") && mentions(status_, "eth10 10.9.0.5/16"));
  }
  EXPECT_EQ(choose("eth10", "fd00::9", ""), "error") << "it has no IPv6 address";
}

TEST_F(TcpChoice, PatternsThatAreNotUnderstoodAreRefused) {
  for (const char* pattern : {",", "eth0,", "^", "eth0,,eth1", "10.0.0.0/33", "10.0.0.0/", "fd00::/129",
                              "10.0.0/8", "eth0/8", "10.0.0.0/x", "=", "10.0.0.0/99999999999"}) {
    EXPECT_EQ(choose(pattern, "", ""), "error") << pattern;
    EXPECT_EQ(status_.code(), Code::kValue) << pattern;
    EXPECT_TRUE(mentions(status_, "PYCOMM_SOCKET_IFNAME=")) << status_.message();
  }
}

TEST(TcpInterfaces, ThisHostHasLoopback) {
  std::vector<Interface> interfaces;
  ASSERT_TRUE(list_interfaces(&interfaces).ok());
  bool found = false;
  for (const Interface& i : interfaces) {
    if (!(i.address == Address::loopback(AF_INET))) continue;
    found = true;
    EXPECT_EQ(i.prefix_bits, 8);
    EXPECT_TRUE(i.is_loopback && i.is_up && !i.is_host_bridge);
  }
  EXPECT_TRUE(found) << to_string(interfaces);
  Address out;
  ASSERT_TRUE(choose_address("", Address::loopback(AF_INET).with_port(5), &out).ok());
  EXPECT_EQ(out, Address::loopback(AF_INET));
  EXPECT_TRUE(choose_address("lo", {}, &out).ok());
  EXPECT_TRUE(mentions(choose_address("none*", {}, &out), "this host has: "));
}

TEST(TcpInterfaces, HostNamesAreResolved) {
  std::vector<Address> found;
  ASSERT_TRUE(resolve("127.0.0.3", 7, &found).ok());
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].to_string(), "127.0.0.3:7");
  ASSERT_TRUE(resolve("localhost", 7, &found).ok());
  EXPECT_TRUE(found.at(0).is_loopback());
  const Status status = resolve("no-such-host.invalid", 7, &found);  // RFC 6761
  EXPECT_EQ(status.code(), Code::kSystem);
  EXPECT_TRUE(mentions(status, "\"no-such-host.invalid\" cannot be resolved")) << status.message();
}

}  // namespace
}  // namespace pycomm
