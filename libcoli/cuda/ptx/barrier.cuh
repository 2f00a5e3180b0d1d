/* ptx/barrier.cuh - barriers for some warps of a block. */
#ifndef COLI_CUDA_PTX_BARRIER_CUH
#define COLI_CUDA_PTX_BARRIER_CUH

#include "../gpu.h"

namespace coli {

#if defined(COLI_HIP)
/* hip/ptx.h */
#elif defined(COLI_SIMT)

using simt::named_barrier_sync;

__device__ __forceinline__ void pause() {}

#else

/* Waits until `threads` threads, whole warps, have come to barrier `id`: 1 to 15, since __syncthreads() is 0. */
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    __syncwarp(); /* lanes that went different ways come together */
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Some tens of nanoseconds in which a thread that waits leaves the multiprocessor to others. */
__device__ __forceinline__ void pause() {
    __nanosleep(40);
}

#endif

} // namespace coli

#endif
