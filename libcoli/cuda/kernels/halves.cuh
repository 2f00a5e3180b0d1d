/* kernels/halves.cuh - fp16 pairs in 32-bit registers: bits to values and back. The low half is the first of the pair. */
#ifndef COLI_CUDA_KERNELS_HALVES_CUH
#define COLI_CUDA_KERNELS_HALVES_CUH

#include <cstring>

#include "../gpu.h"
#include "../ptx/bits.cuh"

namespace coli {

__device__ __forceinline__ __half2 bits_pair(uint32_t bits) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof pair);
    return pair;
}
__device__ __forceinline__ uint32_t pair_bits(__half2 pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}
__device__ __forceinline__ float2 pair_floats(uint32_t bits) {
    return __half22float2(bits_pair(bits));
}
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
    return pair_bits(__floats2half2_rn(first, second));
}
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    return pair_bits(__hadd2(bits_pair(a), bits_pair(b)));
}
__device__ __forceinline__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
    return pair_bits(__hfma2(bits_pair(a), bits_pair(b), bits_pair(c)));
}

/* fp16 from 1024 to 2047 has a step of 1: an integer OR-ed into the mantissa of 1024 is a conversion, and subtracting 1024
 * (with the code's zero point) completes it. */
constexpr uint32_t k1024 = 0x64006400u;
/* Bytes 0 and 2, and bytes 1 and 3 of a word, each + 1024. */
__device__ __forceinline__ uint2 offset_pairs(uint32_t bytes) {
    return {(bytes & 0x00ff00ffu) | k1024, prmt(bytes, k1024, 0x7371)};
}

} // namespace coli

#endif
