/* kernels.h - the loops whose speed matters, as a table of functions.
 *
 * kernels_impl.h writes them once; kernels_scalar.c, kernels_avx2.c and kernels_avx512.c compile them for one instruction
 * set each; isa.c picks a table at run time. All tables give the same bits, except that the sums of dot_rows round
 * differently where there is no fused multiply-add. */
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

/* The codebook as the encoder searches it.
 *
 * The squared error of entry g for magnitudes m under the scale s is |m|^2 + s (s |g|^2 - 2 m g), so among entries of one
 * length the one with the largest m g is best whatever s is. Entries of one length therefore share a slot (a large class of
 * them several), and scales are tried on the slots' maxima. Round r holds the r-th entry of each slot that has so many,
 * the longest slots first; where a round is filled up to a multiple of 8, it repeats the slot's first entry.
 *
 * Weights are in units of half a table byte. */
#define COLI_E8_SLOTS 72
#define COLI_E8_ROUNDS 6
#define COLI_E8_PLACES 280 /* of all rounds */

typedef struct coli_e8_search {
    float weights[4][COLI_E8_PLACES]; /* weight k of the entry at each place */
    float lengths[COLI_E8_PLACES];    /* squared; the first COLI_E8_SLOTS places are one of each slot */
    int entries[COLI_E8_PLACES];
    int round_slots[COLI_E8_ROUNDS];
    int by_length[COLI_E8_SLOTS];        /* slots, the shortest first */
    float sorted_lengths[COLI_E8_SLOTS]; /* theirs */
} coli_e8_search;

#define COLI_E8_TRIALS 256 /* the most sub-scales that e8_gains tries at once */

/* A sub-block to encode. A lane whose number of negatives is odd must give one weight the other sign. */
typedef struct coli_e8_subblock {
    float magnitudes[32];
    const float *importance; /* [32], the weights of the squared errors; NULL where all are 1 */
    int odd[4];              /* per lane */
} coli_e8_subblock;

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

    /* The reference rule: nearest codebook entries for the 32 magnitudes of a sub-block under super-scale d, for the
     * sub-scale code with the smallest squared error, which is returned. Ties go to the lowest index and the lowest code.
     */
    int (*e8_fit)(const coli_e8_search *codebook, const float magnitudes[32], float d, uint8_t indices[8]);

    /* gains[i] = squared error under the sub-scale scales[i] with the best entries and flips, less that of zeros; `count`
     * is a multiple of 16, at most COLI_E8_TRIALS. */
    void (*e8_gains)(const coli_e8_search *codebook, const coli_e8_subblock *subblock, const float *scales, int count,
                     float *gains);

    /* Those entries of lane `lane`, and which of its weights takes the other sign, or -1. */
    int (*e8_choose)(const coli_e8_search *codebook, const coli_e8_subblock *subblock, int lane, float scale,
                     uint8_t indices[2]);

    /* The entry g with the lowest linear g + g quadratic g, `quadratic` being upper triangular; the lowest of equals. */
    int (*e8_lowest_quadratic)(const coli_e8_search *codebook, const float linear[4], const float quadratic[4][4],
                               float *lowest);

    /* y[j] += sum_k x[k] w[k, j] over `count` rows of w, whose rows are `stride` apart, one after another. */
    void (*add_products)(float *y, int columns, const float *x, int count, const float *w, size_t stride);
} coli_kernels;

extern const coli_kernels coli_kernels_scalar;
#if COLI_KERNELS_X86
extern const coli_kernels coli_kernels_avx2, coli_kernels_avx512;
#endif

/* The table in use. */
const coli_kernels *coli_kernels_current(void);

#endif
