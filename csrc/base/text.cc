#include "base/text.h"

#include <algorithm>

namespace pycomm {

namespace {
// Bytes of the UTF-8 character that `text` begins with (RFC 3629); 0: of none.
size_t utf8_length(std::string_view text) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](size_t i) { return (at(i) & 0xC0) == 0x80; };
  if (at(0) < 0x80) return 1;
  if (at(0) >= 0xC2 && at(0) < 0xE0) return follows(1) ? 2 : 0;
  if (at(0) >= 0xE0 && at(0) < 0xF0) {
    const bool too_long = at(0) == 0xE0 && at(1) < 0xA0, surrogate = at(0) == 0xED && at(1) > 0x9F;
    return follows(1) && follows(2) && !too_long && !surrogate ? 3 : 0;
  }
  if (at(0) >= 0xF0 && at(0) < 0xF5) {
    const bool too_long = at(0) == 0xF0 && at(1) < 0x90, too_high = at(0) == 0xF4 && at(1) > 0x8F;
    return follows(1) && follows(2) && follows(3) && !too_long && !too_high ? 4 : 0;
  }
  return 0;
}
}  // namespace

std::string printable(std::string_view text, size_t limit) {
  std::string out;
  while (!text.empty()) {
    const size_t n = utf8_length(text);
    if (out.size() + std::max<size_t>(n, 1) > limit) break;
    const auto c = static_cast<unsigned char>(text[0]);
    const bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F;
    if (n == 0 || control)
      out += '?';
    else
      out += text.substr(0, n);
    text.remove_prefix(std::max<size_t>(n, 1));
  }
  return out;
}

}  // namespace pycomm
