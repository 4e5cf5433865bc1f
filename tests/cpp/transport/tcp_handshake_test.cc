// The handshake: who is let in, what a stranger sees, what both sides are told when they do not fit together.
// Every message is tried cut short, changed in each byte, replayed and sent back. The keys and proofs are
// computed again here with HMAC-SHA256 as RFC 2104 writes it, over libsodium's plain hash.
#include <gtest/gtest.h>
#include <sodium.h>

#include <functional>
#include <set>

#include "transport/tcp/handshake.h"
#include "transport/tcp_pair.h"

namespace pycomm {
namespace {

constexpr size_t kHello = Handshake::kHelloBytes;
constexpr size_t kProof = Handshake::kProofBytes;

bool mentions(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

TEST(TcpHandshake, BothSidesLearnWhoTheOtherIs) {
  for (size_t piece : {1000, 41, 7, 1}) {
    Ends ends;
    exchange(&ends, piece);
    ASSERT_TRUE(ends.both_done()) << ends.initiator_status.message() << ends.acceptor_status.message();
    EXPECT_TRUE(ends.initiator.authenticated() && ends.acceptor.authenticated());
    EXPECT_EQ(ends.acceptor.peer().from_rank, 2u);
    EXPECT_EQ(ends.acceptor.peer().channel, 1u);
    EXPECT_EQ(ends.initiator.take_session().peer, "rank 1 (host a, pid 11)");
    EXPECT_EQ(ends.acceptor.take_session().peer, "rank 2 (host b, pid 22)");
  }
}

TEST(TcpHandshake, ItAsksForItsOwnBytesOnly) {
  Ends ends;
  EXPECT_EQ(ends.acceptor.to_receive().size(), kHello);
  EXPECT_TRUE(ends.acceptor.to_send().empty()) << "a listener says nothing before it is greeted";
  ASSERT_TRUE(hear(&ends.acceptor, say(&ends.initiator)).ok());
  EXPECT_EQ(ends.initiator.to_receive().size(), kHello);
  ASSERT_TRUE(hear(&ends.initiator, say(&ends.acceptor)).ok());
  EXPECT_EQ(ends.acceptor.to_receive().size(), kProof);
}

std::vector<uint8_t> hmac(const std::vector<uint8_t>& key, const std::string& label,
                          const std::vector<uint8_t>& text) {
  std::vector<uint8_t> inner(64, 0x36), outer(64, 0x5c), hash(32);
  for (size_t i = 0; i < key.size(); i++) inner[i] ^= key[i], outer[i] ^= key[i];
  inner.insert(inner.end(), label.begin(), label.end());
  inner.insert(inner.end(), text.begin(), text.end());
  crypto_hash_sha256(hash.data(), inner.data(), inner.size());
  outer.insert(outer.end(), hash.begin(), hash.end());
  crypto_hash_sha256(hash.data(), outer.data(), outer.size());
  return hash;
}

TEST(TcpHandshake, ProofsAndKeysAreHmacOfAllThatWasSaid) {
  Terms i = initiator_terms(), a = acceptor_terms();
  i.encrypt = a.encrypt = true;
  Ends ends(i, a);
  std::vector<uint8_t> all;
  const auto pass = [&](Handshake* from, Handshake* to) {
    const std::vector<uint8_t> bytes = say(from);
    all.insert(all.end(), bytes.begin(), bytes.end());
    ASSERT_TRUE(hear(to, bytes).ok());
  };
  pass(&ends.initiator, &ends.acceptor);
  pass(&ends.acceptor, &ends.initiator);
  pass(&ends.initiator, &ends.acceptor);
  pass(&ends.acceptor, &ends.initiator);
  ASSERT_TRUE(ends.both_done());
  ASSERT_EQ(all.size(), 2 * kHello + 2 * kProof);

  std::vector<uint8_t> key(32);
  std::iota(key.begin(), key.end(), uint8_t{1});
  using namespace std::string_literals;
  const auto part = [&](size_t begin, size_t end) {
    return std::vector<uint8_t>(all.begin() + static_cast<ptrdiff_t>(begin),
                                all.begin() + static_cast<ptrdiff_t>(end));
  };
  const size_t end_3 = 2 * kHello + kProof;
  EXPECT_EQ(part(end_3 - 32, end_3), hmac(key, "pycomm initiator"s, part(0, end_3 - 32)));
  EXPECT_EQ(part(all.size() - 32, all.size()), hmac(key, "pycomm acceptor\0"s, part(0, all.size() - 32)));
  const Session session_i = ends.initiator.take_session(), session_a = ends.acceptor.take_session();
  const auto bytes = [](const std::array<uint8_t, 32>& k) {
    return std::vector<uint8_t>(k.begin(), k.end());
  };
  EXPECT_EQ(bytes(session_i.send_key), hmac(key, "pycomm key I->A\0"s, all));
  EXPECT_EQ(bytes(session_i.receive_key), hmac(key, "pycomm key A->I\0"s, all));
  EXPECT_EQ(session_i.send_key, session_a.receive_key);
  EXPECT_EQ(session_i.receive_key, session_a.send_key);
  EXPECT_NE(session_i.cipher, Session::Cipher::kNone);
  EXPECT_EQ(session_i.cipher, session_a.cipher);
}

TEST(TcpHandshake, EachRunHasItsOwnNoncesAndKeys) {
  std::set<std::array<uint8_t, 32>> keys;
  Terms i = initiator_terms(), a = acceptor_terms();
  i.encrypt = a.encrypt = true;
  for (int run = 0; run < 20; run++) {
    Ends ends(i, a);
    exchange(&ends);
    const Session session = ends.initiator.take_session();
    keys.insert(session.send_key);
    keys.insert(session.receive_key);
  }
  EXPECT_EQ(keys.size(), 40u);
}

TEST(TcpHandshake, AWrongSecretIsAStranger) {
  Ends ends(initiator_terms(), acceptor_terms(), 1, 2);
  const SocketPair pair = tcp_pair();
  drive_both(&ends, pair);
  EXPECT_EQ(ends.acceptor_status.code(), Code::kPeerLost);
  EXPECT_EQ(ends.initiator_status.code(), Code::kPeerLost);
  EXPECT_FALSE(ends.acceptor.authenticated() || ends.initiator.authenticated());
  EXPECT_TRUE(mentions(ends.acceptor_status, "10.0.0.2:6: it could not prove"))
      << ends.acceptor_status.message();
  EXPECT_TRUE(mentions(ends.acceptor_status, "PYCOMM_SECRET_FILE"));
  EXPECT_TRUE(mentions(ends.initiator_status, "rank 1 at 10.0.0.1:5: it "));
  EXPECT_TRUE(mentions(ends.initiator_status, "its secret is another one"))
      << ends.initiator_status.message();
  EXPECT_FALSE(mentions(ends.acceptor_status, "host b")) << "an unproved name is not repeated";
  close(pair.a);
  close(pair.b);
}

// An impostor that listens with another secret gets no further than the initiator's proof.
TEST(TcpHandshake, AListenerWithoutTheSecretIsRefused) {
  Ends ends(initiator_terms(), acceptor_terms(), 1, 1), impostor(initiator_terms(), acceptor_terms(), 2, 2);
  ASSERT_TRUE(hear(&impostor.acceptor, say(&impostor.initiator)).ok());
  ASSERT_TRUE(hear(&impostor.initiator, say(&impostor.acceptor)).ok());
  ASSERT_TRUE(hear(&impostor.acceptor, say(&impostor.initiator)).ok());
  const std::vector<uint8_t> proof = say(&impostor.acceptor);
  ASSERT_TRUE(hear(&ends.acceptor, say(&ends.initiator)).ok());
  ASSERT_TRUE(hear(&ends.initiator, say(&ends.acceptor)).ok());
  say(&ends.initiator);
  const Status status = hear(&ends.initiator, proof);
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_FALSE(ends.initiator.authenticated());
}

TEST(TcpHandshake, EveryChangedByteIsNoticed) {
  for (size_t target = 0; target < 2 * kHello + 2 * kProof; target++) {
    Ends ends;
    size_t offset = 0;
    Handshake* sides[2] = {&ends.initiator, &ends.acceptor};
    bool refused = false;
    for (int message = 0; message < 4 && !refused; message++) {
      std::vector<uint8_t> bytes = say(sides[message % 2]);
      if (target >= offset && target < offset + bytes.size()) bytes[target - offset] ^= 0x20;
      offset += bytes.size();
      refused = !hear(sides[1 - message % 2], bytes).ok();
    }
    ASSERT_TRUE(refused) << "byte " << target;
    ASSERT_FALSE(ends.both_done()) << "byte " << target;
  }
}

TEST(TcpHandshake, ReplayedMessagesAreRefused) {
  Ends recorded;
  const std::vector<uint8_t> hello_i = say(&recorded.initiator);
  ASSERT_TRUE(hear(&recorded.acceptor, hello_i).ok());
  const std::vector<uint8_t> hello_a = say(&recorded.acceptor);
  ASSERT_TRUE(hear(&recorded.initiator, hello_a).ok());
  const std::vector<uint8_t> proof_i = say(&recorded.initiator);
  ASSERT_TRUE(hear(&recorded.acceptor, proof_i).ok());
  const std::vector<uint8_t> proof_a = say(&recorded.acceptor);
  ASSERT_TRUE(hear(&recorded.initiator, proof_a).ok() && recorded.both_done());

  Ends fresh;  // the whole recording, played to a fresh acceptor, and to a fresh initiator
  ASSERT_TRUE(hear(&fresh.acceptor, hello_i).ok());
  say(&fresh.acceptor);
  EXPECT_EQ(hear(&fresh.acceptor, proof_i).code(), Code::kPeerLost);
  EXPECT_FALSE(fresh.acceptor.authenticated());
  say(&fresh.initiator);
  ASSERT_TRUE(hear(&fresh.initiator, hello_a).ok());
  say(&fresh.initiator);
  EXPECT_EQ(hear(&fresh.initiator, proof_a).code(), Code::kPeerLost);
  EXPECT_FALSE(fresh.initiator.authenticated());
}

TEST(TcpHandshake, ReflectedMessagesAreRefused) {
  Ends ends;
  EXPECT_EQ(hear(&ends.initiator, say(&ends.initiator)).code(), Code::kPeerLost) << "its own challenge";

  // Its own proof, after the challenge of somebody else.
  Ends again;
  ASSERT_TRUE(hear(&again.acceptor, say(&again.initiator)).ok());
  ASSERT_TRUE(hear(&again.initiator, say(&again.acceptor)).ok());
  EXPECT_EQ(hear(&again.initiator, say(&again.initiator)).code(), Code::kPeerLost);
  EXPECT_FALSE(again.initiator.authenticated());

  // A process that both listens and connects is not talked into authenticating itself: rank 2's initiator,
  // relayed to rank 2's own acceptor. Its proof is true, so both are told, and it is not let in.
  Terms own = acceptor_terms();
  own.to_rank = 2;
  Ends self(initiator_terms(), own);
  exchange(&self);
  EXPECT_FALSE(self.initiator.done() || self.acceptor.done());
  EXPECT_EQ(self.acceptor_status.code(), Code::kMismatch);
  EXPECT_EQ(self.initiator_status.code(), Code::kMismatch);
}

TEST(TcpHandshake, WhatDiffersIsToldOnBothSides) {
  struct Case {
    std::function<void(Terms*)> change;  // of the acceptor's
    std::string words;
  };
  const Case cases[] = {
      {[](Terms* t) { t->version = 2; }, "install the same pycomm"},
      {[](Terms* t) { t->job = 0x77; }, "0000000000000077"},
      {[](Terms* t) { t->n_ranks = 8; }, "numbers of ranks differ"},
      {[](Terms* t) { t->group = 8; }, "groups differ"},
      {[](Terms* t) { t->to_rank = 3; }, "rank 3"},
      {[](Terms* t) { t->n_channels = 5; }, "numbers of sockets"},
      {[](Terms* t) { t->encrypt = true; }, "PYCOMM_ENCRYPT differs"},
      {[](Terms* t) {
         t->settings = 98;
         t->set_settings_text("slice=1M");
       },
       "slice=1M"},
  };
  for (const Case& c : cases) {
    Terms a = acceptor_terms();
    c.change(&a);
    Ends ends(initiator_terms(), a);
    exchange(&ends, 100);
    EXPECT_FALSE(ends.initiator.done() || ends.acceptor.done()) << c.words;
    for (const Status* status : {&ends.initiator_status, &ends.acceptor_status}) {
      EXPECT_EQ(status->code(), Code::kMismatch) << c.words;
      EXPECT_TRUE(mentions(*status, c.words)) << status->message();
    }
    EXPECT_TRUE(ends.initiator.authenticated() && ends.acceptor.authenticated());
    EXPECT_TRUE(mentions(ends.acceptor_status, "rank 2 (host b, pid 22) [10.0.0.2:6]"))
        << ends.acceptor_status.message();
    EXPECT_TRUE(mentions(ends.initiator_status, "(host a, pid 11) [rank 1 at 10.0.0.1:5]"))
        << ends.initiator_status.message();
  }
}

TEST(TcpHandshake, RanksAndSocketsThatCannotBeAreRefused) {
  const std::function<void(Terms*)> changes[] = {
      [](Terms* t) { t->from_rank = 4; }, [](Terms* t) { t->from_rank = 1; },
      [](Terms* t) { t->from_rank = kAnyRank; }, [](Terms* t) { t->channel = 3; }};
  for (const auto& change : changes) {
    Terms i = initiator_terms();
    change(&i);
    Ends ends(i);
    exchange(&ends);
    EXPECT_EQ(ends.acceptor_status.code(), Code::kMismatch);
    EXPECT_EQ(ends.initiator_status.code(), Code::kMismatch);
  }
}

TEST(TcpHandshake, OtherProgramsAreDroppedAtTheirFirstWrongByte) {
  for (const char* bytes : {"GET / HTTP/1.1\r\n", "SSH-2.0", "PYCOMN", "\x16\x03\x01", "P\n"}) {
    const std::string text = bytes;
    Ends ends;
    const Status status = hear(&ends.acceptor, {text.begin(), text.end()});
    EXPECT_EQ(status.code(), Code::kPeerLost) << text;
    EXPECT_TRUE(mentions(status, "no greeting of pycomm")) << status.message();
    EXPECT_TRUE(ends.acceptor.to_receive().empty() && ends.acceptor.to_send().empty());
  }
}

// The peer hangs up after n bytes of what it would say, for every n: an error that fits, and nothing else.
TEST(TcpHandshake, CutShortAtEveryByte) {
  for (const bool initiator_stops : {true, false}) {
    const size_t total = kHello + kProof;
    for (size_t limit = 0; limit < total; limit += limit % kHello < 8 ? 1 : 13) {
      Ends ends;
      Handshake* talker = initiator_stops ? &ends.initiator : &ends.acceptor;
      Handshake* listener = initiator_stops ? &ends.acceptor : &ends.initiator;
      size_t n_said = 0;
      Status ignored, status;
      while (true) {
        const bool spoke = n_said < limit && carry(talker, listener, 1, &ignored, &status);
        n_said += spoke ? 1 : 0;
        if (!spoke && !carry(listener, talker, 1000, &status, &ignored)) break;
      }
      ASSERT_EQ(n_said, limit);
      ASSERT_FALSE(listener->done());
      ASSERT_TRUE(status.ok()) << status.message();
      status = listener->ended(limit % 2 == 0 ? 0 : ECONNRESET);
      ASSERT_EQ(status.code(), Code::kPeerLost);
      ASSERT_TRUE(listener->to_send().empty() && listener->to_receive().empty());
      bool wants_write;
      ASSERT_FALSE(drive(listener, -1, &wants_write).ok()) << "a failed handshake stays failed";
    }
  }
}

TEST(TcpHandshake, APortScanIsToldApart) {
  Ends ends;
  const SocketPair pair = tcp_pair();
  close(pair.a);
  ASSERT_TRUE(wait_for(pair.b, POLLIN));
  bool wants_write;
  const Status status = drive(&ends.acceptor, pair.b, &wants_write);
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_TRUE(mentions(status, "without a word (a port scan?)")) << status.message();
  close(pair.b);
}

// A peer that sends a byte now and then does not hold the place longer than the deadline says.
TEST(TcpHandshake, SlowPeersTimeOut) {
  Ends ends;
  ASSERT_TRUE(
      Handshake::accept(secret_of(1), acceptor_terms(), "10.0.0.9:6", now_ns() + kSecond / 5, &ends.acceptor)
          .ok());
  const SocketPair pair = tcp_pair();
  const std::vector<uint8_t> hello = say(&ends.initiator);
  const int64_t started = now_ns();
  Status status;
  bool wants_write;
  for (size_t i = 0; status.ok() && i + 1 < hello.size(); i++) {
    ASSERT_EQ(send(pair.a, &hello[i], 1, 0), 1);
    wait_for(pair.a, POLLIN, 20);  // nothing will come
    status = drive(&ends.acceptor, pair.b, &wants_write);
    EXPECT_FALSE(wants_write);
  }
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_TRUE(mentions(status, "10.0.0.9:6: timed out")) << status.message();
  EXPECT_GE(now_ns() - started, kSecond / 10);
  close(pair.a);
  close(pair.b);
}

TEST(TcpHandshake, NothingIsDoneWithoutASecret) {
  Handshake handshake;
  EXPECT_FALSE(Handshake::initiate(Secret(), initiator_terms(), "", 0, &handshake).ok());
  EXPECT_TRUE(handshake.to_send().empty() && handshake.to_receive().empty() && !handshake.done());
}

TEST(TcpHandshake, TheBytesAfterItStayInTheSocket) {
  Ends ends;
  const SocketPair pair = tcp_pair();
  bool wants_write;
  while (!ends.initiator.done()) {
    ASSERT_TRUE(drive(&ends.initiator, pair.a, &wants_write).ok());
    ASSERT_TRUE(drive(&ends.acceptor, pair.b, &wants_write).ok());
    if (ends.acceptor.done() && !ends.initiator.done()) {
      ASSERT_EQ(send(pair.b, "data", 4, 0), 4);  // before the other side is done
    }
  }
  char data[8] = {};
  ASSERT_TRUE(wait_for(pair.a, POLLIN));
  EXPECT_EQ(recv(pair.a, data, sizeof data, 0), 4);
  EXPECT_STREQ(data, "data");
  close(pair.a);
  close(pair.b);
}

TEST(TcpTerms, TextsAreCutAndCleaned) {
  Terms t;
  t.set_who(std::string(100, 'x') + "\n");
  EXPECT_EQ(std::string(t.who), std::string(63, 'x'));
  t.set_who("a\nb\x1b[31m\xff");
  EXPECT_STREQ(t.who, "a?b?[31m?");
}

}  // namespace
}  // namespace pycomm
