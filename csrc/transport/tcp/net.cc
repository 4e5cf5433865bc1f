#include "transport/tcp/net.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace pycomm {

namespace {
constexpr int kEvents = 64;
constexpr double kGreetS = 5;      // for a stranger to prove himself
constexpr double kLingerS = 1e-3;  // how long the thread leaves the loop to callers that come and go
constexpr int kMaxGreeting = 64;   // connections that have not proved themselves, beyond the job's own

// What an event is of, in epoll's 64 bits.
enum class Of : uint64_t { kListener, kKick, kReceiver, kSender };
uint64_t tag(Of of, uint64_t number) { return static_cast<uint64_t>(of) << 56 | number; }

uint64_t hash_text(const std::string& text) {  // FNV-1a: the same on every host
  uint64_t h = 14695981039346656037u;
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return h;
}
}  // namespace

class Net::Waiting final : public Sink {
 public:
  explicit Waiting(Net& net) : net_(net) {}
  std::byte* landing(int, const MessageHeader&) override { return nullptr; }
  void arrived(int peer, const MessageHeader& header, std::byte*, std::unique_ptr<std::byte[]> own) override {
    net_.early_[header.group].push_back({peer, header, std::move(own)});
  }
  void sent(uint64_t) override {}
  void lost(int, const Status&) override {}
  void left(int, const std::string&) override {}
  void tick() override {}

 private:
  Net& net_;
};

Status Net::create(NetOptions options, Secret secret, std::shared_ptr<Net>* out) {
  PYCOMM_RETURN_IF_ERROR(cryptography_available());
  std::shared_ptr<Net> net(new Net);
  net->fork_generation_ = fork_generation();
  PYCOMM_RETURN_IF_ERROR(
      Listener::open(options.at, options.ports, std::min(4096, 16 + 2 * options.size), &net->listener_));
  net->address_ = net->listener_->address();
  net->options_ = std::move(options);
  net->secret_ = std::move(secret);
  net->waiting_ = std::make_unique<Waiting>(*net);
  net->own_ = net->make_own();
  net->epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  net->kick_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (net->epoll_fd_ < 0 || net->kick_fd_ < 0) return Status::from_errno("epoll", errno);
  net->watch(net->listener_->fd(), tag(Of::kListener, 0));
  net->watch(net->kick_fd_, tag(Of::kKick, 0));
  net->polls_ = usable_cores() > 1 ? 50 : 0;
  net->peers_.resize(static_cast<size_t>(net->options_.size));
  try {
    net->thread_ = std::thread([raw = net.get()] { raw->serve(); });
  } catch (const std::system_error& e) {
    return Status::error(Code::kSystem, format("cannot start the network's thread: %s", e.what()));
  }
  watch_forks(net.get(), ForkOrder::kNet);
  *out = std::move(net);
  return Status();
}

Net::~Net() {
  forget_forks(this);
  if (forked()) {  // the thread is the parent's; so is the mutex
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
  } else {
    if (thread_.joinable()) {
      std::unique_lock l(mutex_);
      say_goodbye(l);
      stop_ = true;
    }
    cv_.notify_all();
    if (kick_fd_ >= 0) eventfd_write(kick_fd_, 1);
    if (thread_.joinable()) thread_.join();
  }
  if (epoll_fd_ >= 0) ::close(epoll_fd_);
  if (kick_fd_ >= 0) ::close(kick_fd_);
  for (Peer& p : peers_) {
    for (Sender& s : p.lanes) s.abandon();
  }
}

