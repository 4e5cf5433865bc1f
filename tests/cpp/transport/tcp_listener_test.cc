// Listening and connecting: ports of a range, refusals and deadlines with words that help, strangers, and a
// process that has no descriptor left (a forked child of its own, since the limit is the process's).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "transport/tcp/listener.h"
#include "transport/tcp_pair.h"

namespace pycomm {
namespace {

const Address kHere = Address::loopback(AF_INET);

bool mentions(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

// The end of a connection attempt.
Status connect_to(const Address& to, int64_t deadline_ns, int* fd = nullptr) {
  std::unique_ptr<Connector> connector;
  PYCOMM_RETURN_IF_ERROR(Connector::start({}, to, "rank 3 (host b)", deadline_ns, &connector));
  bool connected = false;
  while (!connected) {
    PYCOMM_RETURN_IF_ERROR(connector->step(&connected));
    if (!connected) wait_for(connector->fd(), POLLOUT, 10);
  }
  if (fd != nullptr) *fd = connector->release();
  return Status();
}

TEST(TcpPortRange, WhatIsUnderstood) {
  PortRange range;
  ASSERT_TRUE(parse_port_range("50000-50100", &range).ok());
  EXPECT_EQ(range.first, 50000);
  EXPECT_EQ(range.last, 50100);
  ASSERT_TRUE(parse_port_range("65535", &range).ok());
  EXPECT_EQ(range.first, 65535);
  EXPECT_EQ(range.last, 65535);
  ASSERT_TRUE(parse_port_range("", &range).ok());
  EXPECT_EQ(range.first, 0);
  for (const char* bad :
       {"0-5", "5-4", "1-65536", "-5", "5-", "a-b", "1-2-3", " 5", "5 - 6", "99999999999"}) {
    const Status status = parse_port_range(bad, &range);
    EXPECT_EQ(status.code(), Code::kValue) << bad;
    EXPECT_TRUE(mentions(status, "PYCOMM_PORT_RANGE="));
    EXPECT_EQ(range.first, 0);
  }
}

// Finds `n` free ports in a row, below those that the kernel gives out by itself.
uint16_t free_ports(uint16_t n) {
  for (uint32_t first = 20'000 + static_cast<uint32_t>(getpid()) % 10'000;; first += n) {
    std::vector<std::unique_ptr<Listener>> taken(n);
    bool all = true;
    for (uint16_t i = 0; i < n && all; i++) {
      const auto port = static_cast<uint16_t>(first + i);
      all = Listener::open(kHere, {port, port}, 1, &taken[i]).ok();
    }
    if (all) return static_cast<uint16_t>(first);
  }
}

TEST(TcpListener, TakesTheFirstFreePortOfItsRange) {
  const uint16_t first = free_ports(3);
  const PortRange range{first, static_cast<uint16_t>(first + 2)};
  std::unique_ptr<Listener> listeners[4];
  for (int i = 0; i < 3; i++) {
    const Status status = Listener::open(kHere, range, 8, &listeners[i]);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(listeners[i]->address(), kHere.with_port(static_cast<uint16_t>(first + i)));
  }
  const Status status = Listener::open(kHere, range, 8, &listeners[3]);
  EXPECT_EQ(status.code(), Code::kSystem);
  EXPECT_TRUE(mentions(status, format("ports %u-%u: all are taken", first, first + 2))) << status.message();
  // After a connection that this side ended (TIME_WAIT) the port can be had again at once.
  int fd = -1, accepted = -1;
  Address from;
  ASSERT_TRUE(connect_to(listeners[0]->address(), now_ns() + 10 * kSecond, &fd).ok());
  ASSERT_TRUE(wait_for(listeners[0]->fd(), POLLIN));
  ASSERT_TRUE(listeners[0]->accept(&accepted, &from).ok());
  ASSERT_GE(accepted, 0);
  close(accepted);
  close(fd);
  listeners[0].reset();
  EXPECT_TRUE(Listener::open(kHere, {first, first}, 8, &listeners[0]).ok());
}

TEST(TcpListener, BindsOneAddressOfThisHost) {
  std::unique_ptr<Listener> listener;
  Address any, foreign;
  ASSERT_TRUE(Address::parse("0.0.0.0", &any).ok());
  EXPECT_EQ(Listener::open(any, {}, 8, &listener).code(), Code::kValue);
  EXPECT_EQ(Listener::open({}, {}, 8, &listener).code(), Code::kValue);
  ASSERT_TRUE(Address::parse("203.0.113.5", &foreign).ok());  // RFC 5737: nobody's
  const Status status = Listener::open(foreign, {}, 8, &listener);
  EXPECT_EQ(status.code(), Code::kSystem);
  EXPECT_TRUE(mentions(status, "no address of this host, which has")) << status.message();
  EXPECT_TRUE(mentions(status, "127.0.0.1/8"));
}

TEST(TcpListener, AcceptDoesNotBlockAndPreparesTheSocket) {
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::open(kHere, {}, 8, &listener).ok());
  int accepted = 0, fd = -1;
  Address from;
  ASSERT_TRUE(listener->accept(&accepted, &from).ok());
  EXPECT_EQ(accepted, -1);
  ASSERT_TRUE(connect_to(listener->address(), now_ns() + 10 * kSecond, &fd).ok());
  ASSERT_TRUE(wait_for(listener->fd(), POLLIN));
  ASSERT_TRUE(listener->accept(&accepted, &from).ok());
  ASSERT_GE(accepted, 0);
  EXPECT_TRUE(from.same_host(kHere) && from.port != 0);
  for (const int s : {accepted, fd}) {
    int nodelay = 0;
    socklen_t n = sizeof nodelay;
    EXPECT_EQ(getsockopt(s, IPPROTO_TCP, TCP_NODELAY, &nodelay, &n), 0);
    EXPECT_NE(nodelay, 0);
    EXPECT_TRUE(fcntl(s, F_GETFL) & O_NONBLOCK);
    EXPECT_TRUE(fcntl(s, F_GETFD) & FD_CLOEXEC);
    close(s);
  }
}

// 300 connections that end at once: accept copes, and the listener serves afterwards.
TEST(TcpListener, SurvivesAPortScan) {
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::open(kHere, {}, 16, &listener).ok());
  const linger at_once{1, 0};
  int n_lines = 0;
  for (int i = 0; i < 300; i++) {
    int fd = -1, accepted = -1;
    Address from;
    ASSERT_TRUE(connect_to(listener->address(), now_ns() + 10 * kSecond, &fd).ok());
    if (i % 2 == 0) setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(fd);
    ASSERT_TRUE(listener->accept(&accepted, &from).ok());
    if (accepted < 0) continue;
    n_lines += listener->note_stranger(from) ? 1 : 0;
    close(accepted);
  }
  EXPECT_LE(n_lines, 9) << "1, 2, 4, … 256";
  EXPECT_GE(listener->n_strangers(), 140u);
  int fd = -1;
  EXPECT_TRUE(connect_to(listener->address(), now_ns() + 10 * kSecond, &fd).ok());
  close(fd);
}

TEST(TcpListener, StrangersAreCountedBySource) {
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::open(kHere, {}, 8, &listener).ok());
  EXPECT_EQ(listener->strangers(), "");
  Address a;
  ASSERT_TRUE(Address::parse("10.0.0.9:1", &a).ok());
  EXPECT_TRUE(listener->note_stranger(a));
  EXPECT_EQ(listener->strangers(), "1 foreign connection: 1 from 10.0.0.9");
  EXPECT_TRUE(listener->note_stranger(a.with_port(2)));
  EXPECT_FALSE(listener->note_stranger(a.with_port(3)));
  EXPECT_TRUE(listener->note_stranger(a.with_port(4)));
  for (int i = 0; i < 200; i++) {
    a.bytes[1] = static_cast<uint8_t>(i);
    listener->note_stranger(a);
  }
  EXPECT_EQ(listener->n_strangers(), 204u);
  const std::string text = listener->strangers();
  EXPECT_EQ(text.find("204 foreign connections: 5 from 10.0.0.9, 1 from 10.1.0.9"), 0u) << text;
  EXPECT_NE(text.find(", 184 from elsewhere"), std::string::npos) << text;
}

