/* coli_version.h - version numbers of libcoli and libcoli_cuda. */
#ifndef COLI_VERSION_H
#define COLI_VERSION_H

/* Release, as major.minor.patch. meson.build reads these three lines. */
#define COLI_VERSION_MAJOR 0
#define COLI_VERSION_MINOR 1
#define COLI_VERSION_PATCH 0
#define COLI_VERSION_NUMBER (COLI_VERSION_MAJOR * 10000 + COLI_VERSION_MINOR * 100 + COLI_VERSION_PATCH)

/* Binary interfaces. A major number changes only when an existing symbol changes its meaning or leaves;
 * a minor number when symbols are added. The major number is the soname's. */
#define COLI_ABI_MAJOR 0
#define COLI_ABI_MINOR 1
#define COLI_CUDA_ABI_MAJOR 1
#define COLI_CUDA_ABI_MINOR 0

#endif
