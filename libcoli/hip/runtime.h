/* hip/runtime.h - the GPU runtime of AMD under the names of CUDA's, for every call that the backend makes.
 *
 * The backend is one source. It speaks CUDA; gpu.h includes this header in place of <cuda_runtime.h> where COLI_HIP is
 * defined. A name that means the same is a macro; what differs has a twin below. tests/test_hip.py names what is missing.
 */
#ifndef COLI_HIP_RUNTIME_H
#define COLI_HIP_RUNTIME_H

#if defined(__HIPCC__)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#include <hip/hip_runtime_api.h>
#endif

#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaErrorIllegalAddress hipErrorIllegalAddress
#define cudaErrorInsufficientDriver hipErrorInsufficientDriver
#define cudaErrorInvalidDevice hipErrorInvalidDevice
#define cudaErrorLaunchFailure hipErrorLaunchFailure
#define cudaErrorMemoryAllocation hipErrorOutOfMemory
#define cudaErrorNoDevice hipErrorNoDevice
#define cudaErrorNoKernelImageForDevice hipErrorNoBinaryForGpu
#define cudaErrorNotSupported hipErrorNotSupported
#define cudaGetErrorName hipGetErrorName
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError

#define cudaDeviceProp hipDeviceProp_t
#define cudaDeviceSynchronize hipDeviceSynchronize
#define cudaDriverGetVersion hipDriverGetVersion
#define cudaGetDevice hipGetDevice
#define cudaGetDeviceCount hipGetDeviceCount
#define cudaGetDeviceProperties hipGetDeviceProperties
#define cudaMemGetInfo hipMemGetInfo
#define cudaRuntimeGetVersion hipRuntimeGetVersion
#define cudaSetDevice hipSetDevice

#define cudaFree hipFree
#define cudaFreeHost hipHostFree
#define cudaMalloc hipMalloc
#define cudaMemcpy2DAsync hipMemcpy2DAsync
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaMemcpyHostToDevice hipMemcpyHostToDevice
#define cudaMemcpyKind hipMemcpyKind

#define cudaEvent_t hipEvent_t
#define cudaEventCreate hipEventCreate
#define cudaEventCreateWithFlags hipEventCreateWithFlags
#define cudaEventDestroy hipEventDestroy
#define cudaEventDisableTiming hipEventDisableTiming
#define cudaEventElapsedTime hipEventElapsedTime
#define cudaEventRecord hipEventRecord
#define cudaEventSynchronize hipEventSynchronize

#define cudaStream_t hipStream_t
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamDestroy hipStreamDestroy
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamSynchronize hipStreamSynchronize

#define cudaFuncAttributeMaxDynamicSharedMemorySize hipFuncAttributeMaxDynamicSharedMemorySize
#define cudaFuncSetAttribute hipFuncSetAttribute

/* CUDA's last parameter has a default. */
inline hipError_t cudaStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags = 0) {
    return hipStreamWaitEvent(stream, event, flags);
}

inline hipError_t cudaMallocHost(void **memory, size_t bytes) {
    return hipHostMalloc(memory, bytes, hipHostMallocDefault);
}

/*------   Attributes of a device   ------*/

enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrIntegrated = hipDeviceAttributeIntegrated,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = hipDeviceAttributeMaxSharedMemoryPerBlock,
    cudaDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount,
};

/* HIP numbers compute capabilities after AMD's own generations: gfx906 would be 9.0, as Hopper is. No AMD GPU has what the
 * backend takes a number to promise, so theirs is 0.0, and plans choose the plain path. */
inline hipError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (attribute != cudaDevAttrComputeCapabilityMajor && attribute != cudaDevAttrComputeCapabilityMinor)
        return hipDeviceGetAttribute(value, static_cast<hipDeviceAttribute_t>(attribute), device);
    *value = 0;
    return hipSuccess;
}

/*------   What a pointer points to   ------*/

enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeRegistered };
struct cudaPointerAttributes {
    cudaMemoryType type;
};

/* HIP before 6 refuses memory that it does not know, and its first memory type is that of the host. */
inline hipError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    hipPointerAttribute_t found{};
    const hipError_t result = hipPointerGetAttributes(&found, pointer);
    bool known = result == hipSuccess;
#if HIP_VERSION_MAJOR >= 6
    known = known && found.type != hipMemoryTypeUnregistered;
#endif
    attributes->type = known ? cudaMemoryTypeRegistered : cudaMemoryTypeUnregistered;
    return result;
}

/*------   Launches with attributes   ------*/

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    hipStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

/* The one attribute there is allows kernels of a stream to overlap; without it they run one after another, which is
 * always right. */
template <class... Params>
hipError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Params...), Params... params) {
    void *arguments[] = {&params...};
    return hipLaunchKernel(reinterpret_cast<const void *>(kernel), config->gridDim, config->blockDim, arguments,
                           config->dynamicSmemBytes, config->stream);
}

#endif
