/* hip/names.h - what texts that people read call AMD's things, in place of NVIDIA's in libcoli/cuda/names.h. */
#ifndef COLI_HIP_NAMES_H
#define COLI_HIP_NAMES_H

#define COLI_GPU_LIBRARY "libcoli_hip"
#define COLI_GPU_VENDOR "AMD"
#define COLI_GPU_RUNTIME "HIP"
/* HIP does not tell a driver that is absent from one that this user may not open. */
#define COLI_GPU_NONE_SEEN "HIP sees no AMD GPU: the amdgpu driver must be loaded and /dev/kfd open to this user"

namespace coli {

/* HIP 5.2.21153 is 50221153. */
constexpr int gpu_version_major(int version) {
    return version / 10000000;
}
constexpr int gpu_version_minor(int version) {
    return version / 100000 % 100;
}

} // namespace coli

#endif
