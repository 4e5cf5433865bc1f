// What a build without libsodium says of several hosts; with it, that it is ready.
#include <gtest/gtest.h>

#include "transport/tcp/handshake.h"

namespace pycomm {
namespace {

TEST(TcpBuild, SeveralHostsAreReadyOrRefused) {
  Secret secret;
  const Status status = cryptography_available();
  EXPECT_EQ(Secret::random(&secret).ok(), status.ok());
  EXPECT_EQ(secret.empty(), !status.ok());
  Handshake handshake;
  EXPECT_EQ(Handshake::initiate(secret, Terms(), "rank 1", 0, &handshake).ok(), status.ok());
  if (!status.ok()) {
    EXPECT_NE(status.message().find("works within one host only"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("libsodium-dev"), std::string::npos);
  }
}

}  // namespace
}  // namespace pycomm
