// What this host's kernel knows of a connection's other end: whether that host still acknowledges.
//
// *Silent*: something waits to be acknowledged and is not, for so long. The *heartbeat* limit (seconds) is
// how long a silent host may be taken for living; the kernel then ends the connection with ETIMEDOUT. A host
// whose kernel acknowledges is alive, whatever its process does: a process that is stopped, or slow, takes
// nothing, so that the connection is *stuffed* (its window is closed), and the kernel would end that too,
// heartbeat or not (TCP_USER_TIMEOUT counts from when it was stuffed, tcp(7)): while the host acknowledges,
// the limit is moved on. Source: tcp_info, tcp_probe_timer and tcp_keepalive_timer of Linux. Cost: two or
// three system calls.
#pragma once

namespace pycomm {

struct Link {
  double silent_s = 0;
  double heard_s = 0;  // ago: the last acknowledgement
  bool stuffed = false;
};

Link look_at_link(int fd);

// On a connection that may be quiet, too: the kernel then asks every second.
void set_heartbeat(int fd, double heartbeat_s);
// The limit of a stuffed connection, from when it was stuffed; else the heartbeat's.
void set_limit(int fd, double limit_s);

}  // namespace pycomm
