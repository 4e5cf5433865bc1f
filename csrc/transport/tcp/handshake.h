// Who is at the other end: both sides prove that they know the job's secret, then compare what they are.
//
// The *initiator* connected, the *acceptor* listened. Four messages of fixed size (K: the secret; T: the
// Terms):
//   1  I -> A   magic, nonce_i
//   2  A -> I   magic, nonce_a
//   3  I -> A   T_i, HMAC-SHA256(K, "pycomm initiator" 1 2 T_i)
//   4  A -> I   T_a, verdict, HMAC-SHA256(K, "pycomm acceptor" 1 2 3 T_a verdict)
// A stranger learns nothing but the magic. Each proof covers both fresh nonces and the sender's direction, so
// nothing can be replayed or reflected, and the Terms bind the connection to (job, from, to, group, channel).
// Only after the proof are Terms looked at: what differs is then told on both sides, in words. The session's
// keys are HMAC-SHA256(K, "pycomm key" direction, 1 2 3 4). These formats never change; what may is
// Terms::version.
//
// A Handshake is a state machine without I/O, and of fixed size: nothing is allocated for a peer before it
// has proved itself. It asks for exactly the bytes that it wants, so what follows message 4 stays in the
// socket. drive() is the same over a non-blocking socket, with the deadline. One thread uses a Handshake.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "transport/tcp/secret.h"

namespace pycomm {

inline constexpr uint32_t kTcpVersion = 1;  // of everything that travels after the handshake
inline constexpr uint32_t kAnyRank = UINT32_MAX;

// What one side says of itself and of the connection. Equal on both sides but for the texts and has_aes.
struct Terms {
  uint32_t version = kTcpVersion;
  uint32_t n_ranks = 0;
  uint32_t from_rank = kAnyRank;  // the initiator; the acceptor says kAnyRank: it learns it
  uint32_t to_rank = 0;           // the acceptor
  uint32_t channel = 0;           // which of the sockets of this pair; the acceptor's is learnt
  uint32_t n_channels = 1;        // how many there are
  uint64_t job = 0;               // hash of the job's name
  uint64_t group = 0;             // epoch: which communicator, which restart
  uint64_t settings = 0;          // hash of all settings that must be equal
  bool encrypt = false;
  bool has_aes = false;          // this processor has AES instructions; set by Handshake itself
  char who[64] = {};             // "host b, pid 811": for messages; printable ASCII, ends with a zero
  char settings_text[192] = {};  // the settings as a person writes them: for messages

  void set_who(const std::string& text);
  void set_settings_text(const std::string& text);
};

// What the Channel needs of a finished handshake.
struct Session {
  enum class Cipher : uint8_t { kNone, kAes256Gcm, kChaCha20Poly1305 };
  Cipher cipher = Cipher::kNone;
  std::array<uint8_t, 32> send_key{};
  std::array<uint8_t, 32> receive_key{};
  uint64_t n_records_per_key = uint64_t{1} << 20;  // then both sides go on to the next key
  std::string peer;                                // "rank 3 (host b, pid 811)": for messages

  Session() = default;
  Session(Session&&) = default;
  Session& operator=(Session&&) = default;
  ~Session();  // wipes the keys
};

class Handshake {
 public:
  static constexpr size_t kHelloBytes = 40;                    // messages 1 and 2
  static constexpr size_t kTermsBytes = 320;                   // Terms on the wire
  static constexpr size_t kProofBytes = kTermsBytes + 8 + 32;  // messages 3 and 4

  // `peer_name`: for messages before the peer has said who it is: "rank 3 at 10.0.0.2:50001",
  // "10.0.0.9:41234".
  static Status initiate(const Secret& secret, const Terms& mine, std::string peer_name, int64_t deadline_ns,
                         Handshake* out);
  static Status accept(const Secret& secret, const Terms& mine, std::string peer_name, int64_t deadline_ns,
                       Handshake* out);
  Handshake() = default;
  Handshake(Handshake&&) = default;
  Handshake& operator=(Handshake&&) = default;

  // Bytes to be sent now; sent(n) when the first n have gone. Empty: none.
  std::span<const uint8_t> to_send();
  Status sent(size_t n_bytes);
  // Room for the bytes awaited now; received(n) when n have been put there. Empty: none.
  std::span<uint8_t> to_receive();
  Status received(size_t n_bytes);
  // The peer hung up, or the deadline passed: why, in words that fit the state.
  Status ended(int err);  // errno, or 0 for an orderly end
  Status expired();
  Status failed_before();

  bool done() const { return state_ == State::kDone; }
  // Whether the peer has proved that it knows the secret. An error before that concerns a stranger, or a
  // wrong secret; after it, two processes of one job that do not fit together, which both of them are told.
  bool authenticated() const { return authenticated_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  const Terms& peer() const { return theirs_; }  // when authenticated
  Session take_session();                        // when done

 private:
  enum class State : uint8_t { kFailed, kSendHello, kAwaitHello, kSendProof, kAwaitProof, kDone };

  static Status begin(bool initiator, const Secret& secret, const Terms& mine, std::string peer_name,
                      int64_t deadline_ns, Handshake* out);
  std::span<uint8_t> message();
  Status on_hello();
  Status on_proof();
  void make_proof(uint8_t verdict);
  std::array<uint8_t, 32> prove(bool by_initiator) const;
  void finish();
  Status fail(Code code, const std::string& what);
  std::string peer_text() const;

  State state_ = State::kFailed;
  bool initiator_ = false;
  bool authenticated_ = false;
  size_t n_moved_ = 0;  // of the message under way
  int64_t deadline_ns_ = 0;
  Secret secret_;
  Terms mine_, theirs_;
  std::string peer_name_;
  std::string difference_;  // what the acceptor found; told when message 4 has gone
  // Messages 1 and 2, 3, 4, in this order: what the proofs cover.
  std::array<uint8_t, 2 * kHelloBytes + 2 * kProofBytes> transcript_{};
  Session session_;
};

// Sends and receives what it can on a non-blocking socket. *wants_write: whether to wait for EPOLLOUT, else
// EPOLLIN. An error ends it: past its deadline (kTimeout), an end or a reset (kPeerLost), or what the state
// machine says.
Status drive(Handshake* handshake, int fd, bool* wants_write);

// What differs between both sides' Terms, in words; empty when they fit. Pure.
std::string difference(const Terms& mine, const Terms& theirs);

}  // namespace pycomm
