// Fuzz target: the reader of encrypted records, against a stream that was changed on the way, and the writer
// before it with parts of any sizes.
//
// The input says what is written (in parts), how the stream is then changed (bits, pieces left out, repeated
// or put in), and in which pieces it arrives and is read. Whatever happens, what the reader delivers must be
// a beginning of what was written, and all of it where nothing was changed.
#include <memory>
#include <span>
#include <vector>

#include "fuzz.h"
#include "transport/tcp/records.h"

namespace pycomm {
namespace {

using Bytes = std::vector<uint8_t>;

// Small sizes mostly, so that many inputs can be tried; and those around the largest record.
size_t size_of(FuzzInput* input) {
  if (input->empty()) return 5000;
  const size_t n = input->byte();
  if (n < 200) return n;
  if (n < 250) return n * 7;
  return kMaxText - 3 + n % 6;
}

// Writes some text; returns the stream, and appends the text to *text.
Bytes write(RecordWriter* writer, FuzzInput* input, Bytes* text) {
  Bytes stream;
  for (int n_puts = 1 + input->byte() % 3; n_puts > 0; n_puts--) {
    const int n_parts = 1 + input->byte() % 4;
    std::vector<Bytes> parts;
    std::vector<iovec> iovecs;
    for (int i = 0; i < n_parts && !input->empty(); i++) parts.emplace_back(size_of(input), input->byte());
    for (Bytes& part : parts) iovecs.push_back({part.data(), part.size()});
    size_t n_taken = writer->put(iovecs.data(), static_cast<int>(iovecs.size()));
    const std::span<const uint8_t> pending = writer->pending();
    FUZZ_CHECK(pending.size() == (n_taken == 0 ? 0 : n_taken + 20) && pending.size() <= kMaxRecordBytes);
    stream.insert(stream.end(), pending.begin(), pending.end());
    writer->sent(pending.size());
    for (const Bytes& part : parts) {
      const size_t n = std::min(part.size(), n_taken);
      text->insert(text->end(), part.begin(), part.begin() + static_cast<ptrdiff_t>(n));
      n_taken -= n;
    }
    FUZZ_CHECK(n_taken == 0);
  }
  return stream;
}

void change(Bytes* stream, FuzzInput* input) {
  for (int n_changes = input->byte() % 4; n_changes > 0 && !stream->empty(); n_changes--) {
    const size_t at = (input->byte() * 65536u + input->byte() * 256u + input->byte()) % stream->size();
    const size_t n = std::min<size_t>(1 + input->byte(), stream->size() - at);
    const auto begin = stream->begin() + static_cast<ptrdiff_t>(at);
    const Bytes piece(begin, begin + static_cast<ptrdiff_t>(n));
    switch (input->byte() % 4) {
      case 0: (*stream)[at] ^= static_cast<uint8_t>(1u << input->byte() % 8); break;
      case 1: stream->erase(begin, begin + static_cast<ptrdiff_t>(n)); break;
      case 2: stream->insert(begin, piece.begin(), piece.end()); break;
      default: {
        Bytes own(n);
        own.resize(input->bytes(own.data(), n));
        stream->insert(begin, own.begin(), own.end());
      }
    }
  }
}

void read(RecordReader* reader, const Bytes& stream, const Bytes& text, bool unchanged, FuzzInput* input) {
  size_t n_fed = 0, n_read = 0;
  Bytes some;
  bool intact = true;
  while (intact) {
    some.resize(1 + size_of(input));  // of its exact size, so that the sanitizer sees a byte too many
    some.shrink_to_fit();
    size_t n = 0;
    intact = reader->take(some.data(), some.size(), &n);
    FUZZ_CHECK(n <= some.size() && n_read + n <= text.size());
    FUZZ_CHECK(n == 0 || std::memcmp(some.data(), text.data() + n_read, n) == 0);
    n_read += n;
    if (n == some.size() || !intact) continue;
    FUZZ_CHECK(!reader->has_some());
    if (n_fed == stream.size()) break;
    const std::span<uint8_t> room = reader->room();
    FUZZ_CHECK(!room.empty());
    const size_t n_now = std::min({room.size(), stream.size() - n_fed, 1 + size_of(input)});
    std::memcpy(room.data(), stream.data() + n_fed, n_now);
    reader->added(n_now);
    n_fed += n_now;
  }
  if (unchanged) FUZZ_CHECK(intact && n_read == text.size());
}

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  using namespace pycomm;
  using Cipher = Session::Cipher;
  FUZZ_CHECK(cryptography_available().ok());
  FuzzInput input(data, n_bytes);
  const uint8_t choice = input.byte();
  const Cipher cipher =
      (choice & 1) != 0 && crypto::has_aes() ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
  const uint64_t n_records_per_key = 1 + choice / 2 % 4;
  const crypto::Key key{1, 2, 3};
  RecordWriter writer(cipher, key, n_records_per_key);
  RecordReader reader(cipher, key, n_records_per_key);
  Bytes text;
  const Bytes sent = write(&writer, &input, &text);
  Bytes stream = sent;
  change(&stream, &input);
  read(&reader, stream, text, stream == sent, &input);
  return 0;
}
