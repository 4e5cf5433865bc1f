// Terms on the wire: kTermsBytes bytes, little-endian, unused ones zero, the same for ever (see handshake.h).
//   0 version  4 n_ranks  8 from_rank  12 to_rank  16 channel  20 n_channels  24 flags (1 encrypt, 2 has_aes)
//   32 job  40 group  48 settings  64 who (64)  128 settings_text (192)
// Every sequence of bytes decodes to something: texts are cut at their first zero, and what is not printable
// ASCII in them becomes '?'. Whether it fits is difference()'s question.
#pragma once

#include <cstdint>
#include <span>

#include "transport/tcp/handshake.h"

namespace pycomm {

void encode_terms(const Terms& terms, std::span<uint8_t, Handshake::kTermsBytes> out);
Terms decode_terms(std::span<const uint8_t, Handshake::kTermsBytes> in);

}  // namespace pycomm
