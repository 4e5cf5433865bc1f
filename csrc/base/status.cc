#include "base/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace pycomm {

const std::string& Status::message() const {
  static const std::string empty;
  return rep_ ? rep_->message : empty;
}

Status Status::from_errno(const std::string& what, int err) {
  return error(Code::kSystem, what + ": " + std::strerror(err));
}

std::string format(const char* fmt, ...) {
  va_list args, copy;
  va_start(args, fmt);
  va_copy(copy, args);
  const int n = std::vsnprintf(nullptr, 0, fmt, args);
  va_end(args);
  std::string out(n > 0 ? static_cast<size_t>(n) : 0, '\0');
  if (n > 0) std::vsnprintf(out.data(), out.size() + 1, fmt, copy);
  va_end(copy);
  return out;
}

size_t utf8_prefix(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text.size();
  size_t n = limit;
  while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) n--;
  return n;
}

}  // namespace pycomm
