#include "transport/tcp/secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstring>

#include "transport/tcp/crypto.h"

namespace pycomm {

namespace {
constexpr size_t kMaxFileBytes = 4096;
constexpr const char* kRecipe = "openssl rand -hex 32";

bool is_space(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

int hex_digit(uint8_t c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// A buffer that is wiped when it ends.
struct FileBytes {
  std::array<uint8_t, kMaxFileBytes + 1> data;
  size_t n = 0;
  ~FileBytes() { crypto::wipe(data.data(), data.size()); }
};

Status check_file(const struct stat& st, const std::string& path) {
  if (!S_ISREG(st.st_mode)) {
    return Status::error(Code::kValue, format("the secret file %s is not a regular file", path.c_str()));
  }
  if (st.st_uid != geteuid()) {
    return Status::error(
        Code::kValue,
        format("the secret file %s belongs to user %u, but this process runs as user %u: make a "
               "copy of your own (install -m 600 %s <path>) and set PYCOMM_SECRET_FILE to that",
               path.c_str(), st.st_uid, geteuid(), path.c_str()));
  }
  if ((st.st_mode & 07177) != 0) {  // all but the owner's reading and writing
    return Status::error(
        Code::kValue, format("the secret file %s has mode %04o, so others may use it: run chmod 600 %s; if "
                             "others could read it before, make a new secret (%s > %s)",
                             path.c_str(), st.st_mode & 07777, path.c_str(), kRecipe, path.c_str()));
  }
  return Status();
}

Status read_file(const std::string& path, FileBytes* out) {
  // Non-blocking: opening a pipe must not wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    const int err = errno;
    const char* fix = err == ENOENT
                          ? "; make one with (umask 077; openssl rand -hex 32 > FILE) and copy it to every "
                            "host, or mend PYCOMM_SECRET_FILE"
                          : "";
    return Status::error(Code::kValue, format("the secret file %s cannot be opened: %s%s", path.c_str(),
                                              std::strerror(err), fix));
  }
  struct stat st;
  Status status = fstat(fd, &st) == 0 ? check_file(st, path) : Status::from_errno("fstat " + path, errno);
  while (status.ok() && out->n < out->data.size()) {
    const ssize_t n = read(fd, out->data.data() + out->n, out->data.size() - out->n);
    if (n == 0) break;
    if (n < 0 && errno != EINTR) status = Status::from_errno("reading the secret file " + path, errno);
    if (n > 0) out->n += static_cast<size_t>(n);
  }
  ::close(fd);
  return status;
}

// Text loses the white space at its end, hexadecimal digits become bytes; see the header.
Status decode(FileBytes* file) {
  uint8_t* data = file->data.data();
  const bool is_text =
      std::all_of(data, data + file->n, [](uint8_t c) { return is_space(c) || (c >= 0x20 && c < 0x7f); });
  if (!is_text) return Status();
  while (file->n > 0 && is_space(data[file->n - 1])) file->n--;
  if (!std::all_of(data, data + file->n, [](uint8_t c) { return hex_digit(c) >= 0; })) return Status();
  if (file->n % 2 != 0 || file->n < 2 * Secret::kBytes) {
    return Status::error(Code::kValue,
                         format("it has %zu hexadecimal digits, but an even number of at least %zu is "
                                "needed: make one with %s",
                                file->n, 2 * Secret::kBytes, kRecipe));
  }
  for (size_t i = 0; i < file->n / 2; i++)
    data[i] = static_cast<uint8_t>(hex_digit(data[2 * i]) << 4 | hex_digit(data[2 * i + 1]));
  file->n /= 2;
  return Status();
}
}  // namespace

Secret::~Secret() { wipe(); }

Secret::Secret(Secret&& other) noexcept : empty_(other.empty_), bytes_(other.bytes_) { other.wipe(); }

Secret& Secret::operator=(Secret&& other) noexcept {
  if (this != &other) {
    empty_ = other.empty_;
    bytes_ = other.bytes_;
    other.wipe();
  }
  return *this;
}

void Secret::wipe() {
  crypto::wipe(bytes_.data(), bytes_.size());
  empty_ = true;
}

Status Secret::random(Secret* out) {
  PYCOMM_RETURN_IF_ERROR(cryptography_available());
  crypto::random_bytes(out->bytes_);
  out->empty_ = false;
  return Status();
}

Status Secret::from_bytes(const void* data, size_t n_bytes, Secret* out) {
  PYCOMM_RETURN_IF_ERROR(cryptography_available());
  const auto* bytes = static_cast<const uint8_t*>(data);
  if (n_bytes < kBytes) {
    return Status::error(
        Code::kValue,
        format("it has %zu bytes, but at least %zu are needed: make one with %s", n_bytes, kBytes, kRecipe));
  }
  std::bitset<256> seen;
  for (size_t i = 0; i < n_bytes; i++) seen.set(bytes[i]);
  if (seen.count() < 8) {  // of 32 random bytes this happens with a probability below 2^-100
    return Status::error(
        Code::kValue,
        format("it is not random (%zu different bytes in it): make one with %s", seen.count(), kRecipe));
  }
  if (n_bytes == kBytes) {
    std::copy_n(bytes, kBytes, out->bytes_.begin());
  } else {
    out->bytes_ = crypto::sha256({bytes, n_bytes});
  }
  out->empty_ = false;
  return Status();
}

Status Secret::from_file(const std::string& path, Secret* out) {
  PYCOMM_RETURN_IF_ERROR(cryptography_available());
  FileBytes file;
  PYCOMM_RETURN_IF_ERROR(read_file(path, &file));
  if (file.n > kMaxFileBytes) {
    return Status::error(Code::kValue,
                         format("the secret file %s is longer than %zu bytes: is it another file? Make "
                                "one with %s",
                                path.c_str(), kMaxFileBytes, kRecipe));
  }
  Status status = decode(&file);
  if (status.ok()) status = from_bytes(file.data.data(), file.n, out);
  return std::move(status).within("the secret file " + path);
}

Secret Secret::clone() const {
  Secret copy;
  copy.empty_ = empty_;
  copy.bytes_ = bytes_;
  return copy;
}

std::string Secret::fingerprint() const {
  static constexpr uint8_t label[] = "pycomm fingerprint";
  if (empty_) return "none";
  const crypto::Key mac = crypto::hmac_sha256(bytes_.data(), {label});
  return format("%02x%02x%02x%02x", mac[0], mac[1], mac[2], mac[3]);
}

}  // namespace pycomm
