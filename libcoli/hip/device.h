/* hip/device.h - CUDA's device functions where HIP has none of the name, or another.
 *
 * Warps. Kernels speak of warps of 32 lanes, AMD's hardware of waves: of 32 lanes (RDNA) or of 64 (GCN, CDNA). A warp here
 * is 32 neighbouring lanes of a wave, a half of one where waves are of 64. Shuffles get a width of 32, so that no lane sees
 * the other half; lanes of a wave run in step, so that __syncwarp has only the compiler and memory to order; halves that
 * take different ways are masked by the compiler in turn. Masks are dropped: kernels always name the whole warp. What would
 * speak of a wave (ballots, votes, warpSize) is not used, and tests/test_hip.py sees to it. */
#ifndef COLI_HIP_DEVICE_H
#define COLI_HIP_DEVICE_H

/* Macros, as newer versions of HIP have functions of these names, which want masks of 64 bits. */
#define __shfl_sync(mask, value, lane) ((void)(mask), __shfl(value, lane, 32))
#define __shfl_xor_sync(mask, value, lane_mask) ((void)(mask), __shfl_xor(value, lane_mask, 32))
#define __syncwarp() ::coli::hip_sync_warp()

#if !defined(COLI_SIMT) /* the simulator has them */

#define __grid_constant__
#define __ldcs(address) (*(address))
#define __stcs(address, value) (*(address) = (value))
#define __trap() __builtin_trap()
/* Those of HIP may be fused with what follows. */
#define __fadd_rn(a, b) ::coli::hip_add_rounded(a, b)
#define __fmul_rn(a, b) ::coli::hip_multiply_rounded(a, b)

#endif

namespace coli {

#if !defined(COLI_SIMT)
__device__ __forceinline__ float hip_add_rounded(float a, float b) {
#pragma clang fp contract(off)
    return a + b;
}
__device__ __forceinline__ float hip_multiply_rounded(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
#endif

/* What lanes of the warp wrote is there for the others, and nothing moves across. */
__device__ __forceinline__ void hip_sync_warp() {
#if defined(COLI_SIMT)
    simt::sync_lanes(32); /* simulated lanes do not run in step */
#else
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#endif
}

} // namespace coli

#endif
