#include "transport/node.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "transport/unix_socket.h"

namespace pycomm {

namespace {
struct Hello {
  char magic[8];
  uint32_t version;
  int32_t rank;
  int32_t size;
  uint32_t unused;
  uint64_t reserved;
  char trouble[256];  // why this rank cannot join; it comes only to say so
};
constexpr char kMagic[8] = {'p', 'y', 'c', 'o', 'm', 'm', 0, 1};
constexpr uint32_t kVersion = 2;

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void close_fd(int* fd) {
  if (*fd >= 0) ::close(*fd);
  *fd = -1;
}
}  // namespace

Status make_run_folder(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    return Status::from_errno("mkdir " + folder, errno);
  struct stat st;
  if (lstat(folder.c_str(), &st) != 0) return Status::from_errno("stat " + folder, errno);
  if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077) != 0) {
    return Status::error(Code::kSystem, folder +
                                            " must be a folder of this user with mode 0700; remove it or set "
                                            "PYCOMM_RUN_DIR to another place");
  }
  return Status();
}

Status Node::join(const std::string& folder, int rank, int size, size_t first_block, double timeout_s,
                  Status (*poll)(), std::shared_ptr<Node>* out) {
  std::shared_ptr<Node> node(new Node);
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  node->host_ = host;
  node->rank_ = rank;
  node->size_ = size;
  node->fork_generation_ = fork_generation();
  node->peers_.resize(size);
  Status s = node->make_arena(first_block);
  watch_forks(node.get(), ForkOrder::kNode);
  if (size > 1) {
    node->peers_[rank].trouble = s.message();
    s = make_run_folder(folder);
    if (s.ok()) s = node->exchange(folder, timeout_s, poll);
    if (s.ok()) s = node->trouble();
  }
  // Succeeds for the last one out, and for the only rank of a host, for which its caller may have made it.
  if (!folder.empty()) rmdir(folder.c_str());
  PYCOMM_RETURN_IF_ERROR(std::move(s));
  *out = std::move(node);
  return Status();
}

Status Node::make_arena(size_t first_block) {
  Peer& mine = peers_[rank_];
  mine.pid = getpid();
  mine.met = true;
  PYCOMM_RETURN_IF_ERROR(Arena::create(&arena_));
  uint64_t at = 0;
  PYCOMM_RETURN_IF_ERROR(arena_->allocate(first_block, &at));  // of a fresh file: offset 0
  mine.base = arena_->base();
  return Status();
}

// Whoever has no arena meets the others all the same, so that nobody waits for it until the timeout.
Status Node::trouble() const {
  if (!peers_[rank_].trouble.empty()) return Status::error(Code::kSystem, peers_[rank_].trouble);
  for (int q = 0; q < size_; q++) {
    if (!peers_[q].trouble.empty()) {
      return Status::error(Code::kSystem,
                           format("rank %d (host %s, pid %lld) cannot join: %s", q, host_.c_str(),
                                  static_cast<long long>(peers_[q].pid), peers_[q].trouble.c_str()));
    }
  }
  return Status();
}

Status Node::greet(int socket, int* peer_rank, int* fd, Offer* offer) const {
  Hello hello;
  size_t n = 0;
  PYCOMM_RETURN_IF_ERROR(recv_with_fd(socket, &hello, sizeof hello, 0, &n, fd));
  if (n == 0) return Status();
  if (n != sizeof hello || std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0 || *fd < 0) {
    close_fd(fd);
    return Status::error(Code::kSystem, "a process that is not pycomm connected to the run folder");
  }
  if (hello.version != kVersion || hello.size != size_ || hello.rank < 0 || hello.rank >= size_ ||
      hello.rank == rank_) {
    close_fd(fd);
    return Status::error(
        Code::kValue,
        format("rank %d of %d (protocol %u) tried to join; this is rank %d of %d (protocol %u): "
               "check RANK and WORLD_SIZE of every process",
               hello.rank, hello.size, hello.version, rank_, size_, kVersion));
  }
  *peer_rank = hello.rank;
  *offer = {hello.reserved, std::string(hello.trouble, strnlen(hello.trouble, sizeof hello.trouble))};
  return Status();
}

