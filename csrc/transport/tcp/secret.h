// The job's secret: 32 bytes that every process of the job knows and nobody else does.
//
// Between hosts it comes from the file PYCOMM_SECRET_FILE; on one machine it may be made at random and handed
// on through the run folder or an inherited descriptor. The memory is wiped when a Secret ends or is moved
// from.
//
// The file holds at least 32 bytes, as
//   64 or more hexadecimal digits    openssl rand -hex 32 > secret
//   other printable text             openssl rand -base64 32 > secret
//   raw bytes                        head -c 32 /dev/urandom > secret
// White space at the end of a text is not part of it. 32 bytes are used as they are; more are hashed
// (SHA-256).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace pycomm {

class Secret {
 public:
  static constexpr size_t kBytes = 32;

  Secret() = default;  // empty: authenticates nobody
  ~Secret();
  Secret(Secret&& other) noexcept;
  Secret& operator=(Secret&& other) noexcept;
  Secret(const Secret&) = delete;
  Secret& operator=(const Secret&) = delete;

  static Status random(Secret* out);
  // At least kBytes bytes.
  static Status from_bytes(const void* data, size_t n_bytes, Secret* out);
  // Refused, with the command that mends it, unless the file is a regular one of this user that nobody else
  // may read or write (mode 0600 or stricter).
  static Status from_file(const std::string& path, Secret* out);

  Secret clone() const;
  bool empty() const { return empty_; }
  const uint8_t* data() const { return bytes_.data(); }
  // Eight hexadecimal digits that tell whether two hosts have the same secret, and nothing else about it.
  std::string fingerprint() const;

 private:
  void wipe();

  bool empty_ = true;
  std::array<uint8_t, kBytes> bytes_{};
};

// Whether this build can authenticate and encrypt, that is, has libsodium, and the system gives random
// numbers. Else an error that says so, and how to get it. Every entry to this folder that needs it asks by
// itself.
Status cryptography_available();

}  // namespace pycomm
