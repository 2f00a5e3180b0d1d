/* api/info.cpp - version, errors, log: entry points of coli_cuda.h. */
#include "../error.h"
#include "../vendor.h"

int coli_cuda_abi_version(void) {
    return COLI_CUDA_ABI_MAJOR * 1000 + COLI_CUDA_ABI_MINOR;
}

const char *coli_cuda_version_string(void) {
    return COLI_VERSION_STRING;
}

const char *coli_cuda_build_info(void) {
#if defined(COLI_SIMT)
    return COLI_GPU_LIBRARY " " COLI_VERSION_STRING ", kernels compiled for the CPU (tests only)";
#else
    return COLI_GPU_LIBRARY " " COLI_VERSION_STRING ", " COLI_GPU_RUNTIME " runtime " COLI_GPU_RUNTIME_VERSION
                            ", " COLI_GPU_ARCHS;
#endif
}

const char *coli_cuda_last_error(void) {
    return coli::last_error();
}

coli_status coli_cuda_last_status(void) {
    return coli::last_status();
}

void coli_cuda_set_log(coli_log_fn log, void *user) {
    coli::set_log(log, user);
}
