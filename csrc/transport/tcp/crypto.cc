#include "transport/tcp/crypto.h"

#include <cstring>

#ifdef PYCOMM_HAS_SODIUM

#include <sodium.h>

namespace pycomm {

Status cryptography_available() {
  static const bool ready = sodium_init() >= 0;  // once, and safe among threads
  if (ready) return Status();
  return Status::error(Code::kSystem, "libsodium could not start: this system gives no random numbers");
}

namespace crypto {

void random_bytes(std::span<uint8_t> out) { randombytes_buf(out.data(), out.size()); }

Key hmac_sha256(const uint8_t* key, std::initializer_list<std::span<const uint8_t>> parts) {
  Key out;
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, key, 32);
  for (const auto& part : parts) crypto_auth_hmacsha256_update(&state, part.data(), part.size());
  crypto_auth_hmacsha256_final(&state, out.data());
  sodium_memzero(&state, sizeof state);
  return out;
}

Key sha256(std::span<const uint8_t> data) {
  Key out;
  crypto_hash_sha256(out.data(), data.data(), data.size());
  return out;
}

bool equal(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

void wipe(void* data, size_t n_bytes) { sodium_memzero(data, n_bytes); }

bool has_aes() { return crypto_aead_aes256gcm_is_available() != 0; }

Aead::Aead(Session::Cipher cipher, const Key& key) : cipher_(cipher), key_(key) { prepare(); }

Aead::~Aead() {
  wipe(key_.data(), key_.size());
  wipe(aes_.data(), aes_.size());
}

namespace {
static_assert(sizeof(crypto_aead_aes256gcm_state) <= 512 && alignof(crypto_aead_aes256gcm_state) <= 16);
static_assert(crypto_aead_aes256gcm_NPUBBYTES == 12 && crypto_aead_chacha20poly1305_IETF_NPUBBYTES == 12);
static_assert(crypto_aead_aes256gcm_ABYTES == kTagBytes &&
              crypto_aead_chacha20poly1305_IETF_ABYTES == kTagBytes);

using Nonce = std::array<uint8_t, 12>;

Nonce nonce_of(uint64_t number) {
  Nonce nonce{};
  for (size_t i = 0; i < 8; i++) nonce[4 + i] = static_cast<uint8_t>(number >> (8 * i));
  return nonce;
}

const crypto_aead_aes256gcm_state* schedule(const std::array<uint8_t, 512>& aes) {
  return reinterpret_cast<const crypto_aead_aes256gcm_state*>(aes.data());
}
}  // namespace

void Aead::prepare() {
  if (cipher_ == Session::Cipher::kAes256Gcm) {
    crypto_aead_aes256gcm_beforenm(reinterpret_cast<crypto_aead_aes256gcm_state*>(aes_.data()), key_.data());
  }
}

void Aead::next_key() {
  static constexpr uint8_t label[16] = "pycomm next key";
  key_ = hmac_sha256(key_.data(), {label});
  prepare();
}

void Aead::seal(uint64_t number, std::span<const uint8_t> header, const uint8_t* text, size_t n_text,
                uint8_t* out) {
  const Nonce nonce = nonce_of(number);
  if (cipher_ == Session::Cipher::kAes256Gcm) {
    crypto_aead_aes256gcm_encrypt_afternm(out, nullptr, text, n_text, header.data(), header.size(), nullptr,
                                          nonce.data(), schedule(aes_));
  } else {
    crypto_aead_chacha20poly1305_ietf_encrypt(out, nullptr, text, n_text, header.data(), header.size(),
                                              nullptr, nonce.data(), key_.data());
  }
}

bool Aead::open(uint64_t number, std::span<const uint8_t> header, const uint8_t* sealed, size_t n_text,
                uint8_t* out) {
  const Nonce nonce = nonce_of(number);
  const size_t n = n_text + kTagBytes;
  if (cipher_ == Session::Cipher::kAes256Gcm) {
    return crypto_aead_aes256gcm_decrypt_afternm(out, nullptr, nullptr, sealed, n, header.data(),
                                                 header.size(), nonce.data(), schedule(aes_)) == 0;
  }
  return crypto_aead_chacha20poly1305_ietf_decrypt(out, nullptr, nullptr, sealed, n, header.data(),
                                                   header.size(), nonce.data(), key_.data()) == 0;
}

}  // namespace crypto
}  // namespace pycomm

#else  // no libsodium: see the header

namespace pycomm {

Status cryptography_available() {
  return Status::error(
      Code::kSystem,
      "this build of pycomm works within one host only: it was built without libsodium, which "
      "authenticates and encrypts the connections between hosts; install libsodium's development "
      "package (Debian: libsodium-dev, Fedora: libsodium-devel) and build pycomm again");
}

namespace crypto {

void random_bytes(std::span<uint8_t>) {}
Key hmac_sha256(const uint8_t*, std::initializer_list<std::span<const uint8_t>>) { return {}; }
Key sha256(std::span<const uint8_t>) { return {}; }
bool equal(std::span<const uint8_t>, std::span<const uint8_t>) { return false; }
void wipe(void* data, size_t n_bytes) { std::memset(data, 0, n_bytes); }
bool has_aes() { return false; }
Aead::Aead(Session::Cipher cipher, const Key& key) : cipher_(cipher), key_(key) {}
Aead::~Aead() = default;
void Aead::prepare() {}
void Aead::next_key() {}
void Aead::seal(uint64_t, std::span<const uint8_t>, const uint8_t*, size_t n_text, uint8_t* out) {
  std::memset(out, 0, n_text + kTagBytes);  // never the text
}
bool Aead::open(uint64_t, std::span<const uint8_t>, const uint8_t*, size_t, uint8_t*) { return false; }

}  // namespace crypto
}  // namespace pycomm

#endif
