// What a capture collects, and what it does not allow. See graph.h.
//
// The rules are those of the CUDA programming guide ("Creating a Graph Using Stream Capture") and of the
// comments in NVIDIA's cuda_runtime_api.h. Where these say nothing the stricter answer is given: calls that
// query or wait for a stream or an event that is not captured count as unsafe, as cudaMalloc does. One lock
// guards everything here; nothing is run under it.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "graph_nodes.h"
#include "grid.h"

namespace cuda_on_cpu {
namespace {

struct Member;

// From cudaStreamBeginCapture to cudaStreamEndCapture.
struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t origin;
  bool valid = true;
  std::vector<Node> nodes;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Member {
  CapturePtr capture;
  StreamTraits traits;
  Tips tips;
};

// An event whose last record was in a capture, which may have ended.
struct Recorded {
  CapturePtr capture;
  Tips tips;
};

struct State {
  std::mutex mutex;
  std::map<cudaStream_t, Member> streams;
  std::map<cudaEvent_t, Recorded> events;
  std::set<CapturePtr> under_way;

  Member* find(cudaStream_t stream) {
    const auto it = streams.find(stream);
    return it == streams.end() ? nullptr : &it->second;
  }
  void leave(const CapturePtr& capture) {  // all streams do
    std::erase_if(streams, [&](const auto& s) { return s.second.capture == capture; });
    under_way.erase(capture);
  }
};
State& state() {
  static State* const all = new State;  // used until the process ends
  return *all;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.valid = false;
  return error;
}

// The legacy stream waits for blocking streams of its device, so for what a capture only collects.
cudaError_t check_legacy_stream(State& s, bool invalidates = true) {
  cudaError_t error = cudaSuccess;
  for (auto& [stream, m] : s.streams) {
    if (!m.traits.is_blocking || m.traits.device != current_device()) continue;
    error = cudaErrorStreamCaptureImplicit;
    if (invalidates) m.capture->valid = false;
  }
  return error;
}

cudaError_t check_unsafe(State& s) {
  cudaError_t error = cudaSuccess;
  const auto me = std::this_thread::get_id();
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return error;
  for (const CapturePtr& c : s.under_way) {
    const bool mine = c->thread == me && c->mode != cudaStreamCaptureModeRelaxed;
    const bool everybodys = c->thread != me && c->mode == cudaStreamCaptureModeGlobal &&
                            mode_of_thread == cudaStreamCaptureModeGlobal;
    if (mine || everybodys) error = invalidate(*c, cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

void add(Tips& tips, const Tips& more) {
  tips.insert(tips.end(), more.begin(), more.end());
  std::sort(tips.begin(), tips.end());
  tips.erase(std::unique(tips.begin(), tips.end()), tips.end());
}

// Every node comes before what the first stream has come to.
bool all_joined(const Capture& capture, const Tips& end) {
  std::vector<char> reached(capture.nodes.size(), 0);
  for (const size_t t : end) reached[t] = 1;
  for (size_t i = capture.nodes.size(); i-- > 0;) {  // a node's number is higher than those before it
    if (!reached[i]) return false;
    for (const size_t before : capture.nodes[i].after) reached[before] = 1;
  }
  return true;
}

}  // namespace

Captured capture_task(cudaStream_t stream, const Task& task) {
  return capture_made_task(stream, [task] { return task; });
}

Captured capture_made_task(cudaStream_t stream, const MakeTask& make) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (stream == nullptr) {
    const cudaError_t error = check_legacy_stream(s);
    return error == cudaSuccess ? Captured() : error;
  }
  Member* const m = s.find(stream);
  if (m == nullptr) return {};
  if (!m->capture->valid) return cudaErrorStreamCaptureInvalidated;
  m->capture->nodes.push_back({make, m->tips});
  m->tips = {m->capture->nodes.size() - 1};
  return cudaSuccess;
}

Captured capture_record(cudaStream_t stream, cudaEvent_t event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (stream == nullptr) {
    const cudaError_t error = check_legacy_stream(s);
    if (error != cudaSuccess) return error;
  }
  const Member* const m = s.find(stream);
  if (m == nullptr) {
    s.events.erase(event);
    return {};
  }
  if (!m->capture->valid) return cudaErrorStreamCaptureInvalidated;
  s.events[event] = {m->capture, m->tips};
  return cudaSuccess;
}

Captured capture_wait(cudaStream_t stream, cudaEvent_t event) {
  const StreamTraits traits = traits_of(stream);  // takes the lock of all handles
  State& s = state();
  const std::lock_guard lock(s.mutex);
  Member* const m = s.find(stream);
  const auto recorded = s.events.find(event);
  if (stream == nullptr) {
    const cudaError_t error = check_legacy_stream(s);
    if (error != cudaSuccess) return error;
  }
  if (m != nullptr && !m->capture->valid) return cudaErrorStreamCaptureInvalidated;
  if (recorded == s.events.end()) {
    if (m == nullptr) return {};
    return invalidate(*m->capture, cudaErrorStreamCaptureIsolation);
  }
  const CapturePtr& from = recorded->second.capture;
  if (!s.under_way.contains(from)) {
    return m == nullptr ? cudaErrorCapturedEvent : invalidate(*m->capture, cudaErrorStreamCaptureIsolation);
  }
  if (!from->valid) return cudaErrorStreamCaptureInvalidated;
  if (m != nullptr && m->capture != from) {
    m->capture->valid = false;
    return invalidate(*from, cudaErrorStreamCaptureMerge);
  }
  if (stream == nullptr) return invalidate(*from, cudaErrorStreamCaptureImplicit);
  if (m == nullptr) {
    s.streams[stream] = {from, traits, recorded->second.tips};
  } else {
    add(m->tips, recorded->second.tips);
  }
  return cudaSuccess;
}

bool is_captured(cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.find(stream) != nullptr;
}

cudaError_t check_host_sees(cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (stream == nullptr) {
    const cudaError_t error = check_legacy_stream(s);
    if (error != cudaSuccess) return error;
  }
  const Member* const m = s.find(stream);
  if (m == nullptr) return check_unsafe(s);
  if (!m->capture->valid) return cudaErrorStreamCaptureInvalidated;
  return invalidate(*m->capture, cudaErrorStreamCaptureUnsupported);
}

cudaError_t check_host_sees(cudaEvent_t event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto recorded = s.events.find(event);
  if (recorded == s.events.end()) return check_unsafe(s);
  return invalidate(*recorded->second.capture, cudaErrorCapturedEvent);
}

cudaError_t check_host_waits_for_device() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  cudaError_t error = check_unsafe(s);
  for (auto& [stream, m] : s.streams) {
    if (m.traits.device == current_device()) {
      error = invalidate(*m.capture, cudaErrorStreamCaptureUnsupported);
    }
  }
  return error;
}

cudaError_t check_unsafe_call() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return check_unsafe(s);
}

cudaError_t check_synchronous_copy() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const cudaError_t legacy = check_legacy_stream(s), unsafe = check_unsafe(s);
  return legacy != cudaSuccess ? legacy : unsafe;
}

