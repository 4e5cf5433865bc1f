#include "transport/tcp/terms.h"

#include <algorithm>
#include <cstring>

namespace pycomm {

namespace {
constexpr uint32_t kEncrypt = 1;
constexpr uint32_t kHasAes = 2;

template <typename T>
void put(uint8_t* at, T value) {
  for (size_t i = 0; i < sizeof value; i++) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <typename T>
T get(const uint8_t* at) {
  T value = 0;
  for (size_t i = 0; i < sizeof value; i++) value |= static_cast<T>(T{at[i]} << (8 * i));
  return value;
}

// `to` takes n bytes, the last of which is zero, as is everything after the text.
void copy_text(const char* from, size_t n_from, char* to, size_t n) {
  std::memset(to, 0, n);
  for (size_t i = 0; i < std::min(n_from, n - 1) && from[i] != 0; i++)
    to[i] = from[i] >= 0x20 && from[i] < 0x7f ? from[i] : '?';
}

unsigned long long wide(uint64_t value) { return value; }

std::string rank_text(uint32_t rank) { return rank == kAnyRank ? "any rank" : format("rank %u", rank); }
}  // namespace

void Terms::set_who(const std::string& text) { copy_text(text.data(), text.size(), who, sizeof who); }

void Terms::set_settings_text(const std::string& text) {
  copy_text(text.data(), text.size(), settings_text, sizeof settings_text);
}

void encode_terms(const Terms& t, std::span<uint8_t, Handshake::kTermsBytes> out) {
  std::fill(out.begin(), out.end(), uint8_t{0});
  uint8_t* p = out.data();
  const uint32_t numbers[] = {t.version,
                              t.n_ranks,
                              t.from_rank,
                              t.to_rank,
                              t.channel,
                              t.n_channels,
                              (t.encrypt ? kEncrypt : 0) | (t.has_aes ? kHasAes : 0)};
  for (size_t i = 0; i < std::size(numbers); i++) put(p + 4 * i, numbers[i]);
  put(p + 32, t.job);
  put(p + 40, t.group);
  put(p + 48, t.settings);
  std::memcpy(p + 64, t.who, sizeof t.who);
  std::memcpy(p + 128, t.settings_text, sizeof t.settings_text);
  static_assert(128 + sizeof t.settings_text == Handshake::kTermsBytes);
}

Terms decode_terms(std::span<const uint8_t, Handshake::kTermsBytes> in) {
  Terms t;
  const uint8_t* p = in.data();
  uint32_t flags = 0;
  uint32_t* numbers[] = {&t.version, &t.n_ranks, &t.from_rank, &t.to_rank, &t.channel, &t.n_channels, &flags};
  for (size_t i = 0; i < std::size(numbers); i++) *numbers[i] = get<uint32_t>(p + 4 * i);
  t.encrypt = (flags & kEncrypt) != 0;
  t.has_aes = (flags & kHasAes) != 0;
  t.job = get<uint64_t>(p + 32);
  t.group = get<uint64_t>(p + 40);
  t.settings = get<uint64_t>(p + 48);
  copy_text(reinterpret_cast<const char*>(p + 64), sizeof t.who, t.who, sizeof t.who);
  copy_text(reinterpret_cast<const char*>(p + 128), sizeof t.settings_text, t.settings_text,
            sizeof t.settings_text);
  return t;
}

std::string difference(const Terms& mine, const Terms& theirs) {
  if (mine.version != theirs.version) {
    return format(
        "the versions of the protocol differ, %u here and %u there: install the same pycomm on all hosts",
        mine.version, theirs.version);
  }
  if (mine.job != theirs.job) {
    return format(
        "the jobs differ, %016llx here and %016llx there: two jobs with one secret, and one of them found "
        "the other's port",
        wide(mine.job), wide(theirs.job));
  }
  if (mine.n_ranks != theirs.n_ranks) {
    return format(
        "the numbers of ranks differ, %u here and %u there: start all ranks with the same WORLD_SIZE",
        mine.n_ranks, theirs.n_ranks);
  }
  if (mine.group != theirs.group) {
    return format(
        "the groups differ, %llx here and %llx there: a process of an earlier start of this job is still "
        "about, or ranks made their groups in different orders",
        wide(mine.group), wide(theirs.group));
  }
  if (mine.to_rank != theirs.to_rank || mine.from_rank != theirs.from_rank) {
    return format(
        "the connection is from %s to %s here, and from %s to %s there: two processes have the same rank, "
        "or one the address of another",
        rank_text(mine.from_rank).c_str(), rank_text(mine.to_rank).c_str(),
        rank_text(theirs.from_rank).c_str(), rank_text(theirs.to_rank).c_str());
  }
  if (mine.from_rank >= mine.n_ranks || mine.to_rank >= mine.n_ranks || mine.from_rank == mine.to_rank) {
    return format(
        "the connection is from %s to %s, which cannot be among %u ranks: two processes have the same rank",
        rank_text(mine.from_rank).c_str(), rank_text(mine.to_rank).c_str(), mine.n_ranks);
  }
  if (mine.n_channels != theirs.n_channels) {
    return format("the numbers of sockets for each pair of ranks differ, %u here and %u there",
                  mine.n_channels, theirs.n_channels);
  }
  if (mine.channel != theirs.channel || mine.channel >= mine.n_channels) {
    return format("the connection is socket %u here and socket %u there, of %u", mine.channel, theirs.channel,
                  mine.n_channels);
  }
  if (mine.encrypt != theirs.encrypt) {
    return format("PYCOMM_ENCRYPT differs, %d here and %d there: set it alike on all hosts", mine.encrypt,
                  theirs.encrypt);
  }
  if (mine.settings != theirs.settings) {
    return format("the settings differ, \"%s\" here and \"%s\" there: set PYCOMM_* alike on all hosts",
                  mine.settings_text, theirs.settings_text);
  }
  return "";
}

}  // namespace pycomm