void Net::close_in_child() {
  for (Peer& p : peers_) {
    for (Sender& s : p.lanes) s.let_go();
  }
  receivers_.clear();
  listener_.reset();
  for (int* fd : {&epoll_fd_, &kick_fd_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Net::set_peers(std::vector<Address> addresses, std::vector<std::string> names) {
  std::lock_guard l(mutex_);
  for (size_t q = 0; q < peers_.size(); q++) {
    peers_[q].address = addresses[q];
    peers_[q].name = std::move(names[q]);
    peers_[q].lanes.resize(static_cast<size_t>(options_.n_lanes));
  }
}

Terms Net::terms() const {
  Terms t;
  t.n_ranks = static_cast<uint32_t>(options_.size);
  t.n_channels = static_cast<uint32_t>(options_.n_lanes);
  t.job = hash_text(options_.job);
  t.settings = hash_text(options_.settings_text);
  t.encrypt = options_.encrypt;
  t.set_who(format("host %s, pid %d", options_.host.c_str(), static_cast<int>(getpid())));
  t.set_settings_text(options_.settings_text);
  return t;
}

void Net::watch(int fd, uint64_t what) {
  epoll_event e{};
  e.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  e.data.u64 = what;
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &e);
}

// ---- groups ----------------------------------------------------------------------------------------------

void Net::attach(uint64_t group, Sink* sink) {
  sinks_[group] = sink;
  const auto found = early_.find(group);
  if (found != early_.end()) {
    for (Early& e : found->second) {
      std::byte* const data = e.own.get();  // before it is handed over
      sink->arrived(e.peer, e.header, data, std::move(e.own));
    }
    early_.erase(found);
  }
  for (size_t q = 0; q < peers_.size(); q++) {
    if (!peers_[q].lost.ok()) sink->lost(static_cast<int>(q), peers_[q].lost);
  }
}

void Net::detach(uint64_t group, const std::string& why) {
  const auto found = sinks_.find(group);
  if (found == sinks_.end()) return;
  forget(found->second);
  sinks_.erase(found);
  closed_.insert(group);
  for (size_t q = 0; q < peers_.size(); q++) {
    if (connected(static_cast<int>(q))) tell_left(static_cast<int>(q), group, why);
  }
}

void Net::forget(Sink* sink) {
  for (auto& [number, receiver] : receivers_) receiver->forget(sink);
  const auto group =
      std::find_if(sinks_.begin(), sinks_.end(), [sink](const auto& s) { return s.second == sink; });
  for (Peer& p : peers_) {
    for (Sender& s : p.lanes) {
      const uint32_t n_dropped = s.forget(sink);
      if (n_dropped > 0 && group != sinks_.end()) p.n_sent[group->first] -= n_dropped;
    }
  }
}

// ---- sending ---------------------------------------------------------------------------------------------

void Net::send(int peer, int lane, const MessageHeader& header, const std::byte* data, Sink* sink,
               uint64_t token) {
  queue(peer, lane, {header, data, sink, token, nullptr});
}

void Net::send_copy(int peer, int lane, const MessageHeader& header, const void* data, Sink* sink,
                    uint64_t token) {
  std::unique_ptr<std::byte[]> own;
  if (header.n_bytes > 0) {
    own = std::make_unique<std::byte[]>(header.n_bytes);
    std::memcpy(own.get(), data, header.n_bytes);
  }
  const std::byte* at = own.get();
  queue(peer, lane, {header, at, sink, token, std::move(own)});
}

void Net::queue(int peer, int lane, Outgoing message) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (!p.lost.ok() || !p.broken.ok()) return;  // the sink has been told, or will be
  p.n_sent[message.header.group]++;
  Sender& sender = p.lanes[static_cast<size_t>(lane)];
  sender.push(std::move(message));
  if (sender.idle())
    open(peer, lane);
  else if (sender.is_open())
    pump(peer, lane);
}

void Net::open(int peer, int lane) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  Sender::Route route{options_.at,        p.address,           terms(), p.name, options_.connect_timeout_s,
                      options_.zero_copy, options_.heartbeat_s};
  route.terms.from_rank = static_cast<uint32_t>(options_.rank);
  route.terms.to_rank = static_cast<uint32_t>(peer);
  route.terms.channel = static_cast<uint32_t>(lane);
  Sender& sender = p.lanes[static_cast<size_t>(lane)];
  Status s = sender.open(secret_, std::move(route));
  if (!s.ok()) return cannot_send(peer, std::move(s));
  watch(sender.fd(), tag(Of::kSender, static_cast<uint64_t>(peer) << 16 | static_cast<uint64_t>(lane)));
  pump(peer, lane);
}

void Net::pump(int peer, int lane) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (!p.lost.ok()) return;
  Sender& sender = p.lanes[static_cast<size_t>(lane)];
  if (sender.idle()) return;
  Status s = sender.pump();
  if (!s.ok()) cannot_send(peer, std::move(s));
}

// ---- receiving -------------------------------------------------------------------------------------------

void Net::accept_all() {
  for (;;) {
    int fd = -1;
    Address from;
    // Out of memory or descriptors: tick() comes back to it.
    accept_again_ = !listener_->accept(&fd, &from).ok();
    if (accept_again_ || fd < 0) return;
    const auto n_greeting = std::count_if(receivers_.begin(), receivers_.end(),
                                          [](const auto& r) { return r.second->greeting(); });
    if (n_greeting > kMaxGreeting + 2 * options_.size * options_.n_lanes) {
      ::close(fd);  // a flood: those of this job try again, or say so
      continue;
    }
    set_heartbeat(fd, options_.heartbeat_s);
    Terms mine = terms();
    mine.to_rank = static_cast<uint32_t>(options_.rank);
    Handshake greeting;
    const int64_t until = now_ns() + static_cast<int64_t>(kGreetS * 1e9);
    if (!Handshake::accept(secret_, mine, from.to_string(), until, &greeting).ok()) {
      ::close(fd);
      continue;
    }
    const uint64_t number = next_receiver_++;
    auto& receiver = receivers_[number] = std::make_unique<Receiver>(fd, from, std::move(greeting));
    receiver->number = number;
    watch(fd, tag(Of::kReceiver, number));
    pump(receiver.get());
  }
}

