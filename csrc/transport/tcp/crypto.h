// The few functions of libsodium that this folder uses, and nothing of our own making in their place.
//
// A build without libsodium has these functions too, but cryptography_available() (secret.h) then fails, and
// with it every Secret, so that none of them is ever reached. None allocates; none can fail but Aead::open.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "transport/tcp/handshake.h"

namespace pycomm::crypto {

using Key = std::array<uint8_t, 32>;
inline constexpr size_t kTagBytes = 16;

void random_bytes(std::span<uint8_t> out);
// Of the parts, one after the other.
Key hmac_sha256(const uint8_t* key, std::initializer_list<std::span<const uint8_t>> parts);
Key sha256(std::span<const uint8_t> data);
bool equal(std::span<const uint8_t> a, std::span<const uint8_t> b);  // in constant time
void wipe(void* data, size_t n_bytes);
bool has_aes();  // whether this processor can do Cipher::kAes256Gcm

// Authenticated encryption of numbered messages with one key. A number must not come twice.
class Aead {
 public:
  Aead(Session::Cipher cipher, const Key& key);
  ~Aead();
  Aead(const Aead&) = delete;
  Aead& operator=(const Aead&) = delete;

  // `out` takes n_text + kTagBytes bytes, and may begin where `text` does.
  void seal(uint64_t number, std::span<const uint8_t> header, const uint8_t* text, size_t n_text,
            uint8_t* out);
  // `sealed` is n_text + kTagBytes bytes; `out` takes n_text, and may begin where `sealed` does. False: it is
  // not what was sealed with this key, number and header; `out` is then worthless.
  bool open(uint64_t number, std::span<const uint8_t> header, const uint8_t* sealed, size_t n_text,
            uint8_t* out);
  // Goes on with the key that follows from this one, and cannot be led back.
  void next_key();

 private:
  void prepare();

  Session::Cipher cipher_;
  Key key_;
  alignas(16) std::array<uint8_t, 512> aes_{};  // the key's schedule
};

}  // namespace pycomm::crypto
