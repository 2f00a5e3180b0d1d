/* kernels/launch.h - launches that may overlap with the one before them. */
#ifndef COLI_CUDA_KERNELS_LAUNCH_H
#define COLI_CUDA_KERNELS_LAUNCH_H

#include "../gpu.h"

namespace coli {

/* `overlapping`, on Hopper and later: the kernel starts while the one before it ends, and must wait (dependency_wait)
 * before it touches what that one wrote. */
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes, bool overlapping,
                   cudaStream_t stream, const Params &...params) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = overlapping ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params...);
}

} // namespace coli

#endif
