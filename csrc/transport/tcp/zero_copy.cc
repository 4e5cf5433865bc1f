#include "transport/tcp/zero_copy.h"

// clang-format off
#include <time.h>  // errqueue.h needs timespec
#include <linux/errqueue.h>
// clang-format on
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace pycomm {

void ZeroCopy::enable(int fd, Mode mode) {
  if (mode == Mode::kOff) return;
  const int one = 1;
  fd_ = fd;
  always_ = mode == Mode::kAlways;
  on_ = setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0;  // an older kernel: copies
}

void ZeroCopy::complete(uint32_t first, uint32_t last) {
  ahead_.emplace(first, last);
  for (auto next = ahead_.find(n_done_); next != ahead_.end(); next = ahead_.find(n_done_)) {
    n_done_ = next->second + 1;
    ahead_.erase(next);
  }
}

void ZeroCopy::reap() {
  while (pending()) {
    alignas(cmsghdr) char control[128];
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t rc;
    do {
      rc = recvmsg(fd_, &message, MSG_ERRQUEUE | MSG_DONTWAIT);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0) return;  // none; a broken connection is told by the next send
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      const bool is_error = (c->cmsg_level == SOL_IP && c->cmsg_type == IP_RECVERR) ||
                            (c->cmsg_level == SOL_IPV6 && c->cmsg_type == IPV6_RECVERR);
      if (!is_error) continue;
      sock_extended_err e;
      std::memcpy(&e, CMSG_DATA(c), sizeof e);
      if (e.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
      if ((e.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0 && !always_) on_ = false;
      complete(e.ee_info, e.ee_data);
    }
  }
}

}  // namespace pycomm
