// Lines for a person, on standard error: what must be said while a call goes on, and so can be no exception.
//
// Each line is "pycomm: " and one sentence, written by one system call, so that those of several ranks that
// share a terminal do not mix. PYCOMM_LOG_LEVEL chooses: `off`, `warning` (what is unless it is set: somebody
// waits long, a connection was refused), `info` (also what may interest whoever looks for a fault). Any
// thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace pycomm {

enum class LogLevel : uint8_t { kOff, kWarning, kInfo };

// "off", "warning", "info"; "" is "warning".
Status parse_log_level(const std::string& text, LogLevel* out);
void set_log_level(LogLevel level);
bool logs(LogLevel level);
// `sentence` without a line's end. What is in it that a terminal would obey (escape sequences) becomes "?".
void log_line(LogLevel level, const std::string& sentence);

}  // namespace pycomm
