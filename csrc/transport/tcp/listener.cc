#include "transport/tcp/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "transport/tcp/connect.h"

namespace pycomm {

namespace {
int open_spare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }
}  // namespace

Status parse_port_range(const std::string& text, PortRange* out) {
  *out = {};
  if (text.empty()) return Status();
  const size_t dash = text.find('-');
  const std::string first = text.substr(0, dash);
  const std::string last = dash == std::string::npos ? first : text.substr(dash + 1);
  if (parse_port(first, &out->first) && parse_port(last, &out->last) && out->first >= 1 &&
      out->first <= out->last)
    return Status();
  *out = {};
  return Status::error(Code::kValue,
                       format("PYCOMM_PORT_RANGE=%s is no range of ports: write for example 50000-50100, "
                              "with the first not above the last, both between 1 and 65535",
                              text.c_str()));
}

Status Listener::open(const Address& at, PortRange ports, int backlog, std::unique_ptr<Listener>* out) {
  if (at.family == AF_UNSPEC || at.is_any()) {
    return Status::error(Code::kValue, format("a listener binds one address of this host, not \"%s\"",
                                              at.host_to_string().c_str()));
  }
  std::unique_ptr<Listener> listener(new Listener);
  listener->spare_fd_ = open_spare();
  if (listener->spare_fd_ < 0) return Status::from_errno("opening /dev/null", errno);
  int err = EADDRINUSE;
  for (uint32_t port = ports.first; port <= ports.last && (err == EADDRINUSE || err == EACCES); port++) {
    PYCOMM_RETURN_IF_ERROR(
        listener->bind_and_listen(at.with_port(static_cast<uint16_t>(port)), backlog, &err));
  }
  const std::string host = at.host_to_string();
  if (err == EADDRINUSE || err == EACCES) {
    const std::string which = ports.first == 0 ? "any port" : format("ports %u-%u", ports.first, ports.last);
    const char* why =
        err == EACCES ? "this user may not bind those (below 1024 they are root's)" : "all are taken";
    return Status::error(Code::kSystem,
                         format("cannot listen at %s, %s: %s; PYCOMM_PORT_RANGE chooses others", host.c_str(),
                                which.c_str(), why));
  }
  if (err == EADDRNOTAVAIL) {
    std::vector<Interface> interfaces;
    PYCOMM_RETURN_IF_ERROR(list_interfaces(&interfaces));
    return Status::error(Code::kSystem,
                         format("cannot listen at %s: it is no address of this host, which has %s",
                                host.c_str(), to_string(interfaces).c_str()));
  }
  if (err != 0) return Status::from_errno("cannot listen at " + host, err);
  *out = std::move(listener);
  return Status();
}

// *err: 0, or why this port cannot be had.
Status Listener::bind_and_listen(const Address& at, int backlog, int* err) {
  const int fd = socket(at.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return Status::from_errno("socket", errno);
  const int one = 1;
  // So that a port of the range can be had again at once after a restart; it does not let two listen at one
  // port.
  (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (at.family == AF_INET6) (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
  sockaddr_storage addr;
  socklen_t n = at.to_sockaddr(&addr);
  auto* sa = reinterpret_cast<sockaddr*>(&addr);
  *err = bind(fd, sa, n) == 0 && listen(fd, backlog) == 0 ? 0 : errno;
  n = sizeof addr;
  if (*err == 0 && getsockname(fd, sa, &n) != 0) *err = errno;
  if (*err != 0) {
    ::close(fd);
    return Status();
  }
  fd_ = fd;
  address_ = Address::from_sockaddr(sa);
  return Status();
}

Listener::~Listener() {
  if (fd_ >= 0) ::close(fd_);
  if (spare_fd_ >= 0) ::close(spare_fd_);
}

Status Listener::accept(int* fd, Address* from) {
  *fd = -1;
  if (spare_fd_ < 0) spare_fd_ = open_spare();
  // Connections that ended while they waited are passed over, a bounded number in one call.
  for (int attempt = 0; attempt < 64; attempt++) {
    sockaddr_storage addr{};
    socklen_t n = sizeof addr;
    const int accepted = accept4(fd_, reinterpret_cast<sockaddr*>(&addr), &n, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (accepted >= 0) {
      *from = Address::from_sockaddr(reinterpret_cast<sockaddr*>(&addr));
      if (!prepare_socket(accepted).ok()) {  // it has gone already
        ::close(accepted);
        continue;
      }
      *fd = accepted;
      return Status();
    }
    switch (errno) {
      case EAGAIN: return Status();
      case EMFILE:
      case ENFILE: return turn_away();
      case ENOMEM:
      case ENOBUFS: return Status::from_errno("accept at " + address_.to_string(), errno);
      case EBADF:
      case EINVAL:
      case ENOTSOCK:
        return Status::from_errno("the listener at " + address_.to_string() + " is closed", errno);
      default:  // EINTR, ECONNABORTED, and the network's errors of that one connection (accept(2))
        continue;
    }
  }
  return Status();
}

Status Listener::turn_away() {
  if (spare_fd_ >= 0) {
    ::close(spare_fd_);
    spare_fd_ = -1;
    const int accepted = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
    const int err = errno;
    if (accepted >= 0) {
      ::close(accepted);
      n_turned_away_++;
    }
    spare_fd_ = open_spare();
    // Without the spare one EMFILE would come back at once, and the event loop would turn: tell the caller.
    if (spare_fd_ >= 0 && (accepted >= 0 || err == EAGAIN)) return Status();
  }
  return Status::error(Code::kSystem,
                       format("%s has no descriptor left for a connection: raise the limit (ulimit -n)",
                              address_.to_string().c_str()));
}

bool Listener::note_stranger(const Address& from) {
  n_strangers_++;
  for (Source& source : sources_) {
    if (!source.host.same_host(from)) continue;
    source.count++;
    return (source.count & (source.count - 1)) == 0;
  }
  if (sources_.size() < kMaxSources) {
    sources_.push_back({from.with_port(0), 1});
    return true;
  }
  return (n_strangers_ & (n_strangers_ - 1)) == 0;
}

std::string Listener::strangers() const {
  if (n_strangers_ == 0) return "";
  std::string text = format("%llu foreign connection%s:", static_cast<unsigned long long>(n_strangers_),
                            n_strangers_ == 1 ? "" : "s");
  uint64_t n_named = 0;
  for (const Source& source : sources_) {
    text += format("%s %llu from %s", n_named == 0 ? "" : ",", static_cast<unsigned long long>(source.count),
                   source.host.host_to_string().c_str());
    n_named += source.count;
  }
  if (n_named < n_strangers_) {
    text += format(", %llu from elsewhere", static_cast<unsigned long long>(n_strangers_ - n_named));
  }
  return text;
}

}  // namespace pycomm
