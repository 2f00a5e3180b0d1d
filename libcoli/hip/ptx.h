/* hip/ptx.h - plain twins of the PTX wrappers in libcoli/cuda/ptx, which say what each of them does.
 *
 * What the plain path uses computes the same. What only the paths of Ampere and Hopper use stops the kernel: no plan
 * chooses those for an AMD GPU (hip/runtime.h), and they are there so that one kernel source compiles. */
#ifndef COLI_HIP_PTX_H
#define COLI_HIP_PTX_H

#include <cstdint>

namespace coli {

/*------   bits.cuh   ------*/

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t nibble = selector >> 4 * i & 15u, byte = static_cast<uint32_t>(bytes >> 8 * (nibble & 7u)) & 255u;
        result |= (nibble & 8u ? (byte >> 7) * 255u : byte) << 8 * i;
    }
    return result;
}
__device__ __forceinline__ uint32_t shift_left_alu(uint32_t x, int bits) {
    return x << bits;
}
__device__ __forceinline__ uint32_t register_constant(uint32_t value) {
    return value;
}
__device__ __forceinline__ uint32_t rotl(uint32_t x, uint32_t bits) {
    return x << (bits & 31u) | x >> (-bits & 31u);
}
__device__ __forceinline__ void compiler_fence() {}
__device__ __forceinline__ int keep(int value) {
    return value;
}

/*------   copy.cuh: copies that are done when the call returns   ------*/

__device__ __forceinline__ void copy_async_16(void *shared, const void *global) {
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
}
__device__ __forceinline__ void copy_async_commit() {}
template <int N> __device__ __forceinline__ void copy_async_wait() {}

/*------   What no plan for an AMD GPU uses   ------*/

__device__ __forceinline__ void named_barrier_sync(int, int) {
    __trap();
}
__device__ __forceinline__ void pause() {}
__device__ __forceinline__ void barrier_init(uint64_t *, unsigned) {
    __trap();
}
__device__ __forceinline__ void barrier_init_fence() {
    __trap();
}
__device__ __forceinline__ void barrier_expect(uint64_t *, uint32_t) {
    __trap();
}
__device__ __forceinline__ void barrier_arrive(uint64_t *) {
    __trap();
}
__device__ __forceinline__ void barrier_wait(uint64_t *, unsigned) {
    __trap();
}
__device__ __forceinline__ bool barrier_done(uint64_t *, unsigned) {
    __trap();
    return true;
}
__device__ __forceinline__ void copy_bulk(void *, const void *, uint32_t, uint64_t *) {
    __trap();
}
__device__ __forceinline__ void copy_bulk_kept(void *, const void *, uint32_t, uint64_t *) {
    __trap();
}
__device__ __forceinline__ void proxy_fence() {
    __trap();
}

__device__ __forceinline__ void mma_m16n8k16(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {
    __trap();
}
__device__ __forceinline__ void mma_m16n8k8(float (&)[4], uint32_t, uint32_t, uint32_t) {
    __trap();
}
__device__ __forceinline__ void mma_m16n8k32_s8(int (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {
    __trap();
}
__device__ __forceinline__ void mma_m16n8k16_u8s8(int (&)[4], uint32_t, uint32_t, uint32_t) {
    __trap();
}

__device__ __forceinline__ uint64_t wgmma_operand(const void *) {
    __trap();
    return 0;
}
__device__ __forceinline__ void wgmma_fence() {
    __trap();
}
__device__ __forceinline__ void wgmma_commit() {
    __trap();
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
    __trap();
}
template <int TILES> __device__ __forceinline__ void wgmma_settle(float (&)[TILES][4]) {
    __trap();
}
template <int TILES> __device__ __forceinline__ void wgmma(float (&)[TILES][4], const uint32_t (&)[4], uint64_t, bool) {
    __trap();
}
template <int N> __device__ __forceinline__ void take_registers() {
    __trap();
}
template <int N> __device__ __forceinline__ void give_registers() {
    __trap();
}

} // namespace coli

#endif
