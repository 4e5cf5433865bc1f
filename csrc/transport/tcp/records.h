// The records of an encrypted stream, without I/O: text in, bytes for the peer out, and the reverse.
//
// A record is n_text (4 bytes, little-endian, 1 to kMaxText), the text encrypted, and a tag of 16 bytes; its
// number, counted from 0 in each direction, is the nonce, and its length the associated data. After
// n_records_per_key records comes the next key. A reader looks at a length before it is authenticated, so it
// bounds it; its memory is fixed. One thread uses a writer, one a reader.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "transport/tcp/crypto.h"

namespace pycomm {

inline constexpr size_t kRecordHeader = 4;
inline constexpr size_t kMaxRecordBytes = 65536;
inline constexpr size_t kMaxText = kMaxRecordBytes - kRecordHeader - crypto::kTagBytes;

class RecordWriter {
 public:
  RecordWriter(Session::Cipher cipher, const crypto::Key& key, uint64_t n_records_per_key);

  // Makes one record of the first bytes of the parts, and says of how many. Only when pending() is empty.
  size_t put(const iovec* parts, int n_parts);
  // What is still to be sent; sent(n) when the first n bytes of it have gone.
  std::span<const uint8_t> pending() const { return {buffer_.get() + begin_, end_ - begin_}; }
  void sent(size_t n_bytes) { begin_ += n_bytes; }

 private:
  crypto::Aead aead_;
  uint64_t n_records_per_key_;
  uint64_t number_ = 0;
  std::unique_ptr<uint8_t[]> buffer_;
  size_t begin_ = 0, end_ = 0;
};

class RecordReader {
 public:
  RecordReader(Session::Cipher cipher, const crypto::Key& key, uint64_t n_records_per_key);

  // Where the peer's bytes are to be put, never empty when take() has just given less than it was asked for;
  // added(n) when n bytes are there.
  std::span<uint8_t> room();
  void added(size_t n_bytes) { end_ += n_bytes; }
  // Puts up to n_bytes of text into `to`: all that there is. False: a record is broken, and so is the reader
  // then.
  bool take(uint8_t* to, size_t n_bytes, size_t* n_taken);
  // Whether take() would give something, or find a record broken, without more from the peer.
  bool has_some() const;

 private:
  // The text of the record at begin_, or 0 when it is not all there.
  size_t complete_text() const;
  bool open_record(size_t n_text, uint8_t* to);

  crypto::Aead aead_;
  uint64_t n_records_per_key_;
  uint64_t number_ = 0;
  bool broken_ = false;
  std::unique_ptr<uint8_t[]> buffer_;
  size_t begin_ = 0, end_ = 0;            // the peer's bytes, not yet decrypted
  size_t text_begin_ = 0, text_end_ = 0;  // decrypted, not yet taken
};

}  // namespace pycomm
