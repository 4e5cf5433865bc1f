#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>

namespace pycomm {

namespace {
std::atomic<LogLevel> chosen{LogLevel::kWarning};
}  // namespace

Status parse_log_level(const std::string& text, LogLevel* out) {
  if (text.empty() || text == "warning") {
    *out = LogLevel::kWarning;
  } else if (text == "off") {
    *out = LogLevel::kOff;
  } else if (text == "info") {
    *out = LogLevel::kInfo;
  } else {
    return Status::error(Code::kValue, "PYCOMM_LOG_LEVEL must be off, warning or info, got \"" + text + "\"");
  }
  return Status();
}

void set_log_level(LogLevel level) { chosen.store(level, std::memory_order_relaxed); }

bool logs(LogLevel level) {
  const LogLevel upto = chosen.load(std::memory_order_relaxed);
  return level != LogLevel::kOff && level <= upto;
}

void log_line(LogLevel level, const std::string& sentence) {
  if (!logs(level)) return;
  std::string line = "pycomm: " + sentence;
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  }
  line += '\n';
  // A standard error that is closed, or that nobody reads, is no reason to fail or to wait.
  pollfd ready{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&ready, 1, 0) <= 0 || (ready.revents & POLLOUT) == 0) return;
  const ssize_t ignored = ::write(STDERR_FILENO, line.data(), line.size());
  static_cast<void>(ignored);
}

}  // namespace pycomm
