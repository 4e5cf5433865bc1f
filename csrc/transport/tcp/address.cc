#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace pycomm {

namespace {
constexpr std::array<uint8_t, 12> kMappedPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

Status bad_address(const std::string& text, const char* why) {
  return Status::error(
      Code::kValue, format("\"%s\" is no address (%s): write 10.0.0.2:50001 or [fd00::2]:50001, the port is "
                           "optional",
                           text.c_str(), why));
}

void unmap(Address* a) {
  if (a->family != AF_INET6 || !std::equal(kMappedPrefix.begin(), kMappedPrefix.end(), a->bytes.begin()))
    return;
  std::array<uint8_t, 16> v4{};
  std::copy_n(a->bytes.begin() + 12, 4, v4.begin());
  a->family = AF_INET;
  a->bytes = v4;
  a->interface_index = 0;
}
}  // namespace

bool parse_port(const std::string& text, uint16_t* port) {
  if (text.empty() || text.size() > 5 || text.find_first_not_of("0123456789") != std::string::npos)
    return false;
  const long value = std::strtol(text.c_str(), nullptr, 10);
  *port = static_cast<uint16_t>(value);
  return value <= 65535;
}

Status Address::parse(const std::string& text, Address* out) {
  Address a;
  std::string host = text;
  const bool bracketed = !text.empty() && text[0] == '[';
  size_t colon = std::string::npos;  // the port's
  if (bracketed) {
    const size_t end = text.find(']');
    if (end == std::string::npos) return bad_address(text, "a ] is missing");
    host = text.substr(1, end - 1);
    if (end + 1 < text.size()) {
      colon = end + 1;
      if (text[colon] != ':') return bad_address(text, "after ] only a port may follow");
    }
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    colon = text.find(':');
    host = text.substr(0, colon);
  }
  if (colon != std::string::npos && !parse_port(text.substr(colon + 1), &a.port))
    return bad_address(text, "the port is not between 0 and 65535");
  const size_t percent = host.find('%');
  if (percent != std::string::npos) {
    const std::string name = host.substr(percent + 1);
    a.interface_index = if_nametoindex(name.c_str());
    if (a.interface_index == 0)
      return bad_address(text, format("this host has no interface %s", name.c_str()).c_str());
    host.resize(percent);
  }
  if (!bracketed && percent == std::string::npos && inet_pton(AF_INET, host.c_str(), a.bytes.data()) == 1) {
    a.family = AF_INET;
  } else if (inet_pton(AF_INET6, host.c_str(), a.bytes.data()) == 1) {
    a.family = AF_INET6;
  } else {
    return bad_address(text, "neither IPv4 nor IPv6");
  }
  unmap(&a);
  if (!a.is_link_local()) a.interface_index = 0;
  *out = a;
  return Status();
}

Address Address::from_sockaddr(const sockaddr* from) {
  Address a;
  if (from == nullptr) return a;
  if (from->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, from, sizeof in);
    a.family = AF_INET;
    a.port = ntohs(in.sin_port);
    std::memcpy(a.bytes.data(), &in.sin_addr, 4);
  } else if (from->sa_family == AF_INET6) {
    sockaddr_in6 in6;
    std::memcpy(&in6, from, sizeof in6);
    a.family = AF_INET6;
    a.port = ntohs(in6.sin6_port);
    std::memcpy(a.bytes.data(), &in6.sin6_addr, 16);
    if (a.is_link_local()) a.interface_index = in6.sin6_scope_id;
    unmap(&a);
  }
  return a;
}

Address Address::loopback(sa_family_t family) {
  Address a;
  a.family = family;
  if (family == AF_INET) {
    a.bytes[0] = 127;
    a.bytes[3] = 1;
  } else {
    a.bytes[15] = 1;
  }
  return a;
}

std::string Address::host_to_string() const {
  if (family == AF_UNSPEC) return "no address";
  char text[INET6_ADDRSTRLEN] = {};
  inet_ntop(family, bytes.data(), text, sizeof text);
  if (interface_index == 0) return text;
  char name[IF_NAMESIZE] = {};
  if (if_indextoname(interface_index, name) == nullptr) return format("%s%%%u", text, interface_index);
  return format("%s%%%s", text, name);
}

std::string Address::to_string() const {
  const std::string host = host_to_string();
  if (port == 0) return host;
  return format(family == AF_INET6 ? "[%s]:%u" : "%s:%u", host.c_str(), port);
}

socklen_t Address::to_sockaddr(sockaddr_storage* out) const {
  std::memset(out, 0, sizeof *out);
  if (family == AF_INET) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(port);
    std::memcpy(&in.sin_addr, bytes.data(), 4);
    std::memcpy(out, &in, sizeof in);
    return sizeof in;
  }
  if (family == AF_INET6) {
    sockaddr_in6 in6{};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(port);
    in6.sin6_scope_id = interface_index;
    std::memcpy(&in6.sin6_addr, bytes.data(), 16);
    std::memcpy(out, &in6, sizeof in6);
    return sizeof in6;
  }
  return 0;
}

Address Address::with_port(uint16_t other) const {
  Address a = *this;
  a.port = other;
  return a;
}

bool Address::is_loopback() const {
  if (family == AF_INET) return bytes[0] == 127;
  return family == AF_INET6 && bytes == loopback(AF_INET6).bytes;
}

bool Address::is_link_local() const {
  if (family == AF_INET) return bytes[0] == 169 && bytes[1] == 254;
  return family == AF_INET6 && bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
}

bool Address::is_any() const {
  return family != AF_UNSPEC && std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; });
}

bool Address::same_host(const Address& other) const {
  return family == other.family && bytes == other.bytes && interface_index == other.interface_index;
}

Status resolve(const std::string& host, uint16_t port, std::vector<Address>* out) {
  out->clear();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (rc != 0) {
    const char* why = rc == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(rc);
    return Status::error(Code::kSystem,
                         format("the host name \"%s\" cannot be resolved (%s): mend it, or /etc/hosts, "
                                "or use an address",
                                host.c_str(), why));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> guard(found, freeaddrinfo);
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    const Address address = Address::from_sockaddr(a->ai_addr).with_port(port);
    if (address.family == AF_UNSPEC || std::find(out->begin(), out->end(), address) != out->end()) continue;
    out->push_back(address);
  }
  if (!out->empty()) return Status();
  return Status::error(Code::kSystem,
                       format("the host name \"%s\" has neither an IPv4 nor an IPv6 address", host.c_str()));
}

}  // namespace pycomm
