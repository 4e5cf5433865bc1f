// Fuzz target: the receiver of messages (transport/tcp/receiver.h), fed by an authenticated peer that says
// anything: over a real socket pair, after a true handshake.
//
// The input says which bytes come: whole messages with headers of the input's choice (sizes true, wrong,
// huge), raw bytes, changed magic; in which pieces; and what the group does with them: lands them in its own
// memory, leaves them to the receiver, does not exist, or forgets them in the middle. Whatever comes: no
// write beyond a landing, every payload delivered is the one that was sent, and after a header that is none
// nothing more.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <vector>

#include "fuzz.h"
#include "transport/tcp/connect.h"
#include "transport/tcp/receiver.h"

namespace pycomm {
namespace {

using Bytes = std::vector<uint8_t>;

Secret the_secret() {
  std::array<uint8_t, Secret::kBytes> bytes;
  for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(i);
  Secret secret;
  FUZZ_CHECK(Secret::from_bytes(bytes.data(), bytes.size(), &secret).ok());
  return secret;
}

Terms the_terms(bool initiator) {
  Terms t;
  t.n_ranks = 3;
  t.to_rank = 1;
  if (initiator) t.from_rank = 2;
  t.set_who("host b, pid 22");
  return t;
}

// The payload of the message whose header has this `count`: known to both sides of the test.
Bytes payload_of(uint64_t seed, size_t n_bytes) {
  Bytes b(n_bytes);
  for (size_t i = 0; i < n_bytes; i++) b[i] = static_cast<uint8_t>(seed * 31 + i * 7 + (i >> 8));
  return b;
}

// Takes the messages of group 1 in memory of exactly their size, those of group 2 as they come.
class Taker final : public Sink {
 public:
  std::byte* landing(int peer, const MessageHeader& h) override {
    FUZZ_CHECK(peer == 2 && h.magic == kMessageMagic && h.n_bytes <= kMaxPayload);
    if (h.group != 1) return nullptr;
    landing_ = std::make_unique<std::byte[]>(h.n_bytes);
    return landing_.get();
  }
  void arrived(int peer, const MessageHeader& h, std::byte* data, std::unique_ptr<std::byte[]> own) override {
    FUZZ_CHECK(peer == 2 && (h.n_bytes == 0 || data == (h.group == 1 ? landing_.get() : own.get())));
    n_arrived++;
    if (!checks || h.kind != kTrue || h.n_bytes == 0) return;
    const Bytes want = payload_of(h.count, h.n_bytes);
    FUZZ_CHECK(std::memcmp(data, want.data(), want.size()) == 0);
  }
  void sent(uint64_t) override {}
  void lost(int, const Status&) override {}
  void left(int, const std::string&) override {}
  void tick() override {}

  static constexpr uint8_t kTrue = 7;  // the kind of a message whose payload is payload_of(count)
  size_t n_arrived = 0;
  bool checks = true;  // the contents
  void forgotten() { landing_.reset(); }

 private:
  std::unique_ptr<std::byte[]> landing_;
};

void append(Bytes* to, const void* data, size_t n_bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  to->insert(to->end(), p, p + n_bytes);
}

// One thing that the peer says. False: what follows is no message any more, for certain.
bool say(FuzzInput* input, Bytes* stream, size_t* n_whole) {
  MessageHeader h;
  const uint8_t choice = input->byte();
  h.kind = Taker::kTrue;
  h.group = choice % 4;  // 0 and 3: nobody's
  h.count = input->byte();
  h.n_bytes = input->byte() * (choice & 64 ? 257u : 1u);
  if ((choice & 128) == 0) {
    append(stream, &h, sizeof h);
    const Bytes payload = payload_of(h.count, h.n_bytes);
    append(stream, payload.data(), payload.size());
    *n_whole += h.group == 1 || h.group == 2;
    return true;
  }
  switch (choice >> 3 & 3) {
    case 0: h.n_bytes = kMaxPayload + 1 + input->byte(); break;
    case 1: h.magic ^= 1u << input->byte() % 32; break;
    case 2: h.n_bytes = ~uint64_t{0} >> input->byte() % 40; break;
    default: {  // raw bytes: a header by chance, or the beginning of one
      Bytes raw(1 + input->byte());
      raw.resize(input->bytes(raw.data(), raw.size()));
      append(stream, raw.data(), raw.size());
      return raw.size() < sizeof h && input->empty();
    }
  }
  append(stream, &h, sizeof h);
  return false;
}

// A receiver behind a handshake that has ended well; the other end of its socket.
std::unique_ptr<Receiver> greeted(int fds[2], const Receiver::Admit& admit, const Receiver::Find& find) {
  static const Secret secret = the_secret();
  Handshake initiator, acceptor;
  const int64_t until = now_ns() + int64_t{10'000'000'000};
  FUZZ_CHECK(Handshake::initiate(secret, the_terms(true), "peer", until, &initiator).ok());
  FUZZ_CHECK(Handshake::accept(secret, the_terms(false), "peer", until, &acceptor).ok());
  auto receiver = std::make_unique<Receiver>(fds[0], Address{}, std::move(acceptor));
  for (int turn = 0; turn < 8 && (!initiator.done() || receiver->greeting()); turn++) {
    bool ignored;
    FUZZ_CHECK(initiator.done() || drive(&initiator, fds[1], &ignored).ok());
    FUZZ_CHECK(receiver->pump(admit, find, &ignored).ok());
  }
  FUZZ_CHECK(initiator.done() && !receiver->greeting() && receiver->peer() == 2);
  return receiver;
}

void run(FuzzInput* input) {
  int fds[2];
  FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  Taker taker;
  const auto find = [&](int, const MessageHeader& h) {
    return h.group == 1 || h.group == 2 ? &taker : nullptr;
  };
  const auto admit = [](const Receiver&, int, uint32_t) { return Status(); };
  const std::unique_ptr<Receiver> receiver = greeted(fds, admit, find);
  const bool forgets = input->byte() % 4 == 0;
  Bytes stream;
  size_t n_whole = 0;
  bool sound = true;
  while (sound && !input->empty() && stream.size() < 100'000) sound = say(input, &stream, &n_whole);
  taker.checks = sound;
  const size_t piece = 1 + stream.size() / (1 + input->byte() % 16);
  Status status;
  for (size_t at = 0; at < stream.size() && status.ok();) {
    const ssize_t n = write(fds[1], stream.data() + at, std::min(piece, stream.size() - at));
    FUZZ_CHECK(n > 0);
    at += static_cast<size_t>(n);
    bool more = true;
    while (more && status.ok()) status = receiver->pump(admit, find, &more);
    if (!forgets) continue;
    receiver->forget(&taker);
    taker.forgotten();
  }
  FUZZ_CHECK(taker.n_arrived <= n_whole + (sound ? 0 : 4));
  if (sound) FUZZ_CHECK(status.ok() && (forgets || taker.n_arrived == n_whole));
  ::close(fds[1]);
}

}  // namespace
}  // namespace pycomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n_bytes) {
  pycomm::FuzzInput input(data, n_bytes);
  pycomm::run(&input);
  return 0;
}
