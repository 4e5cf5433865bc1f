// Unix sockets of the rendezvous: listen, connect, and messages that carry a descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace pycomm {

Status unix_listen(const std::string& path, int backlog, int* fd);
// *fd = -1 when nobody listens there yet.
Status unix_connect(const std::string& path, int* fd);
// *fd = -1 when nobody asked within timeout_ms.
Status unix_accept(int listener, int timeout_ms, int* fd);
// The peer's user must be ours; *pid is 0 when it is not visible in this PID namespace.
Status check_peer_user(int socket, int64_t* pid);

Status send_with_fd(int socket, const void* data, size_t n_bytes, int fd);
// Waits up to timeout_ms; *n_received = 0 when nothing came. *fd = -1 when no descriptor was attached.
Status recv_with_fd(int socket, void* data, size_t n_bytes, int timeout_ms, size_t* n_received, int* fd);

}  // namespace pycomm
