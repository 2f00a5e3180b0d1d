/* gpu.h - the one place that includes the GPU runtime. */
#ifndef COLI_CUDA_GPU_H
#define COLI_CUDA_GPU_H

#if defined(COLI_SIMT)
#include "simt.h" /* the tests compile the same sources for the CPU */
#elif defined(COLI_HIP)
#include "../hip/runtime.h"
#else
#include <cuda_runtime.h>
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif
#endif

#if defined(COLI_SIMT) || defined(__CUDACC__) || defined(__HIPCC__)
#include <cstdint>

#if defined(COLI_HIP)
#include "../hip/device.h"
#include "../hip/ptx.h" /* in place of what is in ptx/ */
#endif

namespace coli {

/* The dynamic shared memory of the block, aligned to 1024 bytes; a launch says how much there is. */
__device__ inline uint8_t *dynamic_shared() {
#if defined(COLI_SIMT)
    return static_cast<uint8_t *>(simt::block.dynamic_shared);
#else
    extern __shared__ __align__(1024) uint8_t coli_dynamic_shared[];
    return coli_dynamic_shared;
#endif
}

} // namespace coli
#endif

#endif
