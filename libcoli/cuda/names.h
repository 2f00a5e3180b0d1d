/* names.h - what texts that people read call the GPU's vendor, runtime and library, and how its versions are written. */
#ifndef COLI_CUDA_NAMES_H
#define COLI_CUDA_NAMES_H

#if defined(COLI_HIP)
#include "../hip/names.h"
#else

#define COLI_GPU_LIBRARY "libcoli_cuda"
#define COLI_GPU_VENDOR "NVIDIA"
#define COLI_GPU_RUNTIME "CUDA"
#define COLI_GPU_NONE_SEEN "the driver sees no GPU"

namespace coli {

/* CUDA 12.8 is 12080. */
constexpr int gpu_version_major(int version) {
    return version / 1000;
}
constexpr int gpu_version_minor(int version) {
    return version % 1000 / 10;
}

} // namespace coli

#endif
#endif
