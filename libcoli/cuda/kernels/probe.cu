#include "probe.h"

#include "../ptx/dependent.cuh"
#include "launch.h"

namespace coli {

namespace {

constexpr int kProbeThreads = 512;
constexpr int kProbeBlocks = 4; /* for each multiprocessor */
constexpr int kInFlight = 4;    /* loads of a thread */

__global__ void __launch_bounds__(kProbeThreads) probe(const uint4 *a, uint4 *b, size_t count) {
    dependency_trigger();
    const size_t threads = static_cast<size_t>(gridDim.x) * kProbeThreads;
    uint32_t sum = 0;
    for (size_t i = static_cast<size_t>(blockIdx.x) * kProbeThreads + threadIdx.x; i < count; i += kInFlight * threads) {
        uint4 values[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; k++) {
            values[k] = make_uint4(0, 0, 0, 0);
            if (i + k * threads < count) values[k] = __ldcs(a + i + k * threads);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; k++) {
            if (b && i + k * threads < count) __stcs(b + i + k * threads, values[k]);
            sum ^= values[k].x ^ values[k].y ^ values[k].z ^ values[k].w;
        }
    }
    if (sum == 0x7fc01235u && threadIdx.x == kProbeThreads) *b = make_uint4(sum, 0, 0, 0); /* never: keeps the loads */
}

} // namespace

cudaError_t launch_probe(const void *a, void *b, size_t bytes, int multiprocessors, bool overlapping, cudaStream_t stream) {
    return launch(probe, dim3(kProbeBlocks * multiprocessors), kProbeThreads, 0, overlapping, stream,
                  static_cast<const uint4 *>(a), static_cast<uint4 *>(b), bytes / sizeof(uint4));
}

} // namespace coli
