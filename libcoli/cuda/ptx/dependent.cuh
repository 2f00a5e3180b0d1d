/* ptx/dependent.cuh - programmatic dependent launch: a kernel starts while the one before it on the stream still runs.
 *
 * Both say nothing before sm_90, and in a kernel that was launched without the attribute. */
#ifndef COLI_CUDA_PTX_DEPENDENT_CUH
#define COLI_CUDA_PTX_DEPENDENT_CUH

#include "../gpu.h"

namespace coli {

/* Waits until the kernels before have ended and all that they wrote is visible. */
__device__ __forceinline__ void dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the kernel behind start once every block has said so or ended. It orders no memory: the other waits all the same. */
__device__ __forceinline__ void dependency_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace coli

#endif
