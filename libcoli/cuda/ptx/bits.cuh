/* ptx/bits.cuh - bytes and bits of words. */
#ifndef COLI_CUDA_PTX_BITS_CUH
#define COLI_CUDA_PTX_BITS_CUH

#include <cstdint>

#include "../gpu.h"

namespace coli {

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

__device__ __forceinline__ uint32_t rotl(uint32_t x, uint32_t bits) {
    return __funnelshift_l(x, x, bits);
}

} // namespace coli

#endif
