// Devices, contexts and errors. All devices are this computer's memory; a thread's current device only names
// its streams. As in CUDA, a device has its primary context from the first cudaSetDevice on, and a thread
// that has set none gets that of device 0 by its first call that needs one. Environment, read once:
// CUDA_ON_CPU_DEVICES (how many devices; 1), CUDA_ON_CPU_SEED (Settings), CUDA_ON_CPU_FIRST_DEVICE (the bus
// ids of this process's devices begin there, 0, as with CUDA_VISIBLE_DEVICES); read each time:
// CUDA_ON_CPU_PEER_ACCESS (0: no device reaches another), CUDA_ON_CPU_NATIVE_ATOMICS (0: none between
// devices, as over PCIe), CUDA_ON_CPU_MIG (set: all devices are parts of one GPU, with its PCI address).
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "grid.h"

namespace cuda_on_cpu {
namespace {

thread_local int device_of_thread = 0;
thread_local int context_of_thread = -1;  // the device whose primary context is current
constexpr int kMaxDevices = 64;
std::atomic<bool> contexts[kMaxDevices];  // of devices; the address is the handle
std::atomic<cudaError_t> errors[kMaxDevices];
thread_local cudaError_t last_error = cudaSuccess;

int n_devices() {
  static const int n = [] {
    const char* text = std::getenv("CUDA_ON_CPU_DEVICES");
    return std::min(text ? std::atoi(text) : 1, kMaxDevices);
  }();
  return n;
}

int first_device() {
  static const int first = [] {
    const char* text = std::getenv("CUDA_ON_CPU_FIRST_DEVICE");
    return text ? std::atoi(text) : 0;
  }();
  return first;
}

// Unless the variable is 0.
bool is_on(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr || std::strcmp(text, "0") != 0;
}

const bool seed_is_read = [] {
  const char* text = std::getenv("CUDA_ON_CPU_SEED");
  if (text) settings().seed = static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
  return true;
}();

}  // namespace

int current_device() { return device_of_thread; }
int bus_of(int device) { return first_device() + device; }
bool devices_reach_each_other() { return is_on("CUDA_ON_CPU_PEER_ACCESS"); }

void need_context() {
  if (context_of_thread >= 0) return;
  context_of_thread = device_of_thread;
  contexts[device_of_thread] = true;
}
bool has_context(int device) { return contexts[device]; }
void forget_context(int device) { contexts[device] = false; }
void break_device(int device, cudaError_t error) { errors[device] = error; }
cudaError_t device_error(int device) { return errors[device]; }

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  if (n_devices() == 0) return report(cudaErrorNoDevice);  // and *count is not written, as by CUDA
  *count = n_devices();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= n_devices()) return report(cudaErrorInvalidDevice);
  device_of_thread = device;
  context_of_thread = -1;
  need_context();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
// Of the driver's API, which pycomm looks up by name; no header declares them here.
int cuCtxGetCurrent(void** context) {
  *context = context_of_thread < 0 ? nullptr : &contexts[context_of_thread];
  return 0;
}
int cuCtxSetCurrent(void* context) {
  context_of_thread = -1;
  if (context == nullptr) return 0;
  device_of_thread = context_of_thread =
      static_cast<int>(static_cast<std::atomic<bool>*>(context) - contexts);
  return 0;
}

int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  if (device < 0 || device >= n_devices()) return cudaErrorInvalidDevice;
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<unsigned char>(device + 1);
  return 0;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) {
  if (device < 0 || device >= n_devices()) return report(cudaErrorInvalidDevice);
  switch (attr) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 8; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
  }
  return report(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  if (device < 0 || device >= n_devices() || peer < 0 || peer >= n_devices()) {
    return report(cudaErrorInvalidDevice);
  }
  *can_access = device != peer && devices_reach_each_other();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attr, int device, int peer) {
  if (device < 0 || device >= n_devices() || peer < 0 || peer >= n_devices() || device == peer) {
    return report(cudaErrorInvalidDevice);
  }
  if (attr != cudaDevP2PAttrNativeAtomicSupported) return report(cudaErrorInvalidValue);
  *value = is_on("CUDA_ON_CPU_NATIVE_ATOMICS");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int n_bytes, int device) {
  if (device < 0 || device >= n_devices()) return report(cudaErrorInvalidDevice);
  const int bus = std::getenv("CUDA_ON_CPU_MIG") != nullptr ? 1 : first_device() + device + 1;
  if (std::snprintf(text, static_cast<size_t>(n_bytes), "0000:%02x:00.0", bus) >= n_bytes) {
    return report(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned bus = 0;
  if (std::sscanf(text, "0000:%x:00.0", &bus) != 1) return report(cudaErrorInvalidDevice);
  const int found = static_cast<int>(bus) - 1 - first_device();
  if (found < 0 || found >= n_devices()) return report(cudaErrorInvalidDevice);
  *device = found;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidMemcpyDirection: return "cudaErrorInvalidMemcpyDirection";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorDeviceUninitialized: return "cudaErrorDeviceUninitialized";
    case cudaErrorMapBufferObjectFailed: return "cudaErrorMapBufferObjectFailed";
    case cudaErrorPeerAccessUnsupported: return "cudaErrorPeerAccessUnsupported";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalState: return "cudaErrorIllegalState";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorPeerAccessAlreadyEnabled: return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorCooperativeLaunchTooLarge: return "cudaErrorCooperativeLaunchTooLarge";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureMerge: return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

}  // extern "C"
