#include "transport/tcp/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/tcp/connect.h"
#include "transport/tcp/crypto.h"
#include "transport/tcp/terms.h"

namespace pycomm {

namespace {
constexpr uint8_t kHelloMagic[8] = {'P', 'Y', 'C', 'O', 'M', 'M', '\r', '\n'};
constexpr size_t kNonceBytes = 32;
constexpr size_t kMacBytes = 32;
static_assert(sizeof kHelloMagic + kNonceBytes == Handshake::kHelloBytes);
static_assert(Handshake::kTermsBytes + 8 + kMacBytes == Handshake::kProofBytes);

// 16 bytes each, none the beginning of another.
constexpr uint8_t kProofOfInitiator[17] = "pycomm initiator";
constexpr uint8_t kProofOfAcceptor[17] = "pycomm acceptor\0";
constexpr uint8_t kKeyOfInitiator[17] = "pycomm key I->A\0";
constexpr uint8_t kKeyOfAcceptor[17] = "pycomm key A->I\0";

std::span<const uint8_t> label(const uint8_t (&text)[17]) { return {text, 16}; }
}  // namespace

Session::~Session() {
  crypto::wipe(send_key.data(), send_key.size());
  crypto::wipe(receive_key.data(), receive_key.size());
}

Status Handshake::initiate(const Secret& secret, const Terms& mine, std::string peer_name,
                           int64_t deadline_ns, Handshake* out) {
  return begin(true, secret, mine, std::move(peer_name), deadline_ns, out);
}

Status Handshake::accept(const Secret& secret, const Terms& mine, std::string peer_name, int64_t deadline_ns,
                         Handshake* out) {
  return begin(false, secret, mine, std::move(peer_name), deadline_ns, out);
}

Status Handshake::begin(bool initiator, const Secret& secret, const Terms& mine, std::string peer_name,
                        int64_t deadline_ns, Handshake* out) {
  PYCOMM_RETURN_IF_ERROR(cryptography_available());
  if (secret.empty()) {
    return Status::error(Code::kValue,
                         "there is no secret to authenticate with: set PYCOMM_SECRET_FILE on all hosts");
  }
  *out = Handshake();
  out->initiator_ = initiator;
  out->state_ = initiator ? State::kSendHello : State::kAwaitHello;
  out->deadline_ns_ = deadline_ns;
  out->secret_ = secret.clone();
  out->mine_ = mine;
  out->mine_.has_aes = crypto::has_aes();
  out->peer_name_ = std::move(peer_name);
  uint8_t* hello = out->transcript_.data() + (initiator ? 0 : kHelloBytes);
  std::copy_n(kHelloMagic, sizeof kHelloMagic, hello);
  crypto::random_bytes({hello + sizeof kHelloMagic, kNonceBytes});
  return Status();
}

// Where the message of this state lies in the transcript. Message 1 and 3 are the initiator's.
std::span<uint8_t> Handshake::message() {
  const bool sending = state_ == State::kSendHello || state_ == State::kSendProof;
  const bool is_initiators = sending == initiator_;
  switch (state_) {
    case State::kSendHello:
    case State::kAwaitHello: return {transcript_.data() + (is_initiators ? 0 : kHelloBytes), kHelloBytes};
    case State::kSendProof:
    case State::kAwaitProof:
      return {transcript_.data() + 2 * kHelloBytes + (is_initiators ? 0 : kProofBytes), kProofBytes};
    case State::kFailed:
    case State::kDone: break;
  }
  return {};
}

std::span<const uint8_t> Handshake::to_send() {
  if (state_ != State::kSendHello && state_ != State::kSendProof) return {};
  return message().subspan(n_moved_);
}

std::span<uint8_t> Handshake::to_receive() {
  if (state_ != State::kAwaitHello && state_ != State::kAwaitProof) return {};
  return message().subspan(n_moved_);
}

Status Handshake::sent(size_t n_bytes) {
  n_moved_ += n_bytes;
  if (n_moved_ < message().size()) return Status();
  n_moved_ = 0;
  if (state_ == State::kSendHello) {
    state_ = initiator_ ? State::kAwaitHello : State::kAwaitProof;
  } else if (initiator_) {
    state_ = State::kAwaitProof;
  } else {
    if (!difference_.empty()) return fail(Code::kMismatch, difference_);
    finish();
  }
  return Status();
}

Status Handshake::received(size_t n_bytes) {
  n_moved_ += n_bytes;
  if (state_ == State::kAwaitHello &&
      std::memcmp(message().data(), kHelloMagic, std::min(n_moved_, sizeof kHelloMagic)) != 0)
    return fail(Code::kPeerLost, "what came is no greeting of pycomm: another program uses this port");
  if (n_moved_ < message().size()) return Status();
  n_moved_ = 0;
  return state_ == State::kAwaitHello ? on_hello() : on_proof();
}

Status Handshake::on_hello() {
  const uint8_t* nonces = transcript_.data() + sizeof kHelloMagic;
  if (std::memcmp(nonces, nonces + kHelloBytes, kNonceBytes) == 0)
    return fail(Code::kPeerLost, "it sent our own challenge back");
  if (initiator_) {
    make_proof(0);
    state_ = State::kSendProof;
  } else {
    state_ = State::kSendHello;
  }
  return Status();
}

Status Handshake::on_proof() {
  const std::span<const uint8_t> proof = message();
  const std::span<const uint8_t> theirs = proof.last(kMacBytes);
  if (!crypto::equal(theirs, prove(!initiator_))) {
    return fail(Code::kPeerLost,
                format("it could not prove that it belongs to this job: its secret is another one "
                       "than this process's (fingerprint %s); compare PYCOMM_SECRET_FILE on both "
                       "hosts",
                       secret_.fingerprint().c_str()));
  }
  authenticated_ = true;
  theirs_ = decode_terms(proof.first<kTermsBytes>());
  const bool refused_there = initiator_ && proof[kTermsBytes] != 0;
  if (!initiator_) {  // these two it tells us
    mine_.from_rank = theirs_.from_rank;
    mine_.channel = theirs_.channel;
  }
  difference_ = difference(mine_, theirs_);
  if (!initiator_) {
    make_proof(difference_.empty() ? 0 : 1);
    state_ = State::kSendProof;
    return Status();
  }
  if (difference_.empty() && refused_there)
    difference_ = "it refused this connection without a difference that shows";
  if (!difference_.empty()) return fail(Code::kMismatch, difference_);
  finish();
  return Status();
}

void Handshake::make_proof(uint8_t verdict) {
  uint8_t* proof = transcript_.data() + 2 * kHelloBytes + (initiator_ ? 0 : kProofBytes);
  encode_terms(mine_, std::span<uint8_t, kTermsBytes>(proof, kTermsBytes));
  std::fill_n(proof + kTermsBytes, 8, uint8_t{0});
  proof[kTermsBytes] = verdict;
  const std::array<uint8_t, kMacBytes> mac = prove(initiator_);
  std::copy(mac.begin(), mac.end(), proof + kTermsBytes + 8);
}

std::array<uint8_t, 32> Handshake::prove(bool by_initiator) const {
  const size_t end = 2 * kHelloBytes + (by_initiator ? 1 : 2) * kProofBytes - kMacBytes;
  return crypto::hmac_sha256(secret_.data(), {label(by_initiator ? kProofOfInitiator : kProofOfAcceptor),
                                              std::span<const uint8_t>(transcript_.data(), end)});
}

void Handshake::finish() {
  using Cipher = Session::Cipher;
  state_ = State::kDone;
  session_.peer = peer_text();
  if (mine_.encrypt) {
    session_.cipher = mine_.has_aes && theirs_.has_aes ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
    const std::span<const uint8_t> all(transcript_);
    session_.send_key =
        crypto::hmac_sha256(secret_.data(), {label(initiator_ ? kKeyOfInitiator : kKeyOfAcceptor), all});
    session_.receive_key =
        crypto::hmac_sha256(secret_.data(), {label(initiator_ ? kKeyOfAcceptor : kKeyOfInitiator), all});
  }
  secret_ = Secret();
}

Session Handshake::take_session() { return std::move(session_); }

std::string Handshake::peer_text() const {
  if (!authenticated_) return peer_name_;
  const uint32_t rank = initiator_ ? theirs_.to_rank : theirs_.from_rank;
  if (theirs_.who[0] == 0) return format("rank %u", rank);
  return format("rank %u (%s)", rank, theirs_.who);
}

Status Handshake::fail(Code code, const std::string& what) {
  state_ = State::kFailed;
  const std::string peer = peer_text();
  if (peer_name_.starts_with(peer +
                             " at "))  // what was expected there has been proved: the name with its address
    return Status::error(code, format("%s: %s", peer_name_.c_str(), what.c_str()));
  const std::string at = authenticated_ && !peer_name_.empty() ? " [" + peer_name_ + "]" : "";
  return Status::error(code, format("%s%s: %s", peer.c_str(), at.c_str(), what.c_str()));
}

Status Handshake::ended(int err) {
  const std::string how =
      err == 0 ? "closed the connection" : format("lost the connection (%s)", std::strerror(err));
  const char* when = "in the middle of the handshake";
  std::string advice;
  switch (state_) {
    case State::kAwaitHello:
      if (initiator_) {
        advice =
            ": no job of pycomm listens there, or that process has just ended or has no descriptors left";
      } else if (n_moved_ == 0) {
        when = "without a word (a port scan?)";
      }
      break;
    case State::kAwaitProof:
      if (initiator_) {
        when = "instead of accepting this process's proof";
        advice = format(
            ": its secret is another one (this one's fingerprint is %s; compare PYCOMM_SECRET_FILE on "
            "both hosts), or another job listens there, or it has just ended",
            secret_.fingerprint().c_str());
      }
      break;
    case State::kSendHello:
    case State::kSendProof:
    case State::kFailed:
    case State::kDone: break;
  }
  return fail(Code::kPeerLost, format("it %s %s%s", how.c_str(), when, advice.c_str()));
}

Status Handshake::expired() {
  const char* what = state_ == State::kSendHello || state_ == State::kSendProof
                         ? "it did not take our words in time"
                         : "it did not finish the handshake in time";
  return fail(Code::kTimeout, format("timed out: %s (%zu bytes of the message under way)", what, n_moved_));
}

Status Handshake::failed_before() { return fail(Code::kSystem, "this handshake has failed before"); }

Status drive(Handshake* handshake, int fd, bool* wants_write) {
  *wants_write = false;
  while (!handshake->done()) {
    if (now_ns() >= handshake->deadline_ns()) return handshake->expired();
    const std::span<const uint8_t> out = handshake->to_send();
    const std::span<uint8_t> in = handshake->to_receive();
    if (out.empty() && in.empty()) return handshake->failed_before();
    const ssize_t n = out.empty() ? recv(fd, in.data(), in.size(), MSG_DONTWAIT)
                                  : send(fd, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      *wants_write = !out.empty();
      return Status();
    }
    if (n < 0) return handshake->ended(errno);
    if (n == 0 && out.empty()) return handshake->ended(0);
    const auto n_bytes = static_cast<size_t>(n);
    PYCOMM_RETURN_IF_ERROR(out.empty() ? handshake->received(n_bytes) : handshake->sent(n_bytes));
  }
  return Status();
}

}  // namespace pycomm
