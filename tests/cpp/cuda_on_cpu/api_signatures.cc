// Compiled against the shim's header and, in the preset cuda, against NVIDIA's: what both must say alike.
#include <cuda_runtime_api.h>

#include <type_traits>

#define SAME(function, ...) static_assert(std::is_same_v<decltype(&function), cudaError_t (*)(__VA_ARGS__)>)
SAME(cudaGetDeviceCount, int*);
SAME(cudaSetDevice, int);
SAME(cudaGetDevice, int*);
SAME(cudaDeviceGetAttribute, int*, cudaDeviceAttr, int);
SAME(cudaDeviceGetPCIBusId, char*, int, int);
SAME(cudaDeviceGetByPCIBusId, int*, const char*);
SAME(cudaDeviceSynchronize, void);
SAME(cudaDeviceCanAccessPeer, int*, int, int);
SAME(cudaDeviceGetP2PAttribute, int*, cudaDeviceP2PAttr, int, int);
SAME(cudaDeviceEnablePeerAccess, int, unsigned int);
SAME(cudaRuntimeGetVersion, int*);
SAME(cudaDriverGetVersion, int*);
SAME(cudaMalloc, void**, size_t);
SAME(cudaFree, void*);
SAME(cudaMemGetInfo, size_t*, size_t*);
SAME(cudaMallocHost, void**, size_t);
SAME(cudaHostAlloc, void**, size_t, unsigned int);
SAME(cudaFreeHost, void*);
SAME(cudaHostRegister, void*, size_t, unsigned int);
SAME(cudaHostUnregister, void*);
SAME(cudaHostGetDevicePointer, void**, void*, unsigned int);
SAME(cudaPointerGetAttributes, cudaPointerAttributes*, const void*);
SAME(cudaMemcpy, void*, const void*, size_t, cudaMemcpyKind);
SAME(cudaMemcpyAsync, void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
SAME(cudaMemset, void*, int, size_t);
SAME(cudaMemsetAsync, void*, int, size_t, cudaStream_t);
SAME(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*);
SAME(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned int);
SAME(cudaIpcCloseMemHandle, void*);
SAME(cudaStreamCreate, cudaStream_t*);
SAME(cudaStreamCreateWithFlags, cudaStream_t*, unsigned int);
SAME(cudaStreamCreateWithPriority, cudaStream_t*, unsigned int, int);
SAME(cudaStreamDestroy, cudaStream_t);
SAME(cudaStreamSynchronize, cudaStream_t);
SAME(cudaStreamQuery, cudaStream_t);
SAME(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned int);
SAME(cudaLaunchHostFunc, cudaStream_t, cudaHostFn_t, void*);
SAME(cudaEventCreate, cudaEvent_t*);
SAME(cudaEventCreateWithFlags, cudaEvent_t*, unsigned int);
SAME(cudaEventDestroy, cudaEvent_t);
SAME(cudaEventRecord, cudaEvent_t, cudaStream_t);
SAME(cudaEventRecordWithFlags, cudaEvent_t, cudaStream_t, unsigned int);
SAME(cudaEventSynchronize, cudaEvent_t);
SAME(cudaEventQuery, cudaEvent_t);
SAME(cudaEventElapsedTime, float*, cudaEvent_t, cudaEvent_t);
SAME(cudaStreamBeginCapture, cudaStream_t, cudaStreamCaptureMode);
SAME(cudaStreamEndCapture, cudaStream_t, cudaGraph_t*);
SAME(cudaStreamIsCapturing, cudaStream_t, cudaStreamCaptureStatus*);
SAME(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*);
SAME(cudaGraphInstantiate, cudaGraphExec_t*, cudaGraph_t, unsigned long long);
SAME(cudaGraphLaunch, cudaGraphExec_t, cudaStream_t);
SAME(cudaGraphExecDestroy, cudaGraphExec_t);
SAME(cudaGraphDestroy, cudaGraph_t);
SAME(cudaGetLastError, void);
SAME(cudaPeekAtLastError, void);
static_assert(std::is_same_v<decltype(&cudaGetErrorName), const char* (*)(cudaError_t)>);
static_assert(std::is_same_v<decltype(&cudaGetErrorString), const char* (*)(cudaError_t)>);

static_assert(std::is_same_v<cudaStream_t, struct CUstream_st*> &&
              std::is_same_v<cudaEvent_t, struct CUevent_st*>);
static_assert(std::is_same_v<cudaGraph_t, struct CUgraph_st*> &&
              std::is_same_v<cudaGraphExec_t, struct CUgraphExec_st*>);
static_assert(sizeof(cudaIpcMemHandle_t) == 64 && sizeof(dim3) == 12 && sizeof(uint3) == 12);
static_assert(sizeof(uint4) == 16 && alignof(uint4) == 16);

static_assert(cudaSuccess == 0 && cudaErrorInvalidValue == 1 && cudaErrorMemoryAllocation == 2);
static_assert(cudaErrorInvalidConfiguration == 9 && cudaErrorInvalidMemcpyDirection == 21);
static_assert(cudaErrorInsufficientDriver == 35 && cudaErrorNoDevice == 100 && cudaErrorInvalidDevice == 101);
static_assert(cudaErrorDeviceUninitialized == 201 && cudaErrorMapBufferObjectFailed == 205);
static_assert(cudaErrorStreamCaptureUnsupported == 900 && cudaErrorStreamCaptureInvalidated == 901);
static_assert(cudaErrorStreamCaptureMerge == 902 && cudaErrorStreamCaptureUnmatched == 903);
static_assert(cudaErrorStreamCaptureUnjoined == 904 && cudaErrorStreamCaptureIsolation == 905);
static_assert(cudaErrorStreamCaptureImplicit == 906 && cudaErrorCapturedEvent == 907);
static_assert(cudaErrorStreamCaptureWrongThread == 908 && cudaErrorIllegalState == 401);
static_assert(cudaStreamCaptureStatusNone == 0 && cudaStreamCaptureStatusActive == 1);
static_assert(cudaStreamCaptureStatusInvalidated == 2 && cudaStreamCaptureModeGlobal == 0);
static_assert(cudaStreamCaptureModeThreadLocal == 1 && cudaStreamCaptureModeRelaxed == 2);
static_assert(cudaErrorPeerAccessUnsupported == 217);
static_assert(cudaErrorInvalidResourceHandle == 400 && cudaErrorNotReady == 600);
static_assert(cudaErrorIllegalAddress == 700 && cudaErrorPeerAccessAlreadyEnabled == 704);
static_assert(cudaErrorCooperativeLaunchTooLarge == 720);
static_assert(cudaMemcpyHostToHost == 0 && cudaMemcpyHostToDevice == 1 && cudaMemcpyDeviceToHost == 2);
static_assert(cudaMemcpyDeviceToDevice == 3 && cudaMemcpyDefault == 4);
static_assert(cudaDevAttrMultiProcessorCount == 16 && cudaDevAttrComputeCapabilityMajor == 75);
static_assert(cudaDevAttrComputeCapabilityMinor == 76 && cudaDevP2PAttrNativeAtomicSupported == 3);
static_assert(cudaMemoryTypeUnregistered == 0 && cudaMemoryTypeHost == 1 && cudaMemoryTypeDevice == 2);
static_assert(cudaStreamDefault == 0 && cudaStreamNonBlocking == 1);
static_assert(cudaEventDefault == 0 && cudaEventDisableTiming == 2);
static_assert(cudaEventRecordDefault == 0 && cudaEventRecordExternal == 1);
static_assert(cudaEventWaitDefault == 0 && cudaEventWaitExternal == 1);
static_assert(cudaHostAllocDefault == 0 && cudaHostAllocPortable == 1 && cudaHostAllocMapped == 2);
static_assert(cudaHostRegisterDefault == 0 && cudaHostRegisterPortable == 1 && cudaHostRegisterMapped == 2);
static_assert(cudaIpcMemLazyEnablePeerAccess == 1);
