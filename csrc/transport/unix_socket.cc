#include "transport/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace pycomm {

namespace {
Status address_of(const std::string& path, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  if (path.size() >= sizeof(out->sun_path)) {
    return Status::error(
        Code::kValue, format("the run folder's path is too long for a unix socket (%zu bytes, at most %zu): "
                             "%s; set PYCOMM_RUN_DIR to a shorter one",
                             path.size(), sizeof(out->sun_path) - 1, path.c_str()));
  }
  std::memcpy(out->sun_path, path.c_str(), path.size() + 1);
  return Status();
}

bool readable(int fd, int timeout_ms) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, timeout_ms) > 0;
}
}  // namespace

namespace {
// Whether nobody listens at `path` although it exists: what a killed process leaves. A live one listens right
// after it has bound.
bool is_left_over(const sockaddr_un& addr) {
  for (int i = 0; i < 20; i++) {
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0) return false;
    const bool refused =
        connect(s, reinterpret_cast<const sockaddr*>(&addr), sizeof addr) != 0 && errno == ECONNREFUSED;
    ::close(s);
    if (!refused) return false;
    usleep(10'000);
  }
  return true;
}
}  // namespace

Status unix_listen(const std::string& path, int backlog, int* fd) {
  sockaddr_un addr;
  PYCOMM_RETURN_IF_ERROR(address_of(path, &addr));
  *fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (*fd < 0) return Status::from_errno("socket", errno);
  const auto bound = [&] { return bind(*fd, reinterpret_cast<sockaddr*>(&addr), sizeof addr) == 0; };
  if (!bound() && !(errno == EADDRINUSE && is_left_over(addr) && unlink(path.c_str()) == 0 && bound())) {
    const int err = errno;
    ::close(*fd);
    if (err == EADDRINUSE) {
      return Status::error(Code::kSystem, path +
                                              " is in use: two processes have the same rank, or two jobs "
                                              "the same run folder");
    }
    return Status::from_errno("bind " + path, err);
  }
  if (listen(*fd, backlog) != 0) {
    const int err = errno;
    ::close(*fd);
    return Status::from_errno("listen " + path, err);
  }
  return Status();
}

Status unix_connect(const std::string& path, int* fd) {
  sockaddr_un addr;
  PYCOMM_RETURN_IF_ERROR(address_of(path, &addr));
  const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  *fd = -1;
  if (s < 0) return Status::from_errno("socket", errno);
  if (connect(s, reinterpret_cast<sockaddr*>(&addr), sizeof addr) == 0) {
    *fd = s;
    return Status();
  }
  const int err = errno;
  ::close(s);
  // Not there yet, bound but not listening yet, or its queue is full: all pass with time.
  if (err == ENOENT || err == ECONNREFUSED || err == EAGAIN || err == EINTR) return Status();
  return Status::from_errno("connect " + path, err);
}

Status unix_accept(int listener, int timeout_ms, int* fd) {
  *fd = -1;
  if (!readable(listener, timeout_ms)) return Status();
  *fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (*fd < 0 && errno != EINTR && errno != EAGAIN && errno != ECONNABORTED)
    return Status::from_errno("accept", errno);
  return Status();
}

Status check_peer_user(int socket, int64_t* pid) {
  ucred cred;
  socklen_t n = sizeof cred;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &cred, &n) != 0)
    return Status::from_errno("SO_PEERCRED", errno);
  if (cred.uid != geteuid()) {
    return Status::error(
        Code::kSystem, format("a process of user %u tried to join this job of user %u", cred.uid, geteuid()));
  }
  *pid = cred.pid;
  return Status();
}

Status send_with_fd(int socket, const void* data, size_t n_bytes, int fd) {
  iovec iov{const_cast<void*>(data), n_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr msg{};
  msg.msg_iov = &iov;
  msg.msg_iovlen = 1;
  msg.msg_control = control;
  msg.msg_controllen = sizeof control;
  cmsghdr* c = CMSG_FIRSTHDR(&msg);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
  if (sendmsg(socket, &msg, MSG_NOSIGNAL) != static_cast<ssize_t>(n_bytes))
    return Status::from_errno("sendmsg", errno);
  return Status();
}

Status recv_with_fd(int socket, void* data, size_t n_bytes, int timeout_ms, size_t* n_received, int* fd) {
  *n_received = 0;
  *fd = -1;
  if (!readable(socket, timeout_ms)) return Status();
  iovec iov{data, n_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr msg{};
  msg.msg_iov = &iov;
  msg.msg_iovlen = 1;
  msg.msg_control = control;
  msg.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(socket, &msg, MSG_CMSG_CLOEXEC);
  if (n < 0) return errno == EINTR ? Status() : Status::from_errno("recvmsg", errno);
  for (cmsghdr* c = CMSG_FIRSTHDR(&msg); c != nullptr; c = CMSG_NXTHDR(&msg, c)) {
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) std::memcpy(fd, CMSG_DATA(c), sizeof *fd);
  }
  if (n == 0) return Status::error(Code::kPeerLost, "the peer hung up");
  *n_received = static_cast<size_t>(n);
  return Status();
}

}  // namespace pycomm
