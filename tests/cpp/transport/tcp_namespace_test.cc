// Two hosts, as network namespaces joined by a veth pair: the choice of interfaces by real routes, a
// connection, its handshake and its stream between them, and what a missing route, an absent host and a port
// that meets itself are called. Everything lives in forked children and ends with them. Needs the right to
// make namespaces (root) and the program ip; skipped loudly without.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>

#include "transport/tcp_pair.h"

namespace pycomm {
namespace {

constexpr int kSkipped = 77;

bool run(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()) == 0; }

bool new_host() { return unshare(CLONE_NEWNET) == 0 && run("ip link set lo up"); }

// The kernel tells an interface's carrier some time after both ends are up.
bool comes_up(const std::string& interface) {
  const int64_t deadline = now_ns() + 20 * kSecond;
  while (!run("ip link show " + interface + " | grep -q 'state UP'")) {
    if (now_ns() > deadline) return false;
    usleep(1000);
  }
  return true;
}

// Prints what is wrong, for the test's output, and ends this child.
#define CHILD_CHECK(condition, text)                                                 \
  if (!(condition)) {                                                                \
    std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, (text).c_str()); \
    _exit(1);                                                                        \
  }

bool mentions(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

// Runs `body` in a child; it ends with _exit or returns.
void in_child(void (*body)()) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    body();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped)
    GTEST_SKIP() << "*** NO NETWORK NAMESPACES: this needs root, and the program ip (Debian: iproute2)";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A byte on a pipe: "I am here", "go on".
void signal_to(int fd) { CHILD_CHECK(write(fd, "x", 1) == 1, std::string()); }
void await(int fd) {
  char byte;
  CHILD_CHECK(read(fd, &byte, 1) == 1, std::string("the other host has ended"));
}

Address address(const std::string& text) {
  Address a;
  CHILD_CHECK(Address::parse(text, &a).ok(), text);
  return a;
}

Status connect_from(const Address& from, const Address& to, double seconds, int* fd) {
  const int64_t deadline = now_ns() + static_cast<int64_t>(seconds * 1e9);
  std::unique_ptr<Connector> connector;
  PYCOMM_RETURN_IF_ERROR(Connector::start(from, to, "rank 1 (host b)", deadline, &connector));
  for (bool connected = false; !connected;) {
    PYCOMM_RETURN_IF_ERROR(connector->step(&connected));
    if (!connected) wait_for(connector->fd(), POLLOUT, 20);
  }
  *fd = connector->release();
  return Status();
}

// A handshake over a connected socket, then `n_bytes` that a sends and b checks.
void talk(int fd, bool initiator) {
  const int64_t deadline = now_ns() + 20 * kSecond;
  Handshake handshake;
  Status status = initiator ? Handshake::initiate(secret_of(1), initiator_terms(), "b", deadline, &handshake)
                            : Handshake::accept(secret_of(1), acceptor_terms(), "a", deadline, &handshake);
  while (status.ok() && !handshake.done()) {
    bool wants_write;
    status = drive(&handshake, fd, &wants_write);
    if (!handshake.done()) wait_for(fd, wants_write ? POLLOUT : POLLIN, 1000);
  }
  CHILD_CHECK(status.ok(), status.message());
  std::unique_ptr<Channel> channel;
  CHILD_CHECK(Channel::open(fd, handshake.take_session(), &channel).ok(), std::string());
  std::vector<uint8_t> data(1 << 20);
  size_t n_done = 0;
  while (status.ok() && n_done < data.size()) {
    size_t n = 0;
    const iovec part{data.data() + n_done, data.size() - n_done};
    for (size_t i = n_done; initiator && i < data.size(); i++)
      data[i] = static_cast<uint8_t>(i * 7 + (i >> 9));
    status = initiator ? channel->write(&part, 1, &n) : channel->read(&part, 1, &n);
    if (n == 0) wait_for(fd, initiator ? POLLOUT : POLLIN, 1000);
    n_done += n;
  }
  CHILD_CHECK(status.ok(), status.message());
  for (size_t i = 0; i < data.size(); i++)
    CHILD_CHECK(data[i] == static_cast<uint8_t>(i * 7 + (i >> 9)), std::to_string(i));
  // The receiver hangs up when it has all; only then may the sender.
  char byte;
  for (size_t n = 0; initiator && status.ok(); wait_for(fd, POLLIN, 1000))
    status = channel->read(&byte, 1, &n);
}