// In a child with few descriptors: 0 when all went as it should, else the line.
#define CHILD_CHECK(condition) \
  if (!(condition)) return __LINE__
int without_descriptors() {
  std::unique_ptr<Listener> listener;
  CHILD_CHECK(Listener::open(kHere, {}, 8, &listener).ok());
  const Address at = listener->address();
  sockaddr_storage addr;
  const socklen_t n = at.to_sockaddr(&addr);
  int clients[3];
  for (int& client : clients) client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHILD_CHECK(connect(clients[0], reinterpret_cast<sockaddr*>(&addr), n) == 0);
  std::vector<int> fillers;
  for (int fd = open("/dev/null", O_RDONLY); fd >= 0; fd = open("/dev/null", O_RDONLY)) fillers.push_back(fd);
  int fd = 0;
  Address from;
  CHILD_CHECK(wait_for(listener->fd(), POLLIN));
  CHILD_CHECK(listener->accept(&fd, &from).ok() && fd == -1 && listener->n_turned_away() == 1);
  char byte;
  CHILD_CHECK(wait_for(clients[0], POLLIN) && recv(clients[0], &byte, 1, 0) == 0);  // its peer sees an end
  CHILD_CHECK(!wait_for(listener->fd(), POLLIN, 0));  // and the loop does not turn
  std::unique_ptr<Connector> connector;
  const Status refused = Connector::start({}, at, "rank 3", now_ns() + kSecond, &connector);
  CHILD_CHECK(mentions(refused, "ulimit -n"));
  for (int i = 1; i < 3; i++) {
    if (i == 2) close(fillers.back());
    CHILD_CHECK(connect(clients[i], reinterpret_cast<sockaddr*>(&addr), n) == 0);
    CHILD_CHECK(wait_for(listener->fd(), POLLIN));
    CHILD_CHECK(listener->accept(&fd, &from).ok());
    CHILD_CHECK((fd >= 0) == (i == 2));  // it goes on as soon as there is one again
  }
  CHILD_CHECK(listener->n_turned_away() == 2);
  return 0;
}

