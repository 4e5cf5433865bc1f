// Fuzz target: the handshake, as initiator and as acceptor, against a peer that says anything.
//
// The first byte chooses the side and who the peer is:
//   a stranger: sends the input's bytes in pieces of the input's sizes. It must never be authenticated: the
//   input
//     cannot hold a proof for nonces that are new in each run.
//   an insider: knows the secret, so its proofs are true, but its Terms are the input's bytes, and bytes of
//   what it
//     says are changed where the input says so. This reaches what lies behind the authentication.
// Then decode_terms and difference() on the input itself.
#include <array>
#include <memory>
#include <span>
#include <vector>

#include "fuzz.h"
#include "transport/tcp/crypto.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/terms.h"

namespace pycomm {
namespace {

Secret the_secret() {
  std::array<uint8_t, Secret::kBytes> bytes;
  for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(i);
  Secret secret;
  FUZZ_CHECK(Secret::from_bytes(bytes.data(), bytes.size(), &secret).ok());
  return secret;
}

Terms the_terms() {
  Terms t;
  t.n_ranks = 4;
  t.from_rank = 2;
  t.to_rank = 1;
  t.set_who("host b, pid 22");
  return t;
}

// The texts of a peer are printable, whatever it sent: messages go to logs and to Python.
void check_text(const char* text, size_t n_bytes) {
  const auto* end = static_cast<const char*>(std::memchr(text, 0, n_bytes));
  FUZZ_CHECK(end != nullptr);
  for (const char* c = text; c < end; c++) FUZZ_CHECK(*c >= 0x20 && *c < 0x7f);
}

void stranger(Handshake* handshake, FuzzInput* input) {
  Status status;
  while (status.ok() && !input->empty()) {
    if (const std::span<const uint8_t> out = handshake->to_send(); !out.empty()) {
      status = handshake->sent(1 + input->byte() % out.size());
      continue;
    }
    const std::span<uint8_t> in = handshake->to_receive();
    FUZZ_CHECK(!in.empty());
    status = handshake->received(input->bytes(in.data(), std::min<size_t>(in.size(), 1 + input->byte() * 2)));
  }
  FUZZ_CHECK(!handshake->authenticated() && !handshake->done());
  const Status end = input->n_left() % 2 == 0 ? handshake->ended(0) : handshake->expired();
  FUZZ_CHECK(!end.ok() && handshake->to_send().empty() && handshake->to_receive().empty());
}

Terms terms_of(FuzzInput* input) {
  std::array<uint8_t, Handshake::kTermsBytes> wire;
  encode_terms(the_terms(), wire);
  // A few changes (place, value), or all of it.
  for (uint8_t n = input->byte() % 8; n > 0; n--) {
    const size_t at = (input->byte() * 256u + input->byte()) % wire.size();
    wire[at] = input->byte();
  }
  if (input->n_left() >= wire.size()) input->bytes(wire.data(), wire.size());
  const Terms terms = decode_terms(wire);
  check_text(terms.who, sizeof terms.who);
  check_text(terms.settings_text, sizeof terms.settings_text);
  return terms;
}

void insider(bool subject_initiates, FuzzInput* input) {
  Handshake initiator, acceptor;
  const Secret secret = the_secret();
  const Terms theirs = terms_of(input);
  const Terms mine = the_terms();
  FUZZ_CHECK(Handshake::initiate(secret, subject_initiates ? mine : theirs, "peer", 0, &initiator).ok());
  FUZZ_CHECK(Handshake::accept(secret, subject_initiates ? theirs : mine, "peer", 0, &acceptor).ok());
  Handshake* subject = subject_initiates ? &initiator : &acceptor;
  Handshake* sides[2] = {&initiator, &acceptor};
  Status statuses[2];
  bool changed = false;
  for (int message = 0; message < 4 && statuses[0].ok() && statuses[1].ok(); message++) {
    const int speaker = message % 2;
    const std::span<const uint8_t> out = sides[speaker]->to_send();
    if (out.empty()) break;
    std::vector<uint8_t> said(out.begin(), out.end());
    statuses[speaker] = sides[speaker]->sent(said.size());
    if (sides[speaker] != subject && input->byte() % 4 == 1) {
      const uint8_t bit = static_cast<uint8_t>(1u << input->byte() % 8);
      said[(input->byte() * 256u + input->byte()) % said.size()] ^= bit;
      changed = true;
    }
    const std::span<uint8_t> in = sides[1 - speaker]->to_receive();
    FUZZ_CHECK(in.size() == said.size());
    std::memcpy(in.data(), said.data(), said.size());
    if (statuses[1 - speaker].ok()) statuses[1 - speaker] = sides[1 - speaker]->received(said.size());
  }
  // It is done exactly if nothing was changed on the way and both sides' Terms fit.
  if (changed) FUZZ_CHECK(!subject->done());
  FUZZ_CHECK(subject->done() || !statuses[0].ok() || !statuses[1].ok());
  if (subject->done()) {
    const Terms& peer = subject->peer();
    FUZZ_CHECK(peer.version == mine.version && peer.to_rank == 1 && peer.n_ranks == 4 && peer.channel == 0);
    FUZZ_CHECK(peer.encrypt == mine.encrypt && (!subject_initiates || peer.from_rank == 2));
    FUZZ_CHECK(peer.from_rank < 4 && peer.from_rank != 1);
  }
}

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  using namespace pycomm;
  static const Secret secret = the_secret();
  FuzzInput input(data, n_bytes);
  const uint8_t choice = input.byte();
  if ((choice & 1) != 0) {
    insider((choice & 2) != 0, &input);
    return 0;
  }
  Handshake handshake;
  const auto begin = (choice & 2) != 0 ? Handshake::initiate : Handshake::accept;
  FUZZ_CHECK(begin(secret, the_terms(), "peer", 0, &handshake).ok());
  stranger(&handshake, &input);
  return 0;
}
