/* gpu.h - the one place that includes the GPU runtime. */
#ifndef COLI_CUDA_GPU_H
#define COLI_CUDA_GPU_H

#if defined(COLI_SIMT)
#include "simt.h" /* the tests compile the same sources for the CPU */
#else
#include <cuda_runtime.h>
#endif

#endif
