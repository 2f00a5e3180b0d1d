/* ptx/bits.cuh - bytes and bits of words. */
#ifndef COLI_CUDA_PTX_BITS_CUH
#define COLI_CUDA_PTX_BITS_CUH

#include <cstdint>

#include "../gpu.h"

namespace coli {

#if !defined(COLI_HIP) /* there it is in hip/ptx.h */

/* Byte i of the result is byte (selector nibble i) & 7 of b:a, a below; where the nibble is 8 or more, the sign bit of that
 * byte eight times. */
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(COLI_SIMT)
    return simt::prmt(a, b, selector);
#else
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
#endif
}

/* x << bits. The compiler makes shifts by constants multiplications, to spare the integer pipe; a funnel shift stays there,
 * where the multipliers are busier. */
__device__ __forceinline__ uint32_t shift_left_alu(uint32_t x, int bits) {
    return __funnelshift_l(0u, x, bits);
}

/* Keeps the compiler from moving loads across, when it would run out of registers by it; threads need no order here. Of
 * what does that, this is the cheapest that it heeds. */
__device__ __forceinline__ void compiler_fence() {
#if !defined(COLI_SIMT)
    __syncwarp();
#endif
}

/* The same value, of which the compiler no longer knows how it was computed: it keeps it rather than compute it again. */
__device__ __forceinline__ int keep(int value) {
#if !defined(COLI_SIMT)
    asm volatile("" : "+r"(value));
#endif
    return value;
}

/* A constant in a register, for operands that can be neither immediates nor uniform registers. Where the compiler sees a
 * constant it has it in a uniform register, and copies it from there for every single use. It does not see that what is
 * added here is zero. */
__device__ __forceinline__ uint32_t register_constant(uint32_t value) {
#if defined(COLI_SIMT)
    return value;
#else
    uint32_t result;
    asm("{\n\t"
        ".reg .u32 nothing;\n\t"
        "mov.u32 nothing, %%laneid;\n\t"
        "shr.u32 nothing, nothing, 5;\n\t"
        "add.u32 %0, nothing, %1;\n\t"
        "}"
        : "=r"(result)
        : "r"(value));
    return result;
#endif
}

__device__ __forceinline__ uint32_t rotl(uint32_t x, uint32_t bits) {
    return __funnelshift_l(x, x, bits);
}

#endif

} // namespace coli

#endif
