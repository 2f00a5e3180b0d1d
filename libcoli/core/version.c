/* version.c - which library this is. */
#include "../include/coli/coli.h"
#include "kernels.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define VERSION TEXT(COLI_VERSION_MAJOR) "." TEXT(COLI_VERSION_MINOR) "." TEXT(COLI_VERSION_PATCH)

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown compiler"
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
    return VERSION;
}

int coli_abi_version(void) {
    return COLI_ABI_MAJOR * 1000 + COLI_ABI_MINOR;
}

const char *coli_build_info(void) {
    return "libcoli " VERSION ", " COMPILER ", kernels: " COLI_KERNELS_BUILT ", " BUILT_WITH_OPENMP;
}
