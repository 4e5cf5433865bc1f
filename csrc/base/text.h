// Words that come from elsewhere, made fit to be printed.
//
// A message of an error may hold what another process said: why it failed, why it refused a call, why it
// left. It has proved that it belongs to the job (transport/tcp/handshake.h), but its bytes are its own: they
// may be no UTF-8, for which Python would raise an error instead of ours, or control a terminal.
//
// Pure functions, for any thread. Cost: one pass.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pycomm {

// At most `limit` bytes of valid UTF-8 (RFC 3629), in which every byte of what is not, and every control
// character other than newline and tab, has become '?'. No character is cut.
std::string printable(std::string_view text, size_t limit);

}  // namespace pycomm