void Net::pump(Receiver* receiver) {
  const uint64_t number = receiver->number;
  const auto find = [this](int peer, const MessageHeader& h) -> Sink* {
    if (h.group == 0) {
      if (h.kind == static_cast<uint8_t>(NetKind::kGoodbye))
        peers_[static_cast<size_t>(peer)].said_goodbye = true;
      return h.kind > static_cast<uint8_t>(NetKind::kGoodbye) ? own_.get() : nullptr;
    }
    peers_[static_cast<size_t>(peer)].n_received[h.group]++;
    const auto found = sinks_.find(h.group);
    if (found != sinks_.end()) return found->second;
    if (!closed_.contains(h.group)) return waiting_.get();
    tell_left(peer, h.group, "");
    return nullptr;
  };
  bool more = false;
  const auto may_come = [this](const Receiver& r, int peer, uint32_t lane) { return admit(r, peer, lane); };
  const Status s = receiver->pump(may_come, find, &more);
  if (receiver->peer() >= 0) peers_[static_cast<size_t>(receiver->peer())].heard_at_s = clock_s();
  if (!s.ok()) return end(receiver, s);
  if (more)
    again_.insert(number);
  else
    again_.erase(number);
}

// ---- the loop --------------------------------------------------------------------------------------------

void Net::tick() {
  const double now_s = clock_s();
  if (now_s - ticked_s_ < 0.1) return;
  ticked_s_ = now_s;
  beat(now_s);
  look_at_peers(now_s);
  if (accept_again_) accept_all();
  std::vector<Receiver*> late;
  for (auto& [number, receiver] : receivers_) {
    if (receiver->greeting() && receiver->deadline_ns() < now_ns()) late.push_back(receiver.get());
  }
  for (Receiver* r : late) pump(r);  // says so itself
  for (const auto& [group, sink] : sinks_) sink->tick();
}

void Net::turn(std::unique_lock<std::mutex>& l, int timeout_ms) {
  epoll_event events[kEvents];
  driving_ = true;
  const int wait_ms = again_.empty() ? timeout_ms : 0;
  l.unlock();
  const int n = epoll_wait(epoll_fd_, events, kEvents, wait_ms);
  l.lock();
  std::set<uint64_t> again;
  again.swap(again_);
  for (int i = 0; i < n; i++) {
    const uint64_t number = events[i].data.u64 & ((uint64_t{1} << 56) - 1);
    switch (static_cast<Of>(events[i].data.u64 >> 56)) {
      case Of::kListener: accept_all(); break;
      case Of::kKick: {
        eventfd_t ignored;
        eventfd_read(kick_fd_, &ignored);
        break;
      }
      case Of::kReceiver: again.insert(number); break;
      case Of::kSender: {
        const int peer = static_cast<int>(number >> 16), lane = static_cast<int>(number & 0xffff);
        pump(peer, lane);
        if ((events[i].events & (EPOLLRDHUP | EPOLLHUP)) != 0) hung_up(peer, lane);
        break;
      }
    }
  }
  for (const uint64_t number : again) {
    const auto found = receivers_.find(number);
    if (found != receivers_.end()) pump(found->second.get());
  }
  tick();
  driving_ = false;
  if (callers_ > 1 || (callers_ > 0 && background_)) cv_.notify_all();
}

void Net::serve() {
  std::unique_lock l(mutex_);
  while (!stop_) {
    if (driving_ || callers_ > 0 || clock_s() - left_at_s_ < kLingerS) {
      cv_.wait_for(l, std::chrono::milliseconds(callers_ > 0 ? kSliceMs : 1));
      continue;
    }
    background_ = true;
    turn(l, kSliceMs);
    background_ = false;
    cv_.notify_all();
  }
}

Status Net::wait(std::unique_lock<std::mutex>& l, const std::function<bool()>& ready, WaitClient& client) {
  if (ready()) return Status();
  callers_++;
  if (background_) eventfd_write(kick_fd_, 1);
  Status s;
  int polls = polls_;
  double looked_s = clock_s();
  while (!ready()) {
    if (polls == 0) {
      l.unlock();
      client.before_block();
      l.lock();
      if (ready()) break;
    }
    if (driving_)
      cv_.wait_for(l, std::chrono::milliseconds(kSliceMs));
    else
      turn(l, polls > 0 ? 0 : kSliceMs);
    polls--;
    if (clock_s() - looked_s < 0.05) continue;
    looked_s = clock_s();
    if (ready()) break;
    l.unlock();
    s = client.check(-1);
    l.lock();
    if (!s.ok()) break;
  }
  left_at_s_ = clock_s();
  if (--callers_ > 0) cv_.notify_all();  // one of them drives on
  return ready() ? Status() : std::move(s);
}

std::string Net::strangers() const { return forked() ? "" : listener_->strangers(); }

uint64_t Net::bytes_sent() const {
  uint64_t n = 0;
  for (const Peer& p : peers_) {
    for (const Sender& s : p.lanes) n += s.channel() != nullptr ? s.channel()->n_sent() : 0;
  }
  return n;
}

}  // namespace pycomm
