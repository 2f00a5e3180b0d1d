/* ptx/mma.cuh - products of small matrices on tensor cores: c [16, 8] += a [16, K] b [K, 8], spread over a warp.
 *
 * Lane 4 g + t holds, in this order,
 *   of c: (row g, columns 2 t, 2 t + 1), (row g + 8, the same columns);
 *   of a: row g, row g + 8, of the columns (K elements in a register's worth for each t) below; then the same of the rest;
 *   of b: column g, of the rows that a has as columns.
 * A register is a pair of halves, columns 2 t, 2 t + 1 of 8 (first in the low half), or four bytes, columns 4 t ... 4 t + 3
 * of 16 (first in the lowest byte). All lanes of the warp take part. */
#ifndef COLI_CUDA_PTX_MMA_CUH
#define COLI_CUDA_PTX_MMA_CUH

#include <cstdint>

#include "../gpu.h"

namespace coli {

#if defined(COLI_HIP)
/* hip/ptx.h */
#elif defined(COLI_SIMT)

using simt::mma_m16n8k16;
using simt::mma_m16n8k16_u8s8;
using simt::mma_m16n8k32_s8;
using simt::mma_m16n8k8;

#else

/* Halves, added up in float. */
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

/* Bytes, added up exactly. */
__device__ __forceinline__ void mma_m16n8k32_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

#endif

} // namespace coli

#endif
