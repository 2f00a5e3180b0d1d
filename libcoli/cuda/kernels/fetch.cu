#include "fetch.h"

#include "../ptx/dependent.cuh"

namespace coli {

namespace {

constexpr int kFetchThreads = 128;

/* A thread has one load: all of them cross the link together. */
__global__ void __launch_bounds__(kFetchThreads) fetch(uint4 *to, const uint4 *pinned, unsigned count) {
    dependency_trigger();
    const unsigned i = blockIdx.x * kFetchThreads + threadIdx.x;
    if (i < count) to[i] = pinned[i];
}

} // namespace

cudaError_t launch_fetch(void *to, const void *pinned, size_t bytes, cudaStream_t stream) {
    const unsigned count = static_cast<unsigned>(bytes / sizeof(uint4));
    const unsigned blocks = (count + kFetchThreads - 1) / kFetchThreads;
    fetch<<<blocks, kFetchThreads, 0, stream>>>(static_cast<uint4 *>(to), static_cast<const uint4 *>(pinned), count);
    return cudaGetLastError();
}

} // namespace coli
