// The secret: which files are taken, what they mean, and the words with which others are refused.
#include <gtest/gtest.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <numeric>
#include <vector>

#include "transport/tcp/secret.h"

namespace pycomm {
namespace {

class TcpSecret : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/pycomm-secret-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    path_ = folder_ + "/secret";
    bytes_.resize(32);
    std::iota(bytes_.begin(), bytes_.end(), uint8_t{0xf0});  // not text
  }
  void TearDown() override {
    unlink(path_.c_str());
    rmdir(folder_.c_str());
  }
  void write(const std::string& content, mode_t mode = 0600) {
    unlink(path_.c_str());
    std::ofstream(path_, std::ios::binary) << content;
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
  }
  std::string raw() const { return {bytes_.begin(), bytes_.end()}; }
  std::string hex(const char* digit) const {
    std::string text;
    for (uint8_t byte : bytes_) text += format(digit, byte);
    return text;
  }
  // The bytes of a file that must be taken.
  std::vector<uint8_t> taken() {
    Secret secret;
    const Status status = Secret::from_file(path_, &secret);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(secret.empty(), !status.ok());
    return {secret.data(), secret.data() + Secret::kBytes};
  }
  void refused(const std::string& words) {
    Secret secret;
    const Status status = Secret::from_file(path_, &secret);
    EXPECT_EQ(status.code(), Code::kValue);
    EXPECT_TRUE(secret.empty());
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(path_), std::string::npos) << status.message();
  }
  std::vector<uint8_t> sha256(const std::string& text) {
    std::vector<uint8_t> hash(32);
    crypto_hash_sha256(hash.data(), reinterpret_cast<const uint8_t*>(text.data()), text.size());
    return hash;
  }

  std::string folder_, path_;
  std::vector<uint8_t> bytes_;
};

TEST_F(TcpSecret, RawHexadecimalAndTextFiles) {
  write(raw());
  EXPECT_EQ(taken(), bytes_);
  for (const char* digit : {"%02x", "%02X"}) {
    for (const char* end : {"", "\n", " \r\n\n"}) {
      write(hex(digit) + end);
      EXPECT_EQ(taken(), bytes_);
    }
  }
  const std::string base64 = "q83v6m7cUJr0M5lXbnk8Qw1VZp3sYfTgHdKaLoIe+Rs=";
  write(base64);
  EXPECT_EQ(taken(), sha256(base64));
  write(base64 + "\n");
  EXPECT_EQ(taken(), sha256(base64)) << "an editor's newline is not part of it";
  write(raw() + "\n");
  EXPECT_EQ(taken(), sha256(raw() + "\n")) << "but raw bytes are as they are";
  write(raw(), 0400);
  EXPECT_EQ(taken(), bytes_);
}

TEST_F(TcpSecret, FilesOfOthersAreRefused) {
  for (const mode_t mode : {0640, 0604, 0660, 0602, 0644, 0777, 0700, 04600}) {
    write(raw(), mode);
    refused("run chmod 600 " + path_);
  }
  if (geteuid() != 0) GTEST_SKIP() << "*** ONLY ROOT can give a file to another user";
  write(raw());
  ASSERT_EQ(chown(path_.c_str(), 12345, static_cast<gid_t>(-1)), 0);
  refused("belongs to user 12345");
}

TEST_F(TcpSecret, WhatIsNoSecretIsRefused) {
  refused("No such file");
  refused("openssl rand -hex 32");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  refused("not a regular file");
  unlink(path_.c_str());
  ASSERT_EQ(mkdir(path_.c_str(), 0700), 0);
  refused("not a regular file");
  rmdir(path_.c_str());
  write("");
  refused("it has 0 ");
  write(raw().substr(1));
  refused("31 bytes");
  write(hex("%02x").substr(2));
  refused("62 hexadecimal digits");
  write(hex("%02x") + "a");
  refused("65 hexadecimal digits");
  write("a short password\n");
  refused("16 bytes");
  write(std::string(32, '\0'));
  refused("not random");
  write(std::string(5000, 'x'));
  refused("longer than");
}

TEST_F(TcpSecret, RandomOnesDifferAndOnesMovedFromAreGone) {
  Secret a, b;
  ASSERT_TRUE(Secret::random(&a).ok() && Secret::random(&b).ok());
  EXPECT_NE(std::memcmp(a.data(), b.data(), Secret::kBytes), 0);
  EXPECT_NE(a.fingerprint(), b.fingerprint());
  const Secret copy = a.clone();
  const std::string fingerprint = a.fingerprint();
  EXPECT_EQ(fingerprint.size(), 8u);
  const Secret moved = std::move(a);
  EXPECT_EQ(copy.fingerprint(), fingerprint);
  EXPECT_EQ(moved.fingerprint(), fingerprint);
  EXPECT_TRUE(a.empty());  // NOLINT: what is left of it is the question
  EXPECT_EQ(std::vector<uint8_t>(a.data(), a.data() + Secret::kBytes),
            std::vector<uint8_t>(Secret::kBytes, 0));
}

}  // namespace
}  // namespace pycomm
