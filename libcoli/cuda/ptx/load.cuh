/* ptx/load.cuh - loads that leave no trace in L1: weights are read once, activations and tables many times. */
#ifndef COLI_CUDA_PTX_LOAD_CUH
#define COLI_CUDA_PTX_LOAD_CUH

#include <cstdint>

#include "../gpu.h"

namespace coli {

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ uint32_t load_once_u16(const void *p) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_once_u32(const void *p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_once_u64(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ float4 load_once_f32x4(const void *p) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p));
    return v;
}

#else /* the same loads in plain C++, for compilers that know no PTX */

__device__ __forceinline__ uint32_t load_once_u16(const void *p) {
    return *static_cast<const uint16_t *>(p);
}
__device__ __forceinline__ uint32_t load_once_u32(const void *p) {
    return *static_cast<const uint32_t *>(p);
}
__device__ __forceinline__ uint2 load_once_u64(const void *p) {
    return *static_cast<const uint2 *>(p);
}
__device__ __forceinline__ float4 load_once_f32x4(const void *p) {
    return *static_cast<const float4 *>(p);
}

#endif

} // namespace coli

#endif
