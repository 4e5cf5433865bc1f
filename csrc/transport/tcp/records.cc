#include "transport/tcp/records.h"

#include <algorithm>
#include <cstring>

namespace pycomm {

namespace {
// Two records: one that is read from while the next comes.
constexpr size_t kReadBytes = 2 * kMaxRecordBytes;

void put_length(uint8_t* at, size_t n) {
  for (size_t i = 0; i < kRecordHeader; i++) at[i] = static_cast<uint8_t>(n >> (8 * i));
}

size_t get_length(const uint8_t* at) {
  size_t n = 0;
  for (size_t i = 0; i < kRecordHeader; i++) n |= size_t{at[i]} << (8 * i);
  return n;
}
}  // namespace

// Buffers are not cleared: every byte is written before it is read.
RecordWriter::RecordWriter(Session::Cipher cipher, const crypto::Key& key, uint64_t n_records_per_key)
    : aead_(cipher, key), n_records_per_key_(n_records_per_key), buffer_(new uint8_t[kMaxRecordBytes]) {}

size_t RecordWriter::put(const iovec* parts, int n_parts) {
  uint8_t* text = buffer_.get() + kRecordHeader;
  const uint8_t* source = text;
  size_t n_text = 0;
  if (n_parts > 0 && parts[0].iov_len >= kMaxText) {  // straight from the caller's memory
    source = static_cast<const uint8_t*>(parts[0].iov_base);
    n_text = kMaxText;
  } else {
    for (int i = 0; i < n_parts && n_text < kMaxText; i++) {
      const size_t n = std::min(parts[i].iov_len, kMaxText - n_text);
      if (n > 0) std::memcpy(text + n_text, parts[i].iov_base, n);
      n_text += n;
    }
  }
  if (n_text == 0) return 0;
  put_length(buffer_.get(), n_text);
  if (number_ > 0 && number_ % n_records_per_key_ == 0) aead_.next_key();
  aead_.seal(number_++, {buffer_.get(), kRecordHeader}, source, n_text, text);
  begin_ = 0;
  end_ = kRecordHeader + n_text + crypto::kTagBytes;
  return n_text;
}

RecordReader::RecordReader(Session::Cipher cipher, const crypto::Key& key, uint64_t n_records_per_key)
    : aead_(cipher, key), n_records_per_key_(n_records_per_key), buffer_(new uint8_t[kReadBytes]) {}

std::span<uint8_t> RecordReader::room() {
  if (text_begin_ == text_end_) {
    if (begin_ == end_) {
      begin_ = end_ = 0;
    } else if (kReadBytes - begin_ < kMaxRecordBytes) {  // the record that begins here may not fit
      std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
  }
  return {buffer_.get() + end_, kReadBytes - end_};
}

size_t RecordReader::complete_text() const {
  const size_t n_bytes = end_ - begin_;
  if (n_bytes < kRecordHeader) return 0;
  const size_t n_text = get_length(buffer_.get() + begin_);
  return n_bytes >= kRecordHeader + n_text + crypto::kTagBytes ? n_text : 0;
}

bool RecordReader::open_record(size_t n_text, uint8_t* to) {
  const uint8_t* record = buffer_.get() + begin_;
  if (number_ > 0 && number_ % n_records_per_key_ == 0) aead_.next_key();
  if (!aead_.open(number_++, {record, kRecordHeader}, record + kRecordHeader, n_text, to)) return false;
  begin_ += kRecordHeader + n_text + crypto::kTagBytes;
  return true;
}

bool RecordReader::take(uint8_t* to, size_t n_bytes, size_t* n_taken) {
  *n_taken = 0;
  while (!broken_ && *n_taken < n_bytes) {
    if (text_begin_ < text_end_) {
      const size_t n = std::min(n_bytes - *n_taken, text_end_ - text_begin_);
      std::memcpy(to + *n_taken, buffer_.get() + text_begin_, n);
      text_begin_ += n;
      *n_taken += n;
      continue;
    }
    if (end_ - begin_ < kRecordHeader) break;
    const size_t length = get_length(buffer_.get() + begin_);
    if (length == 0 || length > kMaxText) {
      broken_ = true;
      break;
    }
    const size_t n_text = complete_text();
    if (n_text == 0) break;
    if (n_bytes - *n_taken >= n_text) {  // straight into the caller's memory
      broken_ = !open_record(n_text, to + *n_taken);
      if (!broken_) *n_taken += n_text;
    } else {
      const size_t at = begin_ + kRecordHeader;
      broken_ = !open_record(n_text, buffer_.get() + at);
      if (!broken_) text_begin_ = at, text_end_ = at + n_text;
    }
  }
  return !broken_;
}

bool RecordReader::has_some() const {
  if (broken_ || text_begin_ < text_end_) return true;
  if (end_ - begin_ < kRecordHeader) return false;
  const size_t length = get_length(buffer_.get() + begin_);
  return length == 0 || length > kMaxText || complete_text() > 0;
}

}  // namespace pycomm
