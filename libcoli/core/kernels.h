/* kernels.h - the loops whose speed matters, as a table of functions.
 *
 * kernels_impl.h writes them once; kernels_scalar.c, kernels_avx2.c and kernels_avx512.c compile them for one instruction
 * set each; isa.c picks a table at run time. All tables give the same bits, except that dot_rows and add_scaled
 * round differently where there is no fused multiply-add. */
#ifndef COLI_CORE_KERNELS_H
#define COLI_CORE_KERNELS_H

#include "../include/coli/coli.h"

#if defined(__x86_64__)
#define COLI_KERNELS_X86 1
#define COLI_KERNELS_BUILT "avx512 avx2 scalar"
#else
#define COLI_KERNELS_X86 0
#define COLI_KERNELS_BUILT "scalar"
#endif

/* The codebook as the encoder searches it: weight k of all entries side by side, in units of half a table byte, and each
 * entry's squared length. In double, where products with float32 magnitudes and sub-scales are exact, so that ties between
 * entries are recognised as ties. */
typedef struct coli_e8_search {
    double weights[4][256];
    double lengths[256];
} coli_e8_search;

typedef struct coli_kernels {
    const char *name; /* as coli_isa() gives it */

    /* Decodes row `row` of a checked matrix to w [columns]. */
    void (*decode_row)(const coli_matrix *matrix, int row, float *w);

    /* y[s * y_stride] = sum_i w[i] x[s, i] for S rows of x [S, columns]. A row's result does not depend on S. */
    void (*dot_rows)(const float *w, const float *x, size_t S, int columns, float *y, size_t y_stride);

    /* y[i] = x[i], negated where bit i of `signs` (lowest first in each byte) is set; n is a multiple of 8. y may be x. */
    void (*flip_signs)(const float *x, float *y, int n, const uint8_t *signs);

    /* Walsh-Hadamard transform of x [n] in place, natural order, times `scale`; n is a power of two. */
    void (*hadamard)(float *x, int n, float scale);

    /* y[i] += factor * x[i] */
    void (*add_scaled)(float *y, const float *x, float factor, int n);

    /* Nearest codebook entries for the 32 magnitudes of a sub-block under super-scale d, for the sub-scale code with the
     * smallest squared error, which is returned. Ties go to the lowest index and the lowest code. */
    int (*e8_fit)(const coli_e8_search *codebook, const float magnitudes[32], float d, uint8_t indices[8]);
} coli_kernels;

extern const coli_kernels coli_kernels_scalar;
#if COLI_KERNELS_X86
extern const coli_kernels coli_kernels_avx2, coli_kernels_avx512;
#endif

/* The table in use. */
const coli_kernels *coli_kernels_current(void);

#endif
