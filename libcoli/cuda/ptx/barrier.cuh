/* ptx/barrier.cuh - barriers for some warps of a block. */
#ifndef COLI_CUDA_PTX_BARRIER_CUH
#define COLI_CUDA_PTX_BARRIER_CUH

#include "../gpu.h"

namespace coli {

#if defined(COLI_HIP)
/* hip/ptx.h */
#elif defined(COLI_SIMT)

using simt::named_barrier_sync;

#else

/* Waits until `threads` threads, whole warps, have come to barrier `id`: 1 to 15, since __syncthreads() is 0. */
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif

} // namespace coli

#endif
