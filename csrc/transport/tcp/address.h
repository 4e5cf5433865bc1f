// Where a socket is: an IP address and a port; the interfaces of this host; and the choice among them.
//
// An *Address* is a plain value, IPv4 or IPv6; IPv4 mapped into IPv6 is kept as IPv4. A link-local IPv6
// address bears its interface, whose number has a meaning on this host only: a peer that is told of one must
// replace it.
//
// A *pattern* is PYCOMM_SOCKET_IFNAME's: a list with commas of
//   eth0      the interface of this name, or if there is none, all whose names begin so (as
//   NCCL_SOCKET_IFNAME) =eth0     the interface of exactly this name enp*s0    a glob pattern: * ? [a-c]
//   10.0.0.0/8, fd00::/8, 10.1.2.3    every address in this network, on whatever interface
//   ^docker0  not this one; a ^ before the whole list excludes all in the list (as NCCL's)
// Nothing here blocks but resolve(), which asks the system's resolver.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace pycomm {

struct Address {
  sa_family_t family = AF_UNSPEC;   // AF_INET, AF_INET6; AF_UNSPEC: none
  uint16_t port = 0;                // 0: any
  uint32_t interface_index = 0;     // link-local IPv6 only
  std::array<uint8_t, 16> bytes{};  // in network order; IPv4 takes the first four

  // "10.0.0.2:50001", "[fe80::1%eth0]:5", and both without a port: "10.0.0.2", "fe80::1%eth0", "[::1]".
  static Status parse(const std::string& text, Address* out);
  static Address from_sockaddr(const sockaddr* from);  // AF_UNSPEC for families other than the two
  static Address loopback(sa_family_t family);

  std::string to_string() const;                       // with the port, unless that is 0
  std::string host_to_string() const;                  // without it, and without brackets
  socklen_t to_sockaddr(sockaddr_storage* out) const;  // the length; 0 for AF_UNSPEC
  Address with_port(uint16_t other) const;
  bool is_loopback() const;                    // 127.0.0.0/8, ::1
  bool is_link_local() const;                  // 169.254.0.0/16, fe80::/10
  bool is_any() const;                         // 0.0.0.0, ::
  bool same_host(const Address& other) const;  // all but the port
  bool operator==(const Address& other) const { return same_host(other) && port == other.port; }
};

// A number from 0 to 65535, of digits only.
bool parse_port(const std::string& text, uint16_t* port);

// One address of an interface; an interface with several addresses appears several times.
struct Interface {
  std::string name;
  Address address;  // port 0
  int prefix_bits = 0;
  bool is_up = false;
  bool is_loopback = false;
  // Made by a container engine or hypervisor for this host alone (docker0, br-…, virbr…, veth…): other hosts
  // have no route to it, or have another one of the same address.
  bool is_host_bridge = false;
};

// In the kernel's order.
Status list_interfaces(std::vector<Interface>* out);
// "eth0 10.0.0.2/24, docker0 172.17.0.1/16 (down), lo 127.0.0.1/8": for messages.
std::string to_string(const std::vector<Interface>& interfaces);

// The address of this host under which its peers reach it; port 0.
// `pattern`: see above; empty: the source that the kernel's routes choose towards the peer's address
// `towards`. `towards`: of family AF_UNSPEC when no peer is known yet: the kernel's default route then
// counts. Where several interfaces match the pattern: the one that the route takes, else the one whose
// network `towards` is in, else the first; link-local ones last. Without a pattern neither loopback nor a
// bridge of this host alone is ever chosen, unless `towards` is this host itself.
Status choose_address(const std::string& pattern, const Address& towards, Address* out);
// The same among these interfaces, without asking the kernel: `by_route` is what its routes choose
// (AF_UNSPEC: no route). Pure.
Status choose_among(const std::vector<Interface>& interfaces, const std::string& pattern,
                    const Address& towards, const Address& by_route, Address* out);

// All addresses of a host name or a written address, in the resolver's order. May block as long as the
// resolver does. A name of another host that resolves to loopback only is not refused here: see
// Address::is_loopback.
Status resolve(const std::string& host, uint16_t port, std::vector<Address>* out);

}  // namespace pycomm
