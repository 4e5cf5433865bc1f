// A stream of bytes to an authenticated peer, non-blocking; encrypted where the job asks for it.
//
// Plain, a Channel is its socket: write and read are one sendmsg and one recvmsg on the caller's memory, no
// copies. Encrypted, what is written is cut into *records* of at most kMaxRecord bytes of text:
//   n_text (4 bytes, little-endian), text encrypted, tag (16 bytes)
// by AES-256-GCM or ChaCha20-Poly1305 (RFC 8439) with a key for each direction, the number of the record as
// nonce and the length as associated data: a record that was changed, left out, repeated or moved is
// kPeerLost. After n_records_per_key records both sides go on to the next key. A record costs 20 bytes, one
// copy in and one out.
//
// Encrypted, two things differ for an event loop:
//   - write() may take bytes that are not in the kernel yet: while unsent(), wait for EPOLLOUT and call
//   flush();
//   - read() may hold decrypted bytes back: read until it gives 0, or while has_buffered().
// Both are false on a plain Channel. After an error the Channel stays failed. One thread writes, one (maybe
// another) reads: the directions share nothing but the socket.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/zero_copy.h"

namespace pycomm {

class RecordWriter;
class RecordReader;

class Channel {
 public:
  static constexpr size_t kMaxRecord = 65536 - 20;  // bytes of text: a whole record is at most 64 KiB

  // Takes the socket, also when it fails.
  static Status open(int fd, Session session, std::unique_ptr<Channel>* out);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // *n_written: how many bytes of the parts, in their order, were taken; 0 and OK: would block. kPeerLost
  // with a text on a reset; how much of the parts went is then not said.
  Status write(const iovec* parts, int n_parts, size_t* n_written);
  // The same with flags of sendmsg, on a plain Channel. MSG_ZEROCOPY: *begun tells whether the kernel took it
  // so; then the parts keep their contents until zero_copy() has completed that send.
  Status write_plain(const iovec* parts, int n_parts, int flags, size_t* n_written, bool* begun);
  ZeroCopy& zero_copy() { return zero_copy_; }
  // To be destroyed at once: a reset, so that the kernel sends nothing more.
  void cut_off();
  // 0 and OK: would block. kPeerLost with a text on a reset, at the end of the stream, and for a broken
  // record.
  Status read(const iovec* parts, int n_parts, size_t* n_read);
  Status read(void* to, size_t n_bytes, size_t* n_read);

  Status flush();
  bool unsent() const;
  bool has_buffered() const;

  int fd() const { return fd_; }
  bool encrypted() const { return writer_ != nullptr; }
  const std::string& peer() const { return peer_; }  // "rank 3 (host b, pid 811)"
  // Text written and read, and bytes given to and taken from the kernel. Any thread may ask.
  uint64_t n_written() const { return n_written_.load(std::memory_order_relaxed); }
  uint64_t n_read() const { return n_read_.load(std::memory_order_relaxed); }
  uint64_t n_sent() const { return n_sent_.load(std::memory_order_relaxed); }
  uint64_t n_received() const { return n_received_.load(std::memory_order_relaxed); }

 private:
  Channel() = default;
  Status lost(const char* doing, int err) const;  // err 0: the peer closed the connection
  // One system call each; *n = 0 and OK: would block.
  Status send_some(const iovec* parts, int n_parts, int flags, size_t* n);
  Status receive_some(const iovec* parts, int n_parts, size_t* n);
  Status write_records(const iovec* parts, int n_parts, size_t* n_written);
  Status read_records(const iovec* parts, int n_parts, size_t* n_read);

  int fd_ = -1;
  std::string peer_;
  std::string route_;  // ", 10.0.0.1:4000 to 10.0.0.2:50001": for messages
  Status write_failure_, read_failure_;
  ZeroCopy zero_copy_;
  std::unique_ptr<RecordWriter> writer_;
  std::unique_ptr<RecordReader> reader_;
  std::atomic<uint64_t> n_written_{0}, n_read_{0}, n_sent_{0}, n_received_{0};
};

}  // namespace pycomm
