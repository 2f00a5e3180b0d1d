/* simt_cuda_runtime.h - the part of the CUDA runtime API that the backend uses, with CUDA's own names and values.
 *
 * The model behind it (simt_cuda_runtime.cpp):
 * - Work put on a stream waits there until somebody waits for it: by synchronising the stream, an event or the device, by a
 *   blocking copy, by cudaFree. Whoever forgets to wait sees old data; whoever reuses a pinned buffer too early, new data.
 * - cudaMemcpyAsync reads pageable memory when it is called, and into pageable memory it copies before it returns; it reads
 *   and writes pinned memory when the work runs.
 * - The legacy default stream and streams without cudaStreamNonBlocking wait for each other as in CUDA.
 * - A query that answers cudaErrorNotReady lets one operation run, so that polling comes to an end.
 * - Memory belongs to a device. A copy on another device's stream, or past the end, is cudaErrorInvalidValue. A kernel
 *   whose pointer argument is neither in memory of its device nor in pinned memory is reported and aborts. Under
 *   AddressSanitizer so is every access from another device or from the host.
 * - New device memory is full of 0xff bytes (NaN), freed memory of 0xdd.
 * - Every error is remembered, per thread, until cudaGetLastError. */
#ifndef SIMT_CUDA_RUNTIME_H
#define SIMT_CUDA_RUNTIME_H

#include "simt_types.h"

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#define CUDART_VERSION 13000

enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorInvalidSymbol = 13,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorUnknown = 999
};
using cudaError_t = cudaError;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxBlockDimX = 2,
    cudaDevAttrMaxBlockDimY = 3,
    cudaDevAttrMaxBlockDimZ = 4,
    cudaDevAttrMaxGridDimX = 5,
    cudaDevAttrMaxGridDimY = 6,
    cudaDevAttrMaxGridDimZ = 7,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrTotalConstantMemory = 9,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMaxRegistersPerBlock = 12,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrIntegrated = 18,
    cudaDevAttrCanMapHostMemory = 19,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxRegistersPerMultiprocessor = 82,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrReservedSharedMemoryPerBlock = 111
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

/* The fields of CUDA's structure that say something here, under their own names. */
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    size_t totalConstMem;
    int major, minor, multiProcessorCount, integrated, canMapHostMemory, concurrentKernels, ECCEnabled;
    int pciBusID, pciDeviceID, pciDomainID, asyncEngineCount, unifiedAddressing, memoryBusWidth, l2CacheSize;
    int persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, pageableMemoryAccess, cooperativeLaunch;
    size_t sharedMemPerBlockOptin;
    int maxBlocksPerMultiProcessor;
    size_t reservedSharedMemPerBlock;
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
};

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

using cudaStream_t = struct CUstream_st *;
using cudaEvent_t = struct CUevent_st *;
using cudaGraph_t = struct CUgraph_st *;
using cudaGraphExec_t = struct CUgraphExec_st *;

enum cudaLaunchAttributeID {
    cudaLaunchAttributeIgnore = 0,
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6,
    cudaLaunchAttributePriority = 8
};
union cudaLaunchAttributeValue {
    char pad[64];
    int cooperative, programmaticStreamSerializationAllowed, priority;
    struct {
        unsigned x, y, z;
    } clusterDim;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    char pad[8 - sizeof(cudaLaunchAttributeID)];
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

#define cudaStreamLegacy ((cudaStream_t)0x1)
#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventBlockingSync 0x01
#define cudaEventDisableTiming 0x02
#define cudaHostAllocDefault 0x00
#define cudaHostAllocPortable 0x01
#define cudaHostAllocMapped 0x02
#define cudaHostAllocWriteCombined 0x04

/* A shared library with the model in it shows these functions: tests use them beside the library's own, on the same
 * devices. */
#pragma GCC visibility push(default)
extern "C" {
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **memory, size_t bytes);
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer);

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *memory, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function);

/* For tests. */

/* The nth next call of the runtime function `name` fails, nth = 1 being the next; a kernel launch is called "launch", and
 * "*" counts calls of any. nth = 0 takes the order back ("*": all orders); nth = -1, -2, ... fails all later ones, too. A
 * failed call does nothing. */
void simt_fail_call(const char *name, int nth);

/* Calls of `name` so far ("*": of any), failed ones included. */
size_t simt_call_count(const char *name);