void forget(cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const Member* const m = s.find(stream);
  if (m == nullptr) return;
  const CapturePtr capture = m->capture;
  capture->valid = false;
  if (capture->origin == stream) s.leave(capture);
  s.streams.erase(stream);
}

void forget(cudaEvent_t event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.events.erase(event);
}

cudaError_t begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream == nullptr) return cudaErrorStreamCaptureUnsupported;
  if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) return cudaErrorInvalidValue;
  const StreamTraits traits = traits_of(stream);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.find(stream) != nullptr) return cudaErrorIllegalState;
  const auto capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), stream, true, {}});
  s.streams[stream] = {capture, traits, {}};
  s.under_way.insert(capture);
  return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t stream, std::vector<Node>* nodes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const Member* const m = s.find(stream);
  if (m == nullptr) return cudaErrorIllegalState;
  const CapturePtr capture = m->capture;
  if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const bool joined = all_joined(*capture, m->tips);
  s.leave(capture);
  *nodes = std::move(capture->nodes);
  if (!capture->valid) return cudaErrorStreamCaptureInvalidated;
  return joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return report(begin_capture(stream, mode));
}

// A query invalidates nothing.
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  *status = cudaStreamCaptureStatusNone;
  if (stream == nullptr) return report(check_legacy_stream(s, false));
  const Member* const m = s.find(stream);
  if (m != nullptr) {
    *status = m->capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
  }
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) {
    return report(cudaErrorInvalidValue);
  }
  need_context();
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

}  // extern "C"
