#include "engine/communicator.h"

#include <chrono>
#include <new>
#include <system_error>

#include "engine/convert.h"
#include "engine/p2p.h"

namespace pycomm {

Status Communicator::create(std::shared_ptr<Node> node, std::vector<int> node_ranks, int rank,
                            double timeout_s, const std::vector<uint64_t>& controls,
                            std::shared_ptr<Communicator>* out) {
  std::shared_ptr<Communicator> c(new Communicator);
  const int size = static_cast<int>(node_ranks.size());
  c->group_ = std::make_unique<Group>(std::move(node), std::move(node_ranks), rank, timeout_s, controls);
  c->engine_ = std::make_unique<Engine>(*c->group_);
  c->p2p_ = std::make_unique<PointToPoint>(*c->group_);
  c->selector_ = Selector(size);
  c->shrink_ = std::make_unique<Shrink>(*c->group_);
  *out = std::move(c);
  return Status();
}

Status Communicator::create(std::shared_ptr<Node> node, std::vector<int> node_ranks, int local_rank,
                            double timeout_s, const std::vector<uint64_t>& controls, Across across,
                            std::shared_ptr<Communicator>* out) {
  PYCOMM_RETURN_IF_ERROR(
      create(std::move(node), std::move(node_ranks), local_rank, timeout_s, controls, out));
  Placement placement(across.host_of, across.rank);
  if (placement.n_hosts() == 1) return Status();
  Communicator& c = **out;
  c.net_ = across.net;
  c.job_ranks_ = across.job_ranks;
  c.id_ = across.id;
  c.group_->set_names(placement.ranks[static_cast<size_t>(placement.host)]);
  std::vector<int> local_of = placement.local_of;
  for (size_t q = 0; q < local_of.size(); q++) {
    if (placement.host_of[q] != placement.host) local_of[q] = -1;
  }
  c.p2p_ = std::make_unique<PointToPoint>(*c.group_, across.rank, std::move(local_of), across.net,
                                          across.id | 1, across.job_ranks);
  c.shrink_ = std::make_unique<Shrink>(*c.group_, placement, across.net, across.id ^ uint64_t{1} << 62,
                                       across.job_ranks);
  c.hierarchy_ = std::make_unique<Hierarchy>(*c.group_, *c.engine_, c.selector_, std::move(placement),
                                             std::move(across.net), across.id & ~uint64_t{1},
                                             std::move(across.job_ranks));
  return Status();
}

int Communicator::local_rank(int q) const {
  const Placement* const p = placement();
  if (p == nullptr) return q;
  return p->host_of[static_cast<size_t>(q)] == p->host ? p->local_of[static_cast<size_t>(q)] : -1;
}

std::string Communicator::describe(int q) const {
  const int local = local_rank(q);
  return local < 0 ? hierarchy_->remote().name(q) : group_->describe(local);
}

Communicator::~Communicator() { const Status ignored = close(nullptr); }

Status Communicator::check_usable() const {
  if (group_->node()->forked()) {
    return Status::error(
        Code::kClosed,
        "this communicator belongs to the parent of this forked process; a child (a DataLoader worker, for "
        "example) makes its own with pycomm.init(), or does without");
  }
  if (closed()) return Status::error(Code::kClosed, "the communicator is closed");
  if (shrunk_.load(std::memory_order_acquire)) {  // not what those who were left out have told since
    return Status::error(Code::kClosed, "the communicator was shrunk: use the one that shrink() returned");
  }
  if (group_->failed()) [[unlikely]]
    return group_->failure();
  const auto d = device();
  return d != nullptr ? d->failure() : Status();
}

Status Communicator::execute(Request& request, CallerHooks* hooks) {
  const double timeout_s = request.timeout_s > 0 ? request.timeout_s : group_->timeout_s();
  if (!request.refusal.empty()) {
    PYCOMM_RETURN_IF_ERROR(hierarchy_ != nullptr ? hierarchy_->refuse(request.refusal, hooks, timeout_s)
                                                 : engine_->refuse(request.refusal, hooks, timeout_s));
    return request.refused_as == Code::kOk ? Status() : Status::error(request.refused_as, request.refusal);
  }
  Call& call = request.call;
  call.counts = request.counts;
  call.send_counts = request.send_counts;
  call.recv_counts = request.recv_counts;
  try {
    if (call.device >= 0) return execute_on_device(request, hooks, timeout_s);
    const auto run = [&] {
      return hierarchy_ != nullptr ? hierarchy_->run(call, hooks, timeout_s)
                                   : engine_->run(call, hooks, timeout_s);
    };
    if (!Converted::may_apply(call, request.deterministic)) return run();
    Converted converted;
    PYCOMM_RETURN_IF_ERROR(
        converted.begin(hierarchy_ == nullptr ? engine_.get() : nullptr, request.deterministic, &call));
    PYCOMM_RETURN_IF_ERROR(run());
    converted.end();
  } catch (const std::bad_alloc&) {  // peers may be in the call already
    const Status failure = Status::error(
        Code::kSystem, format("rank %d ran out of memory in %s", rank(), call_kind_name(call.sig.kind)));
    group_->fail(failure);
    if (device() != nullptr) device()->abort(failure);
    return failure.clone();
  } catch (const std::system_error& e) {  // of a thread that looks after calls on a device
    const Status failure =
        Status::error(Code::kSystem, format("rank %d cannot start a thread for %s on CUDA: %s", rank(),
                                            call_kind_name(call.sig.kind), e.what()));
    fail_and_tell(failure);
    if (device() != nullptr) device()->abort(failure);
    return failure.clone();
  }
  return Status();
}

namespace {
// The caller's stream waits for the call; also for what was issued of one that has failed.
Status behind(const Request& request, Status s) {
  if (request.end == nullptr) return s;
  Status ordered = request.end->order(request.call.stream);
  return s.ok() ? std::move(ordered) : std::move(s);
}
}  // namespace

Status Communicator::run(Request& request, CallerHooks* hooks) {
  PYCOMM_RETURN_IF_ERROR(check_usable());
  std::unique_lock order(order_, std::defer_lock);
  if (request.call.device >= 0) {
    order.lock();
    take_turn(&request);
  }
  if (waiting_.load() == 0 && !busy_.exchange(true)) {
    if (order.owns_lock()) order.unlock();
    Status s = execute(request, hooks);
    busy_.store(false);
    if (waiting_.load() != 0) {
      std::lock_guard lock(mutex_);
      cv_.notify_all();
    }
    return behind(request, std::move(s));
  }
  // Behind what is queued. The caller's tensors and counts stay: we wait for its end before we return.
  auto work = std::make_shared<Work>();
  auto queued = std::make_unique<Request>(request);
  request.turn = nullptr;  // over when the call is issued, not when this thread has seen it
  PYCOMM_RETURN_IF_ERROR(enqueue(std::move(queued), work, false));
  if (order.owns_lock()) order.unlock();
  bool finished;
  Status s = work->wait(-1, hooks, &finished);
  if (s.code() == Code::kInterrupt && !work->issued()) {
    abort("interrupted");
    const Status ignored = work->wait(-1, nullptr, &finished);  // the tensors must outlive the call
  }
  if (work->issued()) request.end = work->end();
  return behind(request, std::move(s));
}

std::shared_ptr<Work> Communicator::start(std::unique_ptr<Request> request) {
  auto work = std::make_shared<Work>();
  work->set_communicator(weak_from_this());
  Status s = check_usable();
  if (s.ok()) {
    std::unique_lock order(order_, std::defer_lock);
    if (request->call.device >= 0) {
      order.lock();
      take_turn(request.get());
    }
    const Signature& sig = request->call.sig;
    const bool small = request->call.device < 0 && sig.kind != CallKind::kAllToAll &&
                       sig.count * dtype_size(sig.dtype) <= kEagerBytes;
    s = enqueue(std::move(request), work, small);
  }
  if (!s.ok()) work->finish(std::move(s));
  return work;
}

Status Communicator::enqueue(std::unique_ptr<Request> request, std::shared_ptr<Work> work, bool small) {
  {
    std::lock_guard lock(mutex_);
    if (stop_) return Status::error(Code::kClosed, "the communicator is closed");
    try {
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error& e) {
      return Status::error(Code::kSystem, format("cannot start the progress thread: %s", e.what()));
    }
    const bool patient = small && queue_.empty();
    queue_.push_back({std::move(request), std::move(work), small, patient ? monotonic_s() + kPatienceS : 0});
    waiting_.fetch_add(1);
    if (patient && watching_) return Status();
  }
  cv_.notify_all();
  return Status();
}

void Communicator::hurry() {
  std::lock_guard lock(mutex_);
  if (queue_.empty()) return;
  queue_.front().patient_until_s = 0;
  cv_.notify_all();
}

bool Communicator::run_here(const Work& work, CallerHooks* hooks, Status* out) {
  std::unique_lock lock(mutex_);
  if (group_->node()->forked() || queue_.empty() || queue_.front().work.get() != &work ||
      !queue_.front().small)
    return false;
  if (stop_ || busy_.exchange(true)) {
    queue_.front().patient_until_s = 0;
    cv_.notify_all();
    return false;
  }
  Job job = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  *out = finish(std::move(job), hooks);
  if (waiting_.load() != 0) {
    lock.lock();
    cv_.notify_all();
  }
  return true;
}

// The caller has set busy_.
Status Communicator::finish(Job job, CallerHooks* hooks) {
  Status s = execute(*job.request, hooks);
  busy_.store(false);
  // Only now: a caller that sees no waiting jobs may run inline.
  waiting_.fetch_sub(1);
  job.work->set_end(job.request->end);
  // Ctrl-C is for who waited here; others who ask the work learn what became of the group.
  job.work->finish(s.code() == Code::kInterrupt ? group_->failure() : s.clone());
  return s;
}

// Returns when the first job is the progress thread's to run, or there is none and never will be.
void Communicator::wait_for_job(std::unique_lock<std::mutex>& lock) {
  using std::chrono::duration;
  double watch_until_s = 0;
  while (!stop_) {
    const double now_s = monotonic_s();
    if (queue_.empty()) {
      watching_ = now_s < watch_until_s;
      if (watching_)
        cv_.wait_for(lock, duration<double>(kPatienceS));
      else
        cv_.wait(lock);
    } else {
      const double left_s = queue_.front().patient_until_s - now_s;
      if (queue_.size() > 1 || left_s <= 0) break;
      watch_until_s = now_s + kWatchS;
      watching_ = true;
      cv_.wait_for(lock, duration<double>(left_s));
    }
  }
  watching_ = false;
}

void Communicator::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wait_for_job(lock);
    if (queue_.empty()) break;
    if (busy_.exchange(true)) {
      cv_.wait(lock);  // whoever is busy notifies, and may have taken the job
      continue;
    }
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const Status told = finish(std::move(job), nullptr);  // to the work
    lock.lock();
  }
  cv_.notify_all();  // close() waits for the last job
}

