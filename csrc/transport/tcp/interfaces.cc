// The interfaces of this host, and which of their addresses peers shall use: the second half of address.h.
//
// A choice has three steps: what the pattern lets through, what can serve (up, of the peer's family, and,
// unless named, neither loopback nor a bridge of this host alone), and which of those is best. choose_among
// is pure, so that hosts with any interfaces can be tested; choose_address gives it the real ones and the
// kernel's route, which it asks by connecting a UDP socket: that sends nothing.
#include <fnmatch.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>

#include "transport/tcp/address.h"

namespace pycomm {

namespace {

int prefix_bits_of(const Address& mask) {
  int bits = 0;
  for (uint8_t byte : mask.bytes) bits += __builtin_popcount(byte);
  return bits;
}

bool in_network(const Address& a, const Address& network, int prefix_bits) {
  if (a.family != network.family) return false;
  for (int bit = 0; bit < prefix_bits; bit++) {
    const size_t byte = static_cast<size_t>(bit / 8);
    if (((a.bytes[byte] ^ network.bytes[byte]) >> (7 - bit % 8)) & 1) return false;
  }
  return true;
}

bool is_host_bridge_name(const std::string& name) {
  for (const char* prefix : {"docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr"})
    if (name.rfind(prefix, 0) == 0) return true;
  return false;
}

// One item of a pattern.
struct Item {
  bool excludes = false;
  bool exact = false;
  std::string name;                // or a glob
  std::optional<Address> network;  // instead of the name
  int prefix_bits = 0;
};

Status parse_network(const std::string& text, Item* item) {
  const size_t slash = text.find('/');
  Address network;
  const Status parsed = Address::parse(text.substr(0, slash), &network);
  if (!parsed.ok()) return slash == std::string::npos ? Status() : parsed.clone();  // a name
  const int most = network.family == AF_INET ? 32 : 128;
  item->prefix_bits = most;
  if (slash != std::string::npos) {
    const std::string bits = text.substr(slash + 1);
    const bool is_number =
        !bits.empty() && bits.size() <= 3 && bits.find_first_not_of("0123456789") == std::string::npos;
    item->prefix_bits = is_number ? std::stoi(bits) : most + 1;
    if (item->prefix_bits > most) {
      return Status::error(Code::kValue,
                           format("\"%s\" is no network: after the / comes a number of bits from 0 to %d",
                                  text.c_str(), most));
    }
  }
  item->network = network;
  return Status();
}

Status parse_pattern(const std::string& pattern, std::vector<Item>* out) {
  const bool all_exclude = !pattern.empty() && pattern[0] == '^';
  size_t begin = 0;
  while (begin <= pattern.size() && !pattern.empty()) {
    const size_t end = std::min(pattern.find(',', begin), pattern.size());
    std::string text = pattern.substr(begin, end - begin);
    begin = end + 1;
    text.erase(0, std::min(text.find_first_not_of(' '), text.size()));
    text.erase(text.find_last_not_of(' ') + 1);
    Item item;
    item.excludes = all_exclude;
    if (!text.empty() && text[0] == '^') {
      item.excludes = true;
      text.erase(0, 1);
    }
    if (!text.empty() && text[0] == '=') {
      item.exact = true;
      text.erase(0, 1);
    }
    if (text.empty()) {
      return Status::error(Code::kValue,
                           format("PYCOMM_SOCKET_IFNAME=%s has an empty item: write for example eth0, enp*, "
                                  "10.0.0.0/8 or ^docker0,virbr0",
                                  pattern.c_str()));
    }
    item.name = text;
    if (!item.exact)
      PYCOMM_RETURN_IF_ERROR(parse_network(text, &item).within("PYCOMM_SOCKET_IFNAME=" + pattern));
    out->push_back(std::move(item));
  }
  return Status();
}

bool matches(const Item& item, const Interface& interface, const std::vector<Interface>& all) {
  if (item.network) return in_network(interface.address, *item.network, item.prefix_bits);
  if (item.exact) return interface.name == item.name;
  if (item.name.find_first_of("*?[") != std::string::npos)
    return fnmatch(item.name.c_str(), interface.name.c_str(), 0) == 0;
  const bool exists =
      std::any_of(all.begin(), all.end(), [&](const Interface& other) { return other.name == item.name; });
  return exists ? interface.name == item.name : interface.name.rfind(item.name, 0) == 0;
}

// What a choice is made from, and the words for its errors.
struct Choice {
  const std::vector<Interface>& all;
  const std::string& pattern;
  const Address& towards;
  const Address& by_route;
  std::vector<Item> items;

  bool names_some() const {
    return std::any_of(items.begin(), items.end(), [](const Item& item) { return !item.excludes; });
  }
  bool towards_is_here() const {
    return towards.is_loopback() || std::any_of(all.begin(), all.end(), [&](const Interface& interface) {
             return interface.address.same_host(towards.with_port(0));
           });
  }
  bool lets_through(const Interface& interface) const {
    bool named = !names_some();
    for (const Item& item : items) {
      if (!matches(item, interface, all)) continue;
      if (item.excludes) return false;
      named = true;
    }
    return named;
  }
  bool can_serve(const Interface& interface) const {
    if (!interface.is_up) return false;
    if (towards.family != AF_UNSPEC && interface.address.family != towards.family) return false;
    if (names_some()) return true;
    return towards_is_here() || !(interface.address.is_loopback() || interface.is_host_bridge);
  }
  // Higher is better.
  int rank(const Interface& interface) const {
    int score = 0;
    if (interface.address.same_host(by_route)) score += 8;
    if (towards.family != AF_UNSPEC && in_network(towards, interface.address, interface.prefix_bits))
      score += 4;
    // An address of the interface lo that is no loopback address is routed to this host: good if the route
    // says so.
    if (!interface.address.is_link_local() && !interface.is_loopback) score += 2;
    if (interface.address.family == AF_INET) score += 1;
    return score;
  }

