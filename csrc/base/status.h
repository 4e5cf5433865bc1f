// The outcome of a call inside csrc/: nothing here throws, exceptions are made in bind/ only.
//
// A Status is move-only and one pointer wide. Success is the null pointer, so returning it costs nothing;
// a failure owns a code and a message. `within("while …")` puts context in front of a message as it travels
// up. Codes map one to one onto the Python exceptions of pycomm/errors.py (see bind/bind_errors.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace pycomm {

enum class Code : uint8_t {
  kOk,
  kValue,      // ValueError: an argument has the wrong value; nothing was sent
  kType,       // TypeError: an argument has the wrong type
  kSchedule,   // ScheduleError: a schedule breaks a rule, or cannot be built
  kRefused,    // CommError: some rank refused its call; the communicator stays usable
  kMismatch,   // MismatchError: valid calls that differ; the communicator has failed
  kPeerLost,   // PeerLostError: a peer died, closed or vanished
  kTimeout,    // CommTimeoutError: a deadline passed
  kClosed,     // CommError: the communicator was closed or aborted
  kSystem,     // CommError: the operating system said no (message carries errno's text)
  kInterrupt,  // a pending Python exception (Ctrl-C) is to be raised
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status error(Code code, std::string message) {
    Status s;
    s.rep_ = std::make_unique<Rep>(Rep{code, std::move(message)});
    return s;
  }
  // "<what>: <strerror(errno)>"
  static Status from_errno(const std::string& what, int err);

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : Code::kOk; }
  const std::string& message() const;
  Status within(const std::string& context) && {
    if (rep_) rep_->message = context + ": " + rep_->message;
    return std::move(*this);
  }
  Status clone() const { return rep_ ? error(rep_->code, rep_->message) : Status(); }

 private:
  struct Rep {
    Code code;
    std::string message;
  };
  std::unique_ptr<Rep> rep_;
};

// printf-style message building; the result is never truncated.
std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

// How many of the first `limit` bytes to keep so that no UTF-8 character is cut: users' words are in
// messages.
size_t utf8_prefix(const std::string& text, size_t limit);

#define PYCOMM_RETURN_IF_ERROR(expr)   \
  do {                                 \
    ::pycomm::Status status_ = (expr); \
    if (!status_.ok()) [[unlikely]]    \
      return status_;                  \
  } while (0)

}  // namespace pycomm
