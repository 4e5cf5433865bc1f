// A message between two processes of a job on different hosts: a header of fixed size, then its payload.
//
// The header is the same memory on both sides (both are little-endian; the handshake's version guards it).
// `group` says whose it is: a communicator; 0 is the Net's own. What `kind`, `phase`, `call` and `part` mean
// is the group's affair. `signature`, `count` and `extra` describe the call that it belongs to, so that a
// receiver can compare it with its own (engine/call.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace pycomm {

inline constexpr uint32_t kMessageMagic = 0x50434d31;
// Of one payload. Longer things are cut, so that no message keeps a connection for long and nobody allocates
// much for a message that it does not expect.
inline constexpr size_t kMaxPayload = size_t{4} << 20;

struct MessageHeader {
  uint32_t magic = kMessageMagic;
  uint8_t kind = 0;
  uint8_t phase = 0;
  uint16_t flags = 0;
  uint64_t group = 0;
  uint32_t call = 0;
  uint32_t part = 0;
  uint64_t n_bytes = 0;  // of the payload
  uint64_t signature = 0;
  uint64_t count = 0;
  uint32_t extra = 0;
  uint32_t run = 0;
};
static_assert(sizeof(MessageHeader) == 56);

// The Net's own kinds, in group 0.
enum class NetKind : uint8_t {
  kBeat,     // nothing: shows that the host is there
  kGoodbye,  // this process ends its connections in good order
  kLeft,     // it has left the group `count`, to which it sent the peer `extra` messages; payload: why
  kAsk,      // what does rank `extra`, of the peer's host, in group `count`? `call`: what the asker waits in
  kState,    // the answer, to the same; payload: "is stopped (SIGSTOP)"
};

// Whoever receives the messages of a group. Called with the Net's mutex held, by whichever thread drives it.
class Sink {
 public:
  virtual ~Sink() = default;
  // A header has come. Where its payload shall go; null: memory of its own (handed over in `arrived`).
  virtual std::byte* landing(int peer, const MessageHeader& header) = 0;
  // The payload is there: at `data`, or in `own`.
  virtual void arrived(int peer, const MessageHeader& header, std::byte* data,
                       std::unique_ptr<std::byte[]> own) = 0;
  // A message that was given to send() has left: its memory is the owner's again.
  virtual void sent(uint64_t token) = 0;
  // The process has gone, or cannot be reached; told once to each group.
  virtual void lost(int peer, const Status& why) = 0;
  // The process has left this group, and all that it sent before has arrived. `why` may be empty.
  virtual void left(int peer, const std::string& why) = 0;
  // About ten times a second.
  virtual void tick() = 0;
  // What a process of this host does, in words that follow its name: "is stopped (SIGSTOP)"; `call`: that in
  // which a peer waits for it, 0: none. Empty: not known here.
  virtual std::string state(int peer, uint32_t call) { return ""; }
};

}  // namespace pycomm
