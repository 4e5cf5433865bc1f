#include "transport/tcp/connect.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace pycomm {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

namespace {
#ifndef TCP_RTO_MAX_MS
constexpr int TCP_RTO_MAX_MS = 44;  // Linux 6.15
#endif
constexpr int kRetryMs = 1000;
}  // namespace

Status prepare_socket(int fd) {
  const int one = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0)
    return Status::from_errno("TCP_NODELAY", errno);
  // While a link is down the kernel tries after 0.2, 0.4, 0.8 … 6.4 s: one that comes back after 6 s would
  // not be found before the limit of 10 s. An older kernel does not know the option, and has that gap.
  (void)setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &kRetryMs, sizeof kRetryMs);
  return Status();
}

namespace {
Status bind_source(int fd, const Address& from) {
  sockaddr_storage addr;
  const socklen_t n = from.with_port(0).to_sockaddr(&addr);
  // The port is then chosen at connect, for this peer: many more connections have room.
  const int one = 1;
  (void)setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
  if (bind(fd, reinterpret_cast<sockaddr*>(&addr), n) == 0) return Status();
  return Status::from_errno("cannot connect from " + from.host_to_string(), errno);
}

// A connect to a free port of one's own range may meet itself (simultaneous open): nobody listens there.
bool met_itself(int fd) {
  sockaddr_storage a{}, b{};
  socklen_t n_a = sizeof a, n_b = sizeof b;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&a), &n_a) != 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&b), &n_b) != 0) return false;
  return Address::from_sockaddr(reinterpret_cast<sockaddr*>(&a)) ==
         Address::from_sockaddr(reinterpret_cast<sockaddr*>(&b));
}
}  // namespace

Status Connector::start(const Address& from, const Address& to, std::string who, int64_t deadline_ns,
                        std::unique_ptr<Connector>* out) {
  std::unique_ptr<Connector> c(new Connector);
  c->started_ns_ = now_ns();
  c->deadline_ns_ = deadline_ns;
  c->from_ = from;
  c->to_ = to;
  c->who_ = std::move(who);
  sockaddr_storage addr;
  const socklen_t n = to.to_sockaddr(&addr);
  if (n == 0 || to.port == 0) {
    return Status::error(Code::kValue, format("%s has no address to connect to (\"%s\")", c->who_.c_str(),
                                              to.to_string().c_str()));
  }
  if (from.family != AF_UNSPEC && from.family != to.family) {
    return Status::error(
        Code::kValue, format("cannot connect from %s to %s at %s: one is IPv4, the other IPv6; choose with "
                             "PYCOMM_SOCKET_IFNAME interfaces of one kind on all hosts",
                             from.host_to_string().c_str(), c->who_.c_str(), to.to_string().c_str()));
  }
  c->fd_ = socket(to.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (c->fd_ < 0) return c->explain(errno);
  PYCOMM_RETURN_IF_ERROR(prepare_socket(c->fd_));
  if (from.family != AF_UNSPEC) PYCOMM_RETURN_IF_ERROR(bind_source(c->fd_, from));
  if (connect(c->fd_, reinterpret_cast<sockaddr*>(&addr), n) != 0 && errno != EINPROGRESS && errno != EINTR)
    return c->explain(errno);
  *out = std::move(c);
  return Status();
}

Connector::~Connector() {
  if (fd_ >= 0) ::close(fd_);
}

Status Connector::step(bool* connected) {
  *connected = false;
  if (fd_ < 0) return Status::error(Code::kSystem, "this connection has failed, or was released, before");
  pollfd p{fd_, POLLOUT, 0};
  if (poll(&p, 1, 0) <= 0 || p.revents == 0) return now_ns() < deadline_ns_ ? Status() : explain(ETIMEDOUT);
  int err = 0;
  socklen_t n = sizeof err;
  if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &err, &n) != 0) err = errno;
  if (err == 0 && met_itself(fd_)) err = ECONNREFUSED;
  if (err != 0) return explain(err);
  *connected = true;
  return Status();
}

int Connector::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

Status Connector::explain(int err) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  const std::string source = from_.family == AF_UNSPEC ? "this host" : from_.host_to_string();
  const std::string route =
      format("to %s: from %s to %s", who_.c_str(), source.c_str(), to_.to_string().c_str());
  const double seconds = 1e-9 * static_cast<double>(now_ns() - started_ns_);
  switch (err) {
    case ECONNREFUSED:
      return Status::error(
          Code::kPeerLost,
          format("connection refused %s: nothing listens there; that process has ended, or its "
                 "address is another host's",
                 route.c_str()));
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case EHOSTDOWN:
      return Status::error(Code::kPeerLost,
                           format("no route %s (%s): is that host down, or the wrong interface chosen? "
                                  "PYCOMM_SOCKET_IFNAME chooses it, on each host its own",
                                  route.c_str(), std::strerror(err)));
    case ECONNRESET: return Status::error(Code::kPeerLost, format("connection reset %s", route.c_str()));
    case ETIMEDOUT:
      return Status::error(
          Code::kTimeout,
          format("timed out after %.1f s connecting %s: no answer; a firewall drops it (open the "
                 "ports of PYCOMM_PORT_RANGE between the hosts), the host is down, or the wrong "
                 "interface was chosen (PYCOMM_SOCKET_IFNAME)",
                 seconds, route.c_str()));
    case EMFILE:
    case ENFILE:
      return Status::error(Code::kSystem, format("cannot connect %s: %s; raise the limit (ulimit -n)",
                                                 route.c_str(), std::strerror(err)));
    default:
      return Status::error(Code::kSystem, format("cannot connect %s: %s", route.c_str(), std::strerror(err)));
  }
}

}  // namespace pycomm