void host_b(int from_a, int to_a) {
  alarm(60);
  CHILD_CHECK(new_host(), std::string("namespace"));
  signal_to(to_a);
  await(from_a);  // the link is there
  CHILD_CHECK(
      run("ip addr add 10.77.0.2/24 dev vb && ip addr add fd77::2/64 dev vb nodad && ip link set vb up"),
      std::string("ip"));
  CHILD_CHECK(comes_up("vb"), std::string("no carrier"));
  for (const char* peer : {"10.77.0.1", "fd77::1"}) {
    Address here;
    Status status = choose_address("", address(peer), &here);
    CHILD_CHECK(status.ok(), status.message());
    std::unique_ptr<Listener> listener;
    status = Listener::open(here, {50'000, 50'100}, 8, &listener);
    CHILD_CHECK(status.ok(), status.message());
    CHILD_CHECK(here.same_host(address(here.family == AF_INET ? "10.77.0.2" : "fd77::2")), here.to_string());
    CHILD_CHECK(listener->address().port == 50'000, listener->address().to_string());
    signal_to(to_a);
    CHILD_CHECK(wait_for(listener->fd(), POLLIN, 20'000), std::string("nobody came"));
    int fd = -1;
    Address from;
    CHILD_CHECK(listener->accept(&fd, &from).ok() && fd >= 0, std::string());
    CHILD_CHECK(from.same_host(address(peer)), from.to_string());
    talk(fd, false);
  }
  await(from_a);
  _exit(0);
}

void host_a() {
  int to_b[2], to_a[2];
  if (pipe(to_b) != 0 || pipe(to_a) != 0) _exit(1);
  if (!new_host() || !run("ip link add va type veth peer name vb")) _exit(kSkipped);
  const pid_t b = fork();
  if (b == 0) host_b(to_b[0], to_a[1]);
  close(to_a[1]);
  await(to_a[0]);
  CHILD_CHECK(run(format("ip link set vb netns %d", b)), std::string("ip"));
  CHILD_CHECK(
      run("ip addr add 10.77.0.1/24 dev va && ip addr add fd77::1/64 dev va nodad && ip link set va up && "
          "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && "
          "ip link set docker0 up"),
      std::string("ip"));
  signal_to(to_b[1]);
  for (const char* peer : {"10.77.0.2", "fd77::2"}) {
    await(to_a[0]);  // b listens
    CHILD_CHECK(comes_up("va"), std::string("no carrier"));
    const Address to = address(peer).with_port(50'000);
    Address here;
    Status status = choose_address("", to, &here);
    CHILD_CHECK(status.ok(), status.message());
    int fd = -1;
    status = connect_from(here, to, 10, &fd);
    CHILD_CHECK(status.ok(), status.message());
    talk(fd, true);
  }
  int fd = -1;
  Address out;
  Status status = connect_from({}, address("10.77.0.2:49999"), 10, &fd);
  CHILD_CHECK(status.code() == Code::kPeerLost && mentions(status, "connection refused"), status.message());
  status = connect_from({}, address("198.51.100.1:5"), 10, &fd);
  CHILD_CHECK(status.code() == Code::kPeerLost && mentions(status, "no route to rank 1 (host b)"),
              status.message());
  status = choose_address("", address("198.51.100.1"), &out);
  CHILD_CHECK(mentions(status, "no route from this host") && mentions(status, "va 10.77.0.1/24"),
              status.message());
  status = choose_address("", {}, &out);
  CHILD_CHECK(status.ok() && out.same_host(address("10.77.0.1")), status.message() + out.to_string());
  status = choose_address("", address("172.17.0.5"), &out);
  CHILD_CHECK(!status.ok(), out.to_string());
  CHILD_CHECK(mentions(status, "docker0"), status.message());
  // A host of this network that does not exist: the deadline is before the kernel gives up (3 s).
  status = connect_from({}, address("10.77.0.99:5"), 0.3, &fd);
  CHILD_CHECK(status.code() == Code::kTimeout && mentions(status, "timed out after 0."), status.message());
  signal_to(to_b[1]);
  int ended = 0;
  CHILD_CHECK(waitpid(b, &ended, 0) == b && WIFEXITED(ended) && WEXITSTATUS(ended) == 0,
              std::string("host b"));
}

TEST(TcpNamespaces, TwoHostsMeet) { in_child(host_a); }

// With one ephemeral port, a connect to that port comes from it, and TCP joins it to itself.
void meets_itself() {
  if (!new_host()) _exit(kSkipped);
  std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
  range << "40000 40000" << std::endl;
  if (!range) _exit(kSkipped);
  int fd = -1;
  const Status status = connect_from({}, address("127.0.0.1:40000"), 5, &fd);
  CHILD_CHECK(status.code() == Code::kPeerLost && mentions(status, "connection refused"), status.message());
}

TEST(TcpNamespaces, APortThatMeetsItselfIsRefused) { in_child(meets_itself); }

}  // namespace
}  // namespace pycomm
