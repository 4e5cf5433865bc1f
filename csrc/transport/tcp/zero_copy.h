// Sending without a copy into the kernel: MSG_ZEROCOPY and its completions.
//
// The kernel sends straight from the caller's pages, and says in the socket's error queue when it has no more
// use for them: for TCP, when the peer has acknowledged. Each such send has a number, from 0; a completion is
// a range of them. Until then the memory must keep its contents.
//
// Where the packets stay on this machine (loopback, veth) the kernel copies after all, and says that, too:
// then the extra system calls are for nothing, and `worthwhile` turns false for this connection. Where pages
// cannot be pinned (RLIMIT_MEMLOCK, net.core.optmem_max) a send is refused with ENOBUFS, and goes as a copy.
//
// Source: Linux, Documentation/networking/msg_zerocopy.rst. Cost: pinning, and a completion to read, about a
// microsecond a send; a copy of 64 KiB costs several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace pycomm {

class ZeroCopy {
 public:
  enum class Mode : uint8_t { kOff, kAuto, kAlways };  // kAlways: also where the kernel copies
  static constexpr size_t kMinBytes = size_t{64} << 10;

  void enable(int fd, Mode mode);
  bool worthwhile() const { return on_; }
  // How many sends have begun; the number of the next.
  uint32_t n_begun() const { return n_begun_; }
  void began() { n_begun_++; }
  // All sends before this number are over.
  uint32_t n_done() const { return n_done_; }
  bool pending() const { return n_done_ != n_begun_; }
  // Reads the completions that are there.
  void reap();

 private:
  void complete(uint32_t first, uint32_t last);

  int fd_ = -1;
  bool on_ = false, always_ = false;
  uint32_t n_begun_ = 0, n_done_ = 0;
  std::map<uint32_t, uint32_t> ahead_;  // ranges that came before an earlier one: first, last
};

}  // namespace pycomm
