// A socket that listens at one address, and survives what strangers do to it.
//
// The port comes from a *port range* (PYCOMM_PORT_RANGE=50000-50100): the first free one, or any free port
// where there is no range. The kernel's queue of connections is bounded by `backlog`; beyond it a peer's
// connect waits. accept() never blocks. When this process has no descriptor left, accept() gives up a spare
// one to take the connection and close it, so that its peer sees an end and the event loop does not turn
// forever; these are counted.
//
// A *stranger* is a connection that could not prove that it belongs to this job. They are counted by source
// (at most kMaxSources sources, the rest together), and note_stranger() says when a line in the log is due:
// for the first of a source, and then each time that their number has doubled. One thread uses a Listener.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/tcp/address.h"

namespace pycomm {

struct PortRange {
  uint16_t first = 0;  // 0: any free port
  uint16_t last = 0;   // included
};
// "50000-50100", "50000", or "" for any free port.
Status parse_port_range(const std::string& text, PortRange* out);

class Listener {
 public:
  static constexpr int kMaxSources = 16;

  // `at`'s port is ignored. Errors say which ports are taken, or why the address cannot be bound.
  static Status open(const Address& at, PortRange ports, int backlog, std::unique_ptr<Listener>* out);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int fd() const { return fd_; }                       // for epoll: readable when somebody waits
  const Address& address() const { return address_; }  // with the port

  // *fd = -1 when nobody waits. The new descriptor is non-blocking, CLOEXEC, TCP_NODELAY, and the caller's.
  // An error is one of the moment (kSystem: no memory, or no descriptor and no spare one either): the
  // listener stays usable, but the caller should wait a little before the next call.
  Status accept(int* fd, Address* from);

  // Counts a stranger from `from`; true when a line in the log is due.
  bool note_stranger(const Address& from);
  uint64_t n_strangers() const { return n_strangers_; }
  uint64_t n_turned_away() const { return n_turned_away_; }  // for want of descriptors
  // "3 foreign connections: 2 from 10.0.0.9, 1 from 10.0.0.7"; empty when there were none.
  std::string strangers() const;

 private:
  struct Source {
    Address host;
    uint64_t count;
  };
  Listener() = default;
  Status bind_and_listen(const Address& at, int backlog, int* err);
  Status turn_away();

  int fd_ = -1;
  int spare_fd_ = -1;
  Address address_;
  uint64_t n_strangers_ = 0;
  uint64_t n_turned_away_ = 0;
  std::vector<Source> sources_;
};

}  // namespace pycomm