/* Allocations of device and pinned memory that were not freed; bytes of those on `device`; streams, events and graphs. */
size_t simt_live_allocations(void);
size_t simt_live_bytes(int device);
size_t simt_live_handles(void);
}
#pragma GCC visibility pop

template <class T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc((void **)memory, bytes);
}
template <class T> cudaError_t cudaMallocHost(T **memory, size_t bytes) {
    return cudaMallocHost((void **)memory, bytes);
}
template <class T> cudaError_t cudaHostAlloc(T **memory, size_t bytes, unsigned flags) {
    return cudaHostAlloc((void **)memory, bytes, flags);
}
template <class T> cudaError_t cudaFuncSetAttribute(T *function, cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)function, attribute, value);
}
template <class T> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, T *function) {
    return cudaFuncGetAttributes(attributes, (const void *)function);
}

namespace simt {

/* What stands between <<< and >>>. */
struct LaunchConfig {
    dim3 grid, block;
    size_t dynamic_shared_bytes;
    cudaStream_t stream;
    LaunchConfig(dim3 grid_, dim3 block_, size_t dynamic_shared_bytes_ = 0, cudaStream_t stream_ = nullptr)
        : grid(grid_), block(block_), dynamic_shared_bytes(dynamic_shared_bytes_), stream(stream_) {}
};

/* A kernel with its arguments bound, as it lies on a stream. */
struct BoundKernel {
    std::string name;
    const void *function;
    const void *const *pointers; /* its arguments; null for those that are not pointers to objects */
    size_t arguments;
    std::function<void()> run_thread;
};
cudaError_t submit(const LaunchConfig &config, const BoundKernel &kernel);

/* `symbol` is a __constant__ or __device__ variable: each device has a value of its own for it. */
cudaError_t copy_to_symbol(const char *call, void *symbol, size_t symbol_bytes, const void *from, size_t bytes,
                           size_t offset, cudaMemcpyKind kind, cudaStream_t stream, bool wait);
cudaError_t copy_from_symbol(const char *call, void *to, void *symbol, size_t symbol_bytes, size_t bytes, size_t offset,
                             cudaMemcpyKind kind);

template <class T> const void *object_pointer([[maybe_unused]] const T &argument) {
    if constexpr (std::is_pointer<T>::value && !std::is_function<std::remove_pointer_t<T>>::value) return argument;
    return nullptr;
}

/* cu2cpp.py writes launch(config, "kernel", kernel)(arguments...) for kernel<<<config>>>(arguments...). Arguments are
 * converted and copied by the launch. */
template <class... Parameters> struct Launch {
    LaunchConfig config;
    std::string name;
    void (*kernel)(Parameters...);

    cudaError_t operator()(Parameters... arguments) const {
        const void *pointers[] = {object_pointer(arguments)..., nullptr};
        return submit(config, {name, (const void *)kernel, pointers, sizeof...(arguments),
                               [run = kernel, arguments...] { run(arguments...); }});
    }
};
template <class... Parameters>
Launch<Parameters...> launch(const LaunchConfig &config, const char *name, void (*kernel)(Parameters...)) {
    return {config, name, kernel};
}

/* cudaLaunchKernelEx, told the text of its arguments, which has the kernel's name. */
cudaError_t check_attributes(const cudaLaunchConfig_t *config);
std::string second_argument(const char *text);
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel_ex(const char *text, const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                             Arguments &&...arguments) {
    cudaError_t error = check_attributes(config);
    if (error != cudaSuccess) return error;
    Launch<Parameters...> launch = {
        {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream}, second_argument(text), kernel};
    return launch(std::forward<Arguments>(arguments)...);
}
#define cudaLaunchKernelEx(...) simt::launch_kernel_ex(#__VA_ARGS__, __VA_ARGS__)

} // namespace simt

template <class T>
cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return simt::copy_to_symbol("cudaMemcpyToSymbol", (void *)&symbol, sizeof symbol, from, bytes, offset, kind, nullptr,
                                true);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(T &symbol, const void *from, size_t bytes, size_t offset, cudaMemcpyKind kind,
                                    cudaStream_t stream = nullptr) {
    return simt::copy_to_symbol("cudaMemcpyToSymbolAsync", (void *)&symbol, sizeof symbol, from, bytes, offset, kind,
                                stream, false);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void *to, T &symbol, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return simt::copy_from_symbol("cudaMemcpyFromSymbol", to, (void *)&symbol, sizeof symbol, bytes, offset, kind);
}

#endif
