// A connection that is being made, without blocking, with a deadline.
//
// Give fd() to epoll for EPOLLOUT and call step() when it is ready or when time has passed. Errors say how it
// failed (refused, no route, timed out), to whom, from where to where, and what to do: kPeerLost for refused
// and no route, kTimeout for the deadline, kSystem for this host's own trouble. The deadline is an instant of
// now_ns().
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/tcp/address.h"

namespace pycomm {

int64_t now_ns();  // CLOCK_MONOTONIC
inline double clock_s() { return 1e-9 * static_cast<double>(now_ns()); }

// Non-blocking, CLOEXEC, TCP_NODELAY: what every socket here is.
Status prepare_socket(int fd);

class Connector {
 public:
  // `from`: the address to connect from (its port is ignored); AF_UNSPEC: the kernel chooses.
  // `who`: the peer, for messages: "rank 3 (host b)". An error at once, such as no route, is returned here.
  static Status start(const Address& from, const Address& to, std::string who, int64_t deadline_ns,
                      std::unique_ptr<Connector>* out);
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  int fd() const { return fd_; }
  // *connected = false: still under way. After an error the descriptor is closed.
  Status step(bool* connected);
  // The connected descriptor, which is then the caller's.
  int release();

 private:
  Connector() = default;
  Status explain(int err);

  int fd_ = -1;
  int64_t started_ns_ = 0;
  int64_t deadline_ns_ = 0;
  Address from_, to_;
  std::string who_;
};

}  // namespace pycomm
