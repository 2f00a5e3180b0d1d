/* version.c - which library this is. */
#include "../include/coli/coli.h"
#include "kernels.h"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

#ifdef _OPENMP
#define BUILT_WITH_OPENMP "OpenMP"
#else
#define BUILT_WITH_OPENMP "no OpenMP"
#endif

int coli_version_number(void) {
    return COLI_VERSION_NUMBER;
}

const char *coli_version_string(void) {
    return COLI_VERSION_STRING;
}

int coli_abi_version(void) {
    return COLI_ABI_MAJOR * 1000 + COLI_ABI_MINOR;
}

const char *coli_build_info(void) {
    return "libcoli " COLI_VERSION_STRING ", " COMPILER ", kernels: " COLI_KERNELS_BUILT ", " BUILT_WITH_OPENMP;
}
