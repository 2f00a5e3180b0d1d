/* hip/vendor.h - for AMD GPUs what libcoli/cuda/vendor.h has for NVIDIA's. */
#ifndef COLI_HIP_VENDOR_H
#define COLI_HIP_VENDOR_H

#define COLI_GPU_LIBRARY "libcoli_hip"
#define COLI_GPU_VENDOR "AMD"
#define COLI_GPU_RUNTIME "HIP"
#define COLI_GPU_RUNTIME_VERSION COLI_TEXT(HIP_VERSION_MAJOR) "." COLI_TEXT(HIP_VERSION_MINOR)
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

/* hip/runtime.h says why. */
constexpr int kCompiledFor = 0;

/* Half of NVIDIA's, as blocks have 64 KB and a pair of f32 tiles takes 32. */
constexpr int kCodebookStride = 64;

} // namespace coli

#endif