  Status none() const {
    const std::string have = all.empty() ? "none" : to_string(all);
    const std::string peer =
        towards.family == AF_UNSPEC ? "other hosts" : "its peer at " + towards.host_to_string();
    if (!pattern.empty()) {
      const bool any =
          std::any_of(all.begin(), all.end(), [&](const Interface& i) { return lets_through(i); });
      const char* what =
          any ? "matches no interface that is up and serves to reach" : "matches no interface to reach";
      return Status::error(Code::kValue, format("PYCOMM_SOCKET_IFNAME=%s %s %s; this host has: %s",
                                                pattern.c_str(), what, peer.c_str(), have.c_str()));
    }
    return Status::error(
        Code::kSystem,
        format("no route from this host to %s: no interface serves; it has: %s; bring one up, or "
               "name one with PYCOMM_SOCKET_IFNAME",
               peer.c_str(), have.c_str()));
  }
  // Without a pattern the route decides alone; an unfit one is told rather than replaced by a guess.
  Status unfit_route() const {
    const auto used = std::find_if(all.begin(), all.end(),
                                   [&](const Interface& i) { return i.address.same_host(by_route); });
    const std::string have = to_string(all);
    const std::string to = towards.host_to_string();
    if (used == all.end()) {
      return Status::error(
          Code::kSystem,
          format("no route from this host to its peer at %s; this host has: %s; name the interface "
                 "to use with PYCOMM_SOCKET_IFNAME, on that host too",
                 to.c_str(), have.c_str()));
    }
    return Status::error(
        Code::kSystem,
        format("the route to the peer at %s goes through %s, which no other host reaches: that host "
               "chose a wrong address, or this one has a wrong route; this host has: %s; name the "
               "interface to use with PYCOMM_SOCKET_IFNAME, on that host too",
               to.c_str(), used->name.c_str(), have.c_str()));
  }
};

// The source address of a packet to `to`; AF_UNSPEC: no route.
Address route_to(const Address& to) {
  sockaddr_storage addr;
  socklen_t n = to.with_port(to.port == 0 ? 9 : to.port).to_sockaddr(&addr);
  const int s = n == 0 ? -1 : socket(to.family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (s < 0) return {};
  auto* sa = reinterpret_cast<sockaddr*>(&addr);
  Address source;
  if (connect(s, sa, n) == 0) {
    n = sizeof addr;
    if (getsockname(s, sa, &n) == 0) source = Address::from_sockaddr(sa).with_port(0);
  }
  ::close(s);
  return source;
}

Address default_route() {
  for (const char* documentation_host : {"192.0.2.1", "2001:db8::1"}) {  // RFC 5737, RFC 3849: nobody's
    Address to;
    if (!Address::parse(documentation_host, &to).ok()) continue;
    const Address source = route_to(to);
    if (source.family != AF_UNSPEC) return source;
  }
  return {};
}
}  // namespace

Status list_interfaces(std::vector<Interface>* out) {
  out->clear();
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return Status::from_errno("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(list, freeifaddrs);
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    Interface interface;
    interface.address = Address::from_sockaddr(i->ifa_addr);
    if (interface.address.family == AF_UNSPEC) continue;
    interface.name = i->ifa_name;
    interface.prefix_bits = prefix_bits_of(Address::from_sockaddr(i->ifa_netmask));
    interface.is_up = (i->ifa_flags & IFF_UP) != 0 && (i->ifa_flags & IFF_RUNNING) != 0;
    interface.is_loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
    interface.is_host_bridge = is_host_bridge_name(interface.name);
    out->push_back(std::move(interface));
  }
  return Status();
}

std::string to_string(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& i : interfaces) {
    text += format("%s%s %s/%d%s", text.empty() ? "" : ", ", i.name.c_str(),
                   i.address.host_to_string().c_str(), i.prefix_bits, i.is_up ? "" : " (down)");
  }
  return text;
}

Status choose_among(const std::vector<Interface>& interfaces, const std::string& pattern,
                    const Address& towards, const Address& by_route, Address* out) {
  Choice choice{interfaces, pattern, towards, by_route, {}};
  PYCOMM_RETURN_IF_ERROR(parse_pattern(pattern, &choice.items));
  const Interface* best = nullptr;
  for (const Interface& interface : interfaces) {
    if (!choice.lets_through(interface) || !choice.can_serve(interface)) continue;
    if (best == nullptr || choice.rank(interface) > choice.rank(*best)) best = &interface;
  }
  if (best == nullptr) return choice.none();
  if (pattern.empty() && towards.family != AF_UNSPEC && !best->address.same_host(by_route))
    return choice.unfit_route();
  *out = best->address;
  return Status();
}

Status choose_address(const std::string& pattern, const Address& towards, Address* out) {
  std::vector<Interface> interfaces;
  PYCOMM_RETURN_IF_ERROR(list_interfaces(&interfaces));
  const Address by_route = towards.family == AF_UNSPEC ? default_route() : route_to(towards);
  return choose_among(interfaces, pattern, towards, by_route, out);
}

}  // namespace pycomm
