// CapturedGraph: what a function puts on a stream, captured once, for replays.
#pragma once

#include <utility>

#include "base/status.h"
#include "cuda_runtime_api.h"

namespace pycomm {

inline Status checked(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::error(Code::kSystem, format("%s: %s", what, cudaGetErrorName(error)));
}

class CapturedGraph {
 public:
  CapturedGraph() = default;
  ~CapturedGraph() { reset(); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Ranks are threads, which allocate while others capture: so, as NCCL's manual has it, not in global mode.
  template <class Fn>
  Status capture(cudaStream_t stream, const Fn& fn,
                 cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    reset();
    PYCOMM_RETURN_IF_ERROR(checked(cudaStreamBeginCapture(stream, mode), "begin"));
    const Status done = fn();
    cudaGraph_t graph = nullptr;
    const Status ended = checked(cudaStreamEndCapture(stream, &graph), "end");
    Status s = !done.ok() ? done.clone() : ended.clone();
    if (s.ok()) s = checked(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    if (graph != nullptr && s.ok()) s = checked(cudaGraphDestroy(graph), "destroy");
    return s;
  }
  Status replay(cudaStream_t stream) const { return checked(cudaGraphLaunch(exec_, stream), "launch"); }
  void reset() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(std::exchange(exec_, nullptr));
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Lets `later` go on after what is on `earlier` by now, as streams are forked from and joined to each other.
inline Status order_streams(cudaStream_t earlier, cudaStream_t later) {
  cudaEvent_t event = nullptr;
  PYCOMM_RETURN_IF_ERROR(checked(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
  Status s = checked(cudaEventRecord(event, earlier), "record");
  if (s.ok()) s = checked(cudaStreamWaitEvent(later, event, 0), "wait");
  (void)cudaEventDestroy(event);
  return s;
}

}  // namespace pycomm
