/* coli_version.h - version numbers of libcoli and libcoli_cuda. */
#ifndef COLI_VERSION_H
#define COLI_VERSION_H

/* Release, as major.minor.patch; meson.build repeats it, a test compares. */
#define COLI_VERSION_MAJOR 0
#define COLI_VERSION_MINOR 1
#define COLI_VERSION_PATCH 0
#define COLI_VERSION_NUMBER (COLI_VERSION_MAJOR * 10000 + COLI_VERSION_MINOR * 100 + COLI_VERSION_PATCH)

/* The same as text: "0.1.0". */
#define COLI_VERSION_STRING                                                                                                \
    COLI_VERSION_DIGITS(COLI_VERSION_MAJOR)                                                                                \
    "." COLI_VERSION_DIGITS(COLI_VERSION_MINOR) "." COLI_VERSION_DIGITS(COLI_VERSION_PATCH)
#define COLI_VERSION_DIGITS(number) COLI_VERSION_DIGITS_OF(number)
#define COLI_VERSION_DIGITS_OF(number) #number

/* Binary interfaces. A major number changes only when an existing symbol changes its meaning or leaves;
 * a minor number when symbols are added. The major number is the soname's;
 * meson.build reads it here. */
#define COLI_ABI_MAJOR 0
#define COLI_ABI_MINOR 3
#define COLI_CUDA_ABI_MAJOR 1
#define COLI_CUDA_ABI_MINOR 3

#endif