void Communicator::abort(const std::string& why) {
  if (!group_->failed()) group_->abort(why);  // whoever waits looks at it every slice
  if (hierarchy_ != nullptr && !group_->node()->forked()) hierarchy_->remote().tell_now();
  if (const auto known = group_->node()->forked() ? nullptr : device()) known->abort(group_->failure());
  p2p_->stop();
}

Status Communicator::close(CallerHooks* hooks, double limit_s, const std::string& why) {
  if (closed_.exchange(true)) return Status();
  if (group_->node()->forked()) {
    // The thread does not exist in this process, and its handle may meanwhile be that of another one.
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
    return Status();
  }
  Status s;
  const double end_s = monotonic_s() + limit_s;
  std::unique_lock lock(mutex_);
  stop_ = true;
  waiting_.fetch_add(1);  // from here on nobody runs inline
  cv_.notify_all();
  const auto look = [&] {
    if (hooks != nullptr && s.ok()) {
      s = hooks->poll();
      if (!s.ok()) abort("interrupted while closing (Ctrl-C)");
    }
    if (monotonic_s() > end_s && !group_->failed())
      abort(format("the program ended, and waited %g s for an asynchronous call to end", limit_s));
  };
  while (!queue_.empty() || busy_.exchange(true)) {
    if (hooks != nullptr) hooks->before_block();
    cv_.wait_for(lock, std::chrono::milliseconds(kSliceMs));
    lock.unlock();
    look();
    lock.lock();
  }
  lock.unlock();
  if (hooks != nullptr && device_ != nullptr) hooks->before_block();  // for what is on the device's stream
  if (thread_.joinable()) thread_.join();
  double looked_s = monotonic_s();
  while (device_ != nullptr && !device_->is_idle()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (monotonic_s() - looked_s < 1e-3 * kSliceMs) continue;
    looked_s = monotonic_s();
    look();
    if (hooks != nullptr) hooks->before_block();
  }
  {
    std::unique_lock device_lock(device_mutex_);
    const auto last = std::move(device_);
    has_device_.store(false, std::memory_order_release);
    device_lock.unlock();  // its end takes as long as its calls
  }
  p2p_->stop();
  if (hierarchy_ != nullptr) hierarchy_->remote().leave(why);
  shrink_->leave(why);
  p2p_->leave(why);
  group_->leave(why);
  return s;
}

}  // namespace pycomm
