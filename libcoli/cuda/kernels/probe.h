/* kernels/probe.h - what the memory of a device can do: streams that compute nothing. */
#ifndef COLI_CUDA_KERNELS_PROBE_H
#define COLI_CUDA_KERNELS_PROBE_H

#include "../gpu.h"

namespace coli {

/* Reads `bytes` (a multiple of 16) at a; copies them to b where that is not NULL. Starts while the launch before it ends
 * where `overlapping`. */
cudaError_t launch_probe(const void *a, void *b, size_t bytes, int multiprocessors, bool overlapping, cudaStream_t stream);

} // namespace coli

#endif
