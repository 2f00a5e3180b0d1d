/* kernels/fetch.h - rows from pinned host memory, sooner than the copy engine would bring few of them. */
#ifndef COLI_CUDA_KERNELS_FETCH_H
#define COLI_CUDA_KERNELS_FETCH_H

#include "../gpu.h"

namespace coli {

/* Copies `bytes` (a multiple of 16) of pinned memory to the device; both are aligned to 16 bytes. The launch behind it may
 * begin meanwhile. */
cudaError_t launch_fetch(void *to, const void *pinned, size_t bytes, cudaStream_t stream);

} // namespace coli

#endif