Status Node::adopt(int peer_rank, int socket, int fd, Offer offer) {
  Peer& p = peers_[peer_rank];
  if (p.met) {
    ::close(fd);
    return Status::error(Code::kValue,
                         format("two processes joined as rank %d: check RANK of every process", peer_rank));
  }
  p.trouble = std::move(offer.trouble);
  if (p.trouble.empty()) {
    PYCOMM_RETURN_IF_ERROR(PeerArena::attach(fd, offer.reserved, &p.arena));
    p.base = p.arena->base();
  } else {
    ::close(fd);
  }
  p.met = true;
  PYCOMM_RETURN_IF_ERROR(check_peer_user(socket, &p.pid));
  p.socket = socket;  // ours from here on; on an error it stays the caller's
  if (p.pid > 0) p.pidfd = static_cast<int>(syscall(SYS_pidfd_open, p.pid, 0));
  return Status();
}

// Every pair meets once: the higher rank connects and speaks first, the lower one answers.
Status Node::exchange(const std::string& folder, double timeout_s, Status (*poll_fn)()) {
  const double end = now_s() + timeout_s;
  const std::string own = format("%s/%d.sock", folder.c_str(), rank_);
  int listener = -1;
  PYCOMM_RETURN_IF_ERROR(unix_listen(own, size_, &listener));
  std::vector<int> out(rank_, -1);  // to lower ranks, until their answer came
  std::vector<int> in;              // from higher ranks, until their hello came
  struct Closer {
    const std::string& path;  // unlinked only by who bound it: a twin's may lie there
    int& listener;
    std::vector<int>&out, &in;
    ~Closer() {
      unlink(path.c_str());
      close_fd(&listener);
      for (int& s : out) close_fd(&s);
      for (int& s : in) close_fd(&s);
    }
  } closer{own, listener, out, in};
  const std::string& mine = peers_[rank_].trouble;
  Hello hello{{}, kVersion, rank_, size_, 0, mine.empty() ? arena_->reserved() : 0, {}};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  std::memcpy(hello.trouble, mine.data(), utf8_prefix(mine, sizeof hello.trouble - 1));
  // With trouble any descriptor does: it is not looked at.
  const auto arena_or = [&](int socket) { return mine.empty() ? arena_->fd() : socket; };
  int joined = 1;
  double last_poll = now_s();
  while (joined < size_) {
    for (int q = 0; q < rank_; q++) {
      if (peers_[q].met) continue;
      if (out[q] < 0) {
        PYCOMM_RETURN_IF_ERROR(unix_connect(folder + "/" + std::to_string(q) + ".sock", &out[q]));
        if (out[q] < 0) continue;
        PYCOMM_RETURN_IF_ERROR(send_with_fd(out[q], &hello, sizeof hello, arena_or(out[q])));
      }
      int peer = -1, fd = -1;
      Offer offer;
      PYCOMM_RETURN_IF_ERROR(greet(out[q], &peer, &fd, &offer).within(format("joining rank %d", q)));
      if (peer < 0) continue;
      PYCOMM_RETURN_IF_ERROR(adopt(q, out[q], fd, std::move(offer)));
      out[q] = -1;
      joined++;
    }
    int fresh = -1;
    PYCOMM_RETURN_IF_ERROR(unix_accept(listener, 1, &fresh));
    if (fresh >= 0) in.push_back(fresh);
    for (int& s : in) {
      int peer = -1, fd = -1;
      Offer offer;
      Status heard = greet(s, &peer, &fd, &offer);
      if (heard.code() == Code::kSystem || heard.code() == Code::kPeerLost) {
        close_fd(&s);  // a stranger, or a rank that gave up: not ours to fail for
        continue;
      }
      PYCOMM_RETURN_IF_ERROR(std::move(heard));
      if (peer < 0) continue;
      Status answered = send_with_fd(s, &hello, sizeof hello, arena_or(s));
      if (!answered.ok()) {
        close_fd(&fd);
        return std::move(answered).within(format("answering rank %d", peer));
      }
      PYCOMM_RETURN_IF_ERROR(adopt(peer, s, fd, std::move(offer)));
      s = -1;
      joined++;
    }
    std::erase(in, -1);
    const double t = now_s();
    if (t - last_poll > 0.1) {
      last_poll = t;
      if (poll_fn != nullptr) PYCOMM_RETURN_IF_ERROR(poll_fn());
    }
    if (t > end && joined < size_) {
      std::string missing;
      for (int q = 0; q < size_; q++) {
        if (!peers_[q].met) missing += (missing.empty() ? "" : ", ") + std::to_string(q);
      }
      return Status::error(Code::kTimeout,
                           format("rank %d waited %.0f s in %s for rank(s) %s to join: were all %d processes "
                                  "started, with the same run folder?",
                                  rank_, timeout_s, folder.c_str(), missing.c_str(), size_));
    }
  }
  return Status();
}

