// Sends without a copy, over loopback, where the kernel copies after all but completes them all the same.
#include "transport/tcp_pair.h"

namespace pycomm {
namespace {

// Carries `data` from a to b, MSG_ZEROCOPY; false where the kernel has none.
bool carry_all(Channels& c, const std::vector<std::byte>& data, std::vector<std::byte>* got) {
  size_t sent = 0, received = 0;
  bool any = false;
  got->resize(data.size());
  const int64_t limit = now_ns() + 20 * kSecond;
  while (received < data.size() && now_ns() < limit) {
    if (sent < data.size()) {
      const iovec part{const_cast<std::byte*>(data.data()) + sent, data.size() - sent};
      size_t n = 0;
      bool begun = false;
      const Status s = c.a->write_plain(&part, 1, MSG_ZEROCOPY, &n, &begun);
      EXPECT_TRUE(s.ok()) << s.message();
      sent += n;
      any = any || begun;
    }
    size_t n = 0;
    EXPECT_TRUE(c.b->read(got->data() + received, got->size() - received, &n).ok());
    received += n;
  }
  EXPECT_EQ(received, data.size());
  return any;
}

std::vector<std::byte> pattern(size_t n) {
  std::vector<std::byte> v(n);
  for (size_t i = 0; i < n; i++) v[i] = static_cast<std::byte>(i * 37 + i / 251);
  return v;
}

void await_completions(ZeroCopy& z) {
  const int64_t limit = now_ns() + 20 * kSecond;
  while (z.pending() && now_ns() < limit) z.reap();
  EXPECT_FALSE(z.pending()) << z.n_done() << " of " << z.n_begun();
}

TEST(TcpZeroCopy, EverySendIsCompleted) {
  for (const sa_family_t family : {sa_family_t{AF_INET}, sa_family_t{AF_INET6}}) {
    Channels c = channel_pair(false, family);
    ZeroCopy& z = c.a->zero_copy();
    z.enable(c.a->fd(), ZeroCopy::Mode::kAlways);
    if (!z.worthwhile()) GTEST_SKIP() << "this kernel has no SO_ZEROCOPY";
    for (const size_t n_bytes : {size_t{1}, size_t{65'537}, size_t{5'000'003}}) {
      const std::vector<std::byte> data = pattern(n_bytes);
      std::vector<std::byte> got;
      EXPECT_TRUE(carry_all(c, data, &got));
      EXPECT_EQ(got, data);
    }
    await_completions(z);
    EXPECT_GE(z.n_begun(), 3u);
    EXPECT_TRUE(z.worthwhile());
  }
}

TEST(TcpZeroCopy, StopsWhereTheKernelCopiesAfterAll) {
  Channels c = channel_pair(false);
  ZeroCopy& z = c.a->zero_copy();
  z.enable(c.a->fd(), ZeroCopy::Mode::kAuto);
  if (!z.worthwhile()) GTEST_SKIP() << "this kernel has no SO_ZEROCOPY";
  std::vector<std::byte> got;
  const std::vector<std::byte> data = pattern(1 << 20);
  carry_all(c, data, &got);
  await_completions(z);
  EXPECT_FALSE(z.worthwhile());  // loopback
}

TEST(TcpZeroCopy, OffMeansNone) {
  Channels c = channel_pair(false);
  c.a->zero_copy().enable(c.a->fd(), ZeroCopy::Mode::kOff);
  EXPECT_FALSE(c.a->zero_copy().worthwhile());
  EXPECT_FALSE(c.a->zero_copy().pending());
}

}  // namespace
}  // namespace pycomm
