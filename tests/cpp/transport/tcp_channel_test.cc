// Channels: what is written arrives, whole and in order, plain and encrypted, however it is cut; what was
// changed on the way, or ends too early, is a lost peer. The text is a counter's bytes, computed again where
// it is compared.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "transport/tcp/channel.h"
#include "transport/tcp/records.h"
#include "transport/tcp_pair.h"

namespace pycomm {
namespace {

using Cipher = Session::Cipher;

uint8_t text_at(size_t i) { return static_cast<uint8_t>(i * 131 + (i >> 8) * 7 + (i >> 16)); }

std::vector<uint8_t> text_of(size_t n) {
  std::vector<uint8_t> text(n);
  for (size_t i = 0; i < n; i++) text[i] = text_at(i);
  return text;
}

// Writes `text` in parts of random sizes (also empty ones), reads it in random pieces, one thread on each
// side.
void stream(Channel* from, Channel* to, const std::vector<uint8_t>& text, uint32_t seed, size_t largest) {
  std::thread writer([&] {
    std::mt19937 random(seed);
    size_t n_done = 0;
    while (n_done < text.size()) {
      std::vector<iovec> parts;
      size_t n = n_done;
      for (size_t i = 0; i < 1 + random() % 20 && n < text.size(); i++) {
        const size_t n_part = std::min<size_t>(random() % (largest + 1), text.size() - n);
        parts.push_back({const_cast<uint8_t*>(text.data() + n), n_part});
        n += n_part;
      }
      size_t n_written = 0;
      const Status status = from->write(parts.data(), static_cast<int>(parts.size()), &n_written);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_LE(n_written, n - n_done);
      n_done += n_written;
      if (n_written == 0 && n > n_done) {
        ASSERT_TRUE(wait_for(from->fd(), POLLOUT));
      }
    }
    while (from->unsent()) {
      ASSERT_TRUE(wait_for(from->fd(), POLLOUT));
      ASSERT_TRUE(from->flush().ok());
    }
  });
  std::mt19937 random(seed + 1);
  std::vector<uint8_t> got(text.size());
  size_t n_done = 0;
  while (n_done < text.size()) {
    iovec parts[3];
    int n_parts = 0;
    size_t n = n_done;
    for (size_t i = 0; i < 1 + random() % 3 && n < text.size(); i++) {
      const size_t n_part = std::min<size_t>(random() % (largest + 1), text.size() - n);
      parts[n_parts++] = {got.data() + n, n_part};
      n += n_part;
    }
    size_t n_read = 0;
    const Status status = to->read(parts, n_parts, &n_read);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) break;
    n_done += n_read;
    if (n_read == 0 && n > n_done && !to->has_buffered() && !wait_for(to->fd(), POLLIN)) break;
  }
  writer.join();
  EXPECT_EQ(n_done, text.size());
  EXPECT_TRUE(got == text);
  EXPECT_FALSE(to->has_buffered());
  EXPECT_EQ(from->n_written(), text.size());
  EXPECT_EQ(to->n_read(), text.size());
  EXPECT_EQ(from->n_sent(), to->n_received());
}

class TcpChannel : public testing::TestWithParam<bool> {};  // encrypted?
INSTANTIATE_TEST_SUITE_P(, TcpChannel, testing::Bool(),
                         [](const auto& info) { return info.param ? "Encrypted" : "Plain"; });

TEST_P(TcpChannel, RandomPiecesArriveInOrder) {
  for (const size_t largest : {5, 3000, 200'000}) {
    const Channels channels = channel_pair(GetParam());
    EXPECT_EQ(channels.a->encrypted(), GetParam());
    const std::vector<uint8_t> text = text_of(largest == 5 ? 20'011 : largest * 37 + 11);
    stream(channels.a.get(), channels.b.get(), text, static_cast<uint32_t>(largest), largest);
    EXPECT_EQ(channels.a->n_sent() == text.size(), !GetParam());
  }
}

TEST_P(TcpChannel, BothWaysAtOnceAndOverIpv6) {
  if (const int fd = socket(AF_INET6, SOCK_STREAM, 0); fd >= 0) {
    sockaddr_storage addr;
    const socklen_t n = Address::loopback(AF_INET6).to_sockaddr(&addr);
    const bool has_ipv6 = bind(fd, reinterpret_cast<sockaddr*>(&addr), n) == 0;
    close(fd);
    if (!has_ipv6) GTEST_SKIP() << "*** NO IPv6 ON THIS MACHINE: ::1 cannot be bound";
  }
  const Channels channels = channel_pair(GetParam(), AF_INET6);
  const std::vector<uint8_t> text = text_of(3'000'001);
  std::thread other([&] { stream(channels.b.get(), channels.a.get(), text, 8, 70'000); });
  stream(channels.a.get(), channels.b.get(), text, 9, 70'000);
  other.join();
}

TEST_P(TcpChannel, TheEndIsALostPeer) {
  Channels channels = channel_pair(GetParam());
  const iovec part{const_cast<char*>("last words"), 10};
  size_t n = 0;
  ASSERT_TRUE(channels.a->write(&part, 1, &n).ok());
  ASSERT_EQ(n, 10u);
  channels.a.reset();
  ASSERT_TRUE(wait_for(channels.b->fd(), POLLIN));
  char got[64];
  ASSERT_TRUE(channels.b->read(got, 0, &n).ok()) << "an empty read is no end";
  ASSERT_TRUE(channels.b->read(got, sizeof got, &n).ok()) << "what came before the end is delivered";
  EXPECT_EQ(std::string(got, n), "last words");
  for (int i = 0; i < 2; i++) {
    const Status status = channels.b->read(got, sizeof got, &n);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_NE(status.message().find("rank 2 (host b, pid 22)"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("closed the connection"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("127.0.0.1:"), std::string::npos) << status.message();
  }
}

TEST_P(TcpChannel, AResetIsALostPeer) {
  Channels channels = channel_pair(GetParam());
  const linger at_once{1, 0};
  ASSERT_EQ(setsockopt(channels.a->fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  channels.a.reset();
  ASSERT_TRUE(wait_for(channels.b->fd(), POLLIN));
  char byte = 0;
  size_t n = 0;
  EXPECT_EQ(channels.b->read(&byte, 1, &n).code(), Code::kPeerLost);
  const iovec part{&byte, 1};
  EXPECT_EQ(channels.b->write(&part, 1, &n).code(), Code::kPeerLost) << "and no SIGPIPE";
  EXPECT_EQ(channels.b->write(&part, 1, &n).code(), Code::kPeerLost);
}

TEST_P(TcpChannel, NeverBlocks) {
  const Channels channels = channel_pair(GetParam());
  char byte = 0;
  size_t n = 1;
  ASSERT_TRUE(channels.b->read(&byte, 1, &n).ok());
  EXPECT_EQ(n, 0u);
  const std::vector<uint8_t> text = text_of(1 << 20);
  size_t n_all = 0;
  do {
    const iovec part{const_cast<uint8_t*>(text.data()), text.size()};
    ASSERT_TRUE(channels.a->write(&part, 1, &n).ok());
    n_all += n;
    ASSERT_LT(n_all, size_t{1} << 30);
  } while (n > 0);
  EXPECT_EQ(channels.a->unsent(), GetParam());
}

TEST(TcpChannelPlain, ItsBytesAreTheText) {
  const Channels channels = channel_pair(false);
  const iovec parts[] = {{const_cast<char*>("scatter"), 7}, {nullptr, 0}, {const_cast<char*>("gather"), 6}};
  size_t n = 0;
  ASSERT_TRUE(channels.a->write(parts, 3, &n).ok());
  ASSERT_EQ(n, 13u);
  char got[32];
  ASSERT_TRUE(wait_for(channels.b->fd(), POLLIN));
  EXPECT_EQ(recv(channels.b->fd(), got, sizeof got, 0), 13);
  EXPECT_EQ(std::string(got, 13), "scattergather");
}

TEST(TcpChannelEncrypted, TheWireShowsNothingAndSmallPartsShareARecord) {
  const Channels channels = channel_pair(true);
  const std::string word = "a word that an eavesdropper would know";
  std::vector<iovec> parts(10, iovec{const_cast<char*>(word.data()), word.size()});
  size_t n = 0;
  ASSERT_TRUE(channels.a->write(parts.data(), 10, &n).ok());
  ASSERT_EQ(n, 10 * word.size());
  ASSERT_TRUE(wait_for(channels.b->fd(), POLLIN));
  std::string wire(4096, 0);
  const ssize_t n_wire = recv(channels.b->fd(), wire.data(), wire.size(), 0);
  EXPECT_EQ(n_wire, static_cast<ssize_t>(10 * word.size() + 20));
  EXPECT_EQ(wire.find("eavesdropper"), std::string::npos);
}

TEST(TcpChannelEncrypted, KeysChangeOnTheWay) {
  const Channels channels = channel_pair(true, AF_INET, 3);
  stream(channels.a.get(), channels.b.get(), text_of(300'000), 5, 2000);
}

TEST(TcpChannelEncrypted, DescriptorsAreClosedOnExecAndDoNotBlock) {
  const Channels channels = channel_pair(true);
  for (const int fd : {channels.a->fd(), channels.b->fd()}) {
    EXPECT_TRUE(fcntl(fd, F_GETFL) & O_NONBLOCK);
    EXPECT_TRUE(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  }
}

// Records without sockets.
class TcpRecords : public testing::TestWithParam<Cipher> {
 protected:
  void SetUp() override {
    if (GetParam() == Cipher::kAes256Gcm && !crypto::has_aes())
      GTEST_SKIP() << "*** NO AES INSTRUCTIONS ON THIS MACHINE";
    for (size_t i = 0; i < key_.size(); i++) key_[i] = static_cast<uint8_t>(i * 3);
  }
  std::vector<uint8_t> seal(RecordWriter* writer, const std::vector<uint8_t>& text) {
    const iovec part{const_cast<uint8_t*>(text.data()), text.size()};
    EXPECT_EQ(writer->put(&part, 1), std::min(text.size(), kMaxText));
    const auto pending = writer->pending();
    std::vector<uint8_t> record(pending.begin(), pending.end());
    writer->sent(record.size());
    return record;
  }
  // Whether the reader takes these bytes for records; their text is appended to *text.
  bool feed(RecordReader* reader, const std::vector<uint8_t>& bytes, std::vector<uint8_t>* text) {
    size_t n_fed = 0;
    while (true) {
      uint8_t some[1000];
      size_t n = 0;
      const bool intact = reader->take(some, sizeof some, &n);
      text->insert(text->end(), some, some + n);
      if (!intact) return false;
      if (n == sizeof some) continue;
      if (n_fed == bytes.size()) return true;
      const std::span<uint8_t> room = reader->room();
      EXPECT_FALSE(room.empty());
      const size_t n_now = std::min(room.size(), bytes.size() - n_fed);
      std::memcpy(room.data(), bytes.data() + n_fed, n_now);
      reader->added(n_now);
      n_fed += n_now;
    }
  }
  crypto::Key key_{};
};
INSTANTIATE_TEST_SUITE_P(, TcpRecords, testing::Values(Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305),
                         [](const auto& info) {
                           return info.param == Cipher::kAes256Gcm ? "Aes" : "ChaCha";
                         });

TEST_P(TcpRecords, AllSizesComeBack) {
  RecordWriter writer(GetParam(), key_, 4);
  RecordReader reader(GetParam(), key_, 4);
  for (const size_t n : {size_t{1}, size_t{2}, size_t{15}, size_t{16}, size_t{999}, size_t{1000},
                         size_t{1001}, size_t{40'000}, kMaxText - 1, kMaxText, size_t{1}}) {
    const std::vector<uint8_t> text = text_of(n);
    const std::vector<uint8_t> record = seal(&writer, text);
    ASSERT_EQ(record.size(), n + 20);
    ASSERT_LE(record.size(), size_t{65536});
    std::vector<uint8_t> got;
    ASSERT_TRUE(feed(&reader, record, &got));
    ASSERT_TRUE(got == text) << n;
    ASSERT_FALSE(reader.has_some());
  }
}

TEST_P(TcpRecords, EveryChangedByteIsNoticed) {
  const std::vector<uint8_t> record = [&] {
    RecordWriter writer(GetParam(), key_, 1000);
    return seal(&writer, text_of(50));
  }();
  for (size_t i = 0; i < record.size(); i++) {
    RecordReader reader(GetParam(), key_, 1000);
    std::vector<uint8_t> changed = record, got;
    changed[i] ^= 1;
    changed.resize(70'000);  // so that a longer length is not merely waited for
    ASSERT_FALSE(feed(&reader, changed, &got)) << "byte " << i;
    ASSERT_TRUE(got.empty());
    ASSERT_TRUE(reader.has_some()) << "it stays broken";
    ASSERT_FALSE(feed(&reader, record, &got));
  }
}

TEST_P(TcpRecords, RepeatedMissingSwappedAndForeignRecordsAreNoticed) {
  RecordWriter writer(GetParam(), key_, 1000);
  const std::vector<uint8_t> first = seal(&writer, text_of(10)), second = seal(&writer, text_of(20));
  std::vector<uint8_t> got;
  RecordReader repeated(GetParam(), key_, 1000), missing(GetParam(), key_, 1000);
  EXPECT_TRUE(feed(&repeated, first, &got));
  EXPECT_FALSE(feed(&repeated, first, &got));
  EXPECT_FALSE(feed(&missing, second, &got));
  crypto::Key other = key_;
  other[31] ^= 1;
  RecordReader foreign(GetParam(), other, 1000), other_period(GetParam(), key_, 1);
  EXPECT_FALSE(feed(&foreign, first, &got));
  EXPECT_TRUE(feed(&other_period, first, &got));
  EXPECT_FALSE(feed(&other_period, second, &got)) << "the key of the second record is another one";
}

TEST_P(TcpRecords, LengthsAreBoundedBeforeTheyAreBelieved) {
  for (const uint32_t length : {0u, static_cast<uint32_t>(kMaxText) + 1, 0x80000000u, 0xffffffffu}) {
    RecordReader reader(GetParam(), key_, 1000);
    std::vector<uint8_t> bytes(4), got;
    for (size_t i = 0; i < 4; i++) bytes[i] = static_cast<uint8_t>(length >> (8 * i));
    EXPECT_FALSE(feed(&reader, bytes, &got)) << length;
  }
}

TEST(TcpChannelEncrypted, ATamperedStreamIsALostPeer) {
  Channels channels = channel_pair(true);
  const iovec part{const_cast<char*>("money"), 5};
  size_t n = 0;
  ASSERT_TRUE(channels.a->write(&part, 1, &n).ok());
  // A man in the middle adds a byte stream of his own.
  const std::vector<uint8_t> forged(100, 7);
  ASSERT_EQ(send(channels.a->fd(), forged.data(), forged.size(), 0), 100);
  ASSERT_TRUE(wait_for(channels.b->fd(), POLLIN));
  char got[256];
  Status status;
  std::string all;
  while (status.ok()) {
    status = channels.b->read(got, sizeof got, &n);
    all.append(got, n);
    if (status.ok() && n == 0) {
      ASSERT_TRUE(wait_for(channels.b->fd(), POLLIN));
    }
  }
  EXPECT_EQ(all, "money");
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_NE(status.message().find("broken on the way"), std::string::npos) << status.message();
  EXPECT_EQ(channels.b->read(got, sizeof got, &n).code(), Code::kPeerLost);
}

}  // namespace
}  // namespace pycomm
