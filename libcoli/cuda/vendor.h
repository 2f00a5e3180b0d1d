/* vendor.h - what a build has of one GPU vendor besides its calls: words of texts for people, and a few numbers. */
#ifndef COLI_CUDA_VENDOR_H
#define COLI_CUDA_VENDOR_H

#define COLI_TEXT_OF(x) #x
#define COLI_TEXT(x) COLI_TEXT_OF(x)

#if defined(COLI_HIP)
#include "../hip/vendor.h"
#else

#define COLI_GPU_LIBRARY "libcoli_cuda"
#define COLI_GPU_VENDOR "NVIDIA"
#define COLI_GPU_RUNTIME "CUDA"
#define COLI_GPU_RUNTIME_VERSION COLI_TEXT(CUDART_VERSION)
#define COLI_GPU_NONE_SEEN "the driver sees no GPU"

namespace coli {

/* CUDA 12.8 is 12080. */
constexpr int gpu_version_major(int version) {
    return version / 1000;
}
constexpr int gpu_version_minor(int version) {
    return version % 1000 / 10;
}

/* The GPU that device code is being compiled for, as GpuTraits::capability has it. */
#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 10;
#else
constexpr int kCompiledFor = 90;
#endif

/* Bytes of the copies of an entry of the E8 codebook in shared memory. */
constexpr int kCodebookStride = 128;

} // namespace coli

#endif
#endif