TEST(TcpListener, SurvivesWithoutDescriptors) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit few{40, 40};
    setrlimit(RLIMIT_NOFILE, &few);
    _exit(without_descriptors() & 0xff);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "line of the child's failure, modulo 256";
}

TEST(TcpConnector, RefusedSaysWhoAndWhere) {
  Address to;
  {
    std::unique_ptr<Listener> listener;
    ASSERT_TRUE(Listener::open(kHere, {}, 8, &listener).ok());
    to = listener->address();
  }
  const Status status = connect_to(to, now_ns() + 10 * kSecond);
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_TRUE(mentions(status, "connection refused to rank 3 (host b): from this host to " + to.to_string()))
      << status.message();
}

TEST(TcpConnector, TimesOutWhereNobodyAnswers) {
  // A listener whose queue is full does not answer.
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::open(kHere, {}, 0, &listener).ok());
  int filler = -1;
  ASSERT_TRUE(connect_to(listener->address(), now_ns() + 10 * kSecond, &filler).ok());
  const int64_t started = now_ns();
  const Status status = connect_to(listener->address(), started + kSecond / 5);
  EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
  EXPECT_TRUE(mentions(status, "timed out after 0.") && mentions(status, "rank 3 (host b)"))
      << status.message();
  EXPECT_TRUE(mentions(status, "PYCOMM_PORT_RANGE") && mentions(status, "PYCOMM_SOCKET_IFNAME"));
  EXPECT_GE(now_ns() - started, kSecond / 5);
  close(filler);
}

TEST(TcpConnector, AddressesThatCannotBeAreRefused) {
  Address to;
  ASSERT_TRUE(Address::parse("[::1]:5", &to).ok());
  std::unique_ptr<Connector> connector;
  EXPECT_TRUE(mentions(Connector::start(kHere, to, "rank 3", now_ns() + kSecond, &connector),
                       "one is IPv4, the other IPv6"));
  EXPECT_TRUE(mentions(Connector::start({}, kHere, "rank 3", now_ns() + kSecond, &connector), "no address"));
}

TEST(TcpConnector, ConnectsFromTheAddressThatItIsGiven) {
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::open(kHere, {}, 8, &listener).ok());
  Address source, from;
  ASSERT_TRUE(Address::parse("127.0.0.77", &source).ok());
  std::unique_ptr<Connector> connector;
  ASSERT_TRUE(Connector::start(source, listener->address(), "rank 3", now_ns() + kSecond, &connector).ok());
  ASSERT_TRUE(wait_for(listener->fd(), POLLIN));
  int fd = -1;
  ASSERT_TRUE(listener->accept(&fd, &from).ok());
  EXPECT_TRUE(from.same_host(source));
  close(fd);
}

}  // namespace
}  // namespace pycomm