Node::~Node() {
  forget_forks(this);
  for (Peer& p : peers_) {
    close_fd(&p.pidfd);
    close_fd(&p.socket);
  }
}

void Node::close_in_child() {
  for (Peer& p : peers_) {
    close_fd(&p.pidfd);
    close_fd(&p.socket);
  }
  if (arena_ != nullptr) arena_->close_descriptor();
}

void Node::retire(std::array<uint64_t, 2> offsets, const std::atomic<uint64_t>& count, uint64_t until) {
  std::lock_guard lock(retired_mutex_);
  retired_.push_back({offsets, &count, until});
}

void Node::free_retired() {
  std::lock_guard lock(retired_mutex_);
  std::erase_if(retired_, [this](const Retired& r) {
    if (r.count->load(std::memory_order_acquire) < r.until) return false;
    arena_->release(r.offsets[0]);
    if (r.offsets[1] != 0) arena_->release(r.offsets[1]);
    return true;
  });
}

std::shared_ptr<PeerArena> Node::mapping(int rank) const {
  std::lock_guard lock(peers_mutex_);
  return peers_[rank].arena;
}

void Node::forget(int rank) {
  if (alive(rank)) return;
  std::lock_guard lock(peers_mutex_);
  Peer& p = peers_[rank];
  p.forgotten = true;
  close_fd(&p.pidfd);
  close_fd(&p.socket);
  p.arena = nullptr;
}

bool Node::alive(int rank) const {
  std::lock_guard lock(peers_mutex_);
  const Peer& p = peers_[rank];
  if (rank == rank_) return true;
  if (p.forgotten) return false;
  pollfd fd{p.pidfd >= 0 ? p.pidfd : p.socket, POLLIN, 0};
  if (fd.fd < 0 || poll(&fd, 1, 0) <= 0) return true;
  return p.pidfd < 0 && (fd.revents & (POLLHUP | POLLIN)) == 0;
}

const char* Node::process_state(int rank) const {
  if (!alive(rank)) return "dead";
  if (peers_[rank].pid <= 0) return "unknown";
  std::FILE* f =
      std::fopen(format("/proc/%lld/stat", static_cast<long long>(peers_[rank].pid)).c_str(), "re");
  if (f == nullptr) return "unknown";
  char line[512] = {};
  const char* state = std::fgets(line, sizeof line, f) != nullptr ? std::strrchr(line, ')') : nullptr;
  std::fclose(f);
  if (state == nullptr || state[1] == 0) return "unknown";
  switch (state[2]) {
    case 'R': return "running";
    case 'S':
    case 'D': return "sleeping";
    case 'T':
    case 't': return "stopped";
    case 'Z':
    case 'X': return "dead";
  }
  return "unknown";
}

}  // namespace pycomm
