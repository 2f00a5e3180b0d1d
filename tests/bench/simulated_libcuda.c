/* simulated_libcuda.c - the part of the CUDA driver API that pycoli bench uses, on the simulated CUDA runtime. */
#include <stddef.h>

typedef unsigned long long address;

int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaDriverGetVersion(int *version);
int cudaEventCreateWithFlags(void **event, unsigned flags);
int cudaEventDestroy(void *event);
int cudaEventElapsedTime(float *milliseconds, void *start, void *stop);
int cudaEventRecord(void *event, void *stream);
int cudaEventSynchronize(void *event);
int cudaFree(void *memory);
int cudaFreeHost(void *memory);
int cudaGetDeviceCount(int *count);
const char *cudaGetErrorString(int error);
int cudaGetLastError(void);
int cudaGraphDestroy(void *graph);
int cudaGraphExecDestroy(void *executable);
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags);
int cudaGraphLaunch(void *executable, void *stream);
int cudaHostAlloc(void **memory, size_t size, unsigned flags);
int cudaMalloc(void **memory, size_t size);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
int cudaSetDevice(int device);
int cudaStreamBeginCapture(void *stream, int mode);
int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamDestroy(void *stream);
int cudaStreamEndCapture(void *stream, void **graph);
int cudaStreamSynchronize(void *stream);

enum { TO_DEVICE = 1, TO_HOST = 2, INVALID_DEVICE = 101 };

static char contexts[16]; /* addresses that stand for the devices' primary contexts */

int cuInit(unsigned flags) {
    return (int)flags;
}
int cuDriverGetVersion(int *version) {
    return cudaDriverGetVersion(version);
}
int cuGetErrorString(int error, const char **text) {
    return *text = cudaGetErrorString(error), 0;
}

int cuDeviceGet(int *device, int ordinal) {
    int count = 0;
    const int error = cudaGetDeviceCount(&count);
    *device = ordinal;
    return error ? error : ordinal < count ? 0 : INVALID_DEVICE;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    return *context = contexts + device, 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    return device < 0;
}
int cuCtxSetCurrent(void *context) {
    return cudaSetDevice((int)((char *)context - contexts));
}

int cuMemAlloc_v2(address *memory, size_t size) {
    const int error = cudaMalloc((void **)memory, size);
    if (error) cudaGetLastError(); /* the runtime remembers its own errors alone, none of the driver's */
    return error;
}
int cuMemFree_v2(address memory) {
    return cudaFree((void *)memory);
}
int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    return cudaHostAlloc(memory, size, flags);
}
int cuMemFreeHost(void *memory) {
    return cudaFreeHost(memory);
}
int cuMemcpyHtoD_v2(address to, const void *from, size_t size) {
    return cudaMemcpy((void *)to, from, size, TO_DEVICE);
}
int cuMemcpyDtoH_v2(void *to, address from, size_t size) {
    return cudaMemcpy(to, (void *)from, size, TO_HOST);
}
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream) {
    return cudaMemcpyAsync((void *)to, from, size, TO_DEVICE, stream);
}

int cuStreamCreate(void **stream, unsigned flags) {
    return cudaStreamCreateWithFlags(stream, flags);
}
int cuStreamDestroy_v2(void *stream) {
    return cudaStreamDestroy(stream);
}
int cuStreamSynchronize(void *stream) {
    return cudaStreamSynchronize(stream);
}
int cuStreamBeginCapture_v2(void *stream, int mode) {
    return cudaStreamBeginCapture(stream, mode);
}
int cuStreamEndCapture(void *stream, void **graph) {
    return cudaStreamEndCapture(stream, graph);
}

int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}
int cuGraphLaunch(void *executable, void *stream) {
    return cudaGraphLaunch(executable, stream);
}
int cuGraphExecDestroy(void *executable) {
    return cudaGraphExecDestroy(executable);
}
int cuGraphDestroy(void *graph) {
    return cudaGraphDestroy(graph);
}

int cuEventCreate(void **event, unsigned flags) {
    return cudaEventCreateWithFlags(event, flags);
}
int cuEventRecord(void *event, void *stream) {
    return cudaEventRecord(event, stream);
}
int cuEventSynchronize(void *event) {
    return cudaEventSynchronize(event);
}
int cuEventElapsedTime(float *milliseconds, void *start, void *stop) {
    return cudaEventElapsedTime(milliseconds, start, stop);
}
int cuEventDestroy_v2(void *event) {
    return cudaEventDestroy(event);
}
