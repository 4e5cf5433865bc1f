// Fuzz target: addresses, as peers publish them, and patterns and port ranges, as users write them.
//
// The input's first byte chooses the parser, the rest is the text. What is understood must be the same when
// it is written and read again; what is not must be refused with words; a choice is one of the host's
// addresses.
#include <string>
#include <vector>

#include "fuzz.h"
#include "transport/tcp/address.h"
#include "transport/tcp/listener.h"

namespace pycomm {
namespace {

Address address(const char* text) {
  Address a;
  FUZZ_CHECK(Address::parse(text, &a).ok());
  return a;
}

std::vector<Interface> the_host() {
  const auto make = [](const char* name, const char* text, int prefix_bits, bool is_up) {
    Interface i;
    i.name = name;
    i.address = address(text);
    i.prefix_bits = prefix_bits;
    i.is_up = is_up;
    i.is_loopback = i.name == "lo";
    i.is_host_bridge = i.name == "docker0";
    return i;
  };
  return {make("lo", "127.0.0.1", 8, true),      make("docker0", "172.17.0.1", 16, true),
          make("eth0", "192.168.1.5", 24, true), make("eth10", "10.9.0.5", 16, true),
          make("ib0", "10.5.0.5", 16, false),    make("eth0", "fd00::5", 64, true)};
}

void check_address(const std::string& text) {
  Address a, again;
  const Status status = Address::parse(text, &a);
  FUZZ_CHECK(status.ok() == (a.family != AF_UNSPEC) && status.ok() == status.message().empty());
  if (!status.ok()) return;
  FUZZ_CHECK(Address::parse(a.to_string(), &again).ok() && again == a);
  sockaddr_storage raw;
  FUZZ_CHECK(a.to_sockaddr(&raw) > 0);
  FUZZ_CHECK(Address::from_sockaddr(reinterpret_cast<sockaddr*>(&raw)) == a);
}

void check_pattern(const std::string& pattern) {
  static const std::vector<Interface> host = the_host();
  for (const char* towards : {"", "10.9.1.1", "fd00::9", "127.0.0.1"}) {
    Address out;
    const Address to = *towards == 0 ? Address() : address(towards);
    const Status status = choose_among(host, pattern, to, address("192.168.1.5"), &out);
    bool is_one = false;
    for (const Interface& i : host) is_one = is_one || (i.is_up && i.address == out);
    FUZZ_CHECK(status.ok() == is_one && status.ok() == status.message().empty());
  }
}

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  using namespace pycomm;
  if (n_bytes == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), n_bytes - 1);
  PortRange range;
  switch (data[0] % 3) {
    case 0: check_address(text); break;
    case 1: check_pattern(text); break;
    default:
      if (parse_port_range(text, &range).ok()) {
        FUZZ_CHECK(range.first <= range.last && (range.first != 0 || text.empty()));
      }
  }
  return 0;
}
