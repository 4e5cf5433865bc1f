#include "transport/cuda/runtime.h"

#include <dlfcn.h>

#include "transport/cuda/on_device.h"

namespace pycomm {

Status cuda_status(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // or the next launch would report it
  return Status::error(Code::kSystem,
                       what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

namespace {

// Of the driver, which the runtime opens too; null where there is none, and then there are no contexts.
template <class Function>
Function* driver_function(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) {
    if (void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) found = dlsym(driver, name);
  }
  return reinterpret_cast<Function*>(found);
}

void* current_context() {
  static auto* const get = driver_function<int(void**)>("cuCtxGetCurrent");
  void* context = nullptr;
  // An error: the driver is not initialised, so nothing is current.
  return get != nullptr && get(&context) == 0 ? context : nullptr;
}

void set_current_context(void* context) {
  static auto* const set = driver_function<int(void*)>("cuCtxSetCurrent");
  if (set != nullptr) (void)set(context);
}

}  // namespace

DeviceGuard::DeviceGuard(int device)
    : before_(current_context()),
      status_(cuda_status(cudaSetDevice(device), format("cuda:%d: cudaSetDevice", device))) {}

DeviceGuard::~DeviceGuard() { set_current_context(before_); }

Status device_id(int device, DeviceId* out) {
  static auto* const get = driver_function<int(DeviceId*, int)>("cuDeviceGetUuid_v2");  // CUDA 11.4
  const int error = get == nullptr ? -1 : get(out, device);
  if (error == 0) return Status();
  return Status::error(Code::kSystem, format("cuDeviceGetUuid_v2 of CUDA device %d: error %d (-1: the driver "
                                             "is older than CUDA 11.4)",
                                             device, error));
}

namespace {

template <class Ask>
cudaError_t ask_relaxed(const Ask& ask) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t answer = ask();
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  return answer;
}

}  // namespace

bool stream_is_busy(int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  const cudaError_t answer = ask_relaxed([&] { return cudaStreamQuery(stream); });
  if (answer != cudaSuccess) (void)cudaGetLastError();  // or the next launch would report it
  return guard.status().ok() && answer == cudaErrorNotReady;
}

Status event_passed(int device, cudaEvent_t event, bool* passed) {
  *passed = false;
  const DeviceGuard guard(device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  const cudaError_t answer = ask_relaxed([&] { return cudaEventQuery(event); });
  *passed = answer == cudaSuccess;
  if (answer != cudaErrorNotReady)
    return cuda_status(answer, format("CUDA device %d has failed (cudaEventQuery)", device));
  (void)cudaGetLastError();  // or the next launch would report it
  return Status();
}

namespace cuda {

Status on_device(int device, cudaStream_t stream, const std::function<Status()>& enqueue) {
  const DeviceGuard guard(device);
  PYCOMM_RETURN_IF_ERROR(guard.status());
  PYCOMM_RETURN_IF_ERROR(enqueue());
#if defined(PYCOMM_CUDA_EMULATED)
  return cuda_status(cudaStreamSynchronize(stream), format("cuda:%d", device));
#else
  (void)stream;
  return Status();
#endif
}

}  // namespace cuda
}  // namespace pycomm
