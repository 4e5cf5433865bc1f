#include "transport/tcp/link.h"

#include <linux/tcp.h>  // has what glibc's netinet/tcp.h has not
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace pycomm {

namespace {
// One that was lost on the way has been sent again by then.
constexpr int kLostProbes = 2;

void set(int fd, int level, int name, int value) { (void)setsockopt(fd, level, name, &value, sizeof value); }
}  // namespace

Link look_at_link(int fd) {
  tcp_info info{};
  socklen_t n = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) != 0) return {};
  Link link;
  link.heard_s = 1e-3 * info.tcpi_last_ack_recv;
  const bool knows_unsent = n >= offsetof(tcp_info, tcpi_notsent_bytes) + sizeof info.tcpi_notsent_bytes;
  link.stuffed = info.tcpi_unacked == 0 && knows_unsent && info.tcpi_notsent_bytes > 0;
  const bool silent = (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes >= kLostProbes;
  if (silent) link.silent_s = link.heard_s;
  return link;
}

void set_heartbeat(int fd, double heartbeat_s) {
  set_limit(fd, heartbeat_s);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, static_cast<int>(std::clamp(std::ceil(heartbeat_s), 1.0, 127.0)));
}

void set_limit(int fd, double limit_s) {
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::clamp(1e3 * limit_s, 1.0, 2e9)));
}

}  // namespace pycomm
