/* kernels_impl.h - the kernels, written once. A file that includes it names its instruction set in COLI_KERNELS_NAME and is
 * compiled with the flags of that set; the loops are plain C that the compiler vectorises, but for the E8
 * decode of decode_row.h. */
#include <math.h>

#include "decode_row.h"
#include "kernels.h"
#include "parallel.h"
#include "rotate_kernels.h"

/* Fused where the processor does it in one instruction. Written out, because the compiler must not fuse anything else: the
 * encoder's comparisons have to come out the same for every instruction set. */
#ifdef __FMA__
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

/* Independent partial sums: enough to fill the vector registers, and the more there are, the smaller the rounding error. */
#define PARTIAL_SUMS 64

static float dot(const float *restrict w, const float *restrict x, int columns) {
    float sums[PARTIAL_SUMS] = {0};
    int whole = columns - columns % PARTIAL_SUMS;
    for (int i = 0; i < whole; i += PARTIAL_SUMS) {
        COLI_SIMD()
        for (int j = 0; j < PARTIAL_SUMS; j++) sums[j] = MULTIPLY_ADD(w[i + j], x[i + j], sums[j]);
    }
    for (int j = 0; j < columns - whole; j++) sums[j] = MULTIPLY_ADD(w[whole + j], x[whole + j], sums[j]);
    for (int half = PARTIAL_SUMS / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    }
    return sums[0];
}

static void dot_rows(const float *w, const float *x, size_t S, int columns, float *y, size_t y_stride) {
    for (size_t s = 0; s < S; s++) y[s * y_stride] = dot(w, x + s * (size_t)columns, columns);
}

static void add_scaled(float *restrict y, const float *restrict x, float factor, int n) {
    COLI_SIMD()
    for (int i = 0; i < n; i++) y[i] = MULTIPLY_ADD(factor, x[i], y[i]);
}

/* products[e] = 2 m g_e for the entries g_e */
static void e8_products(const coli_e8_search *codebook, const float m[4], double products[256]) {
    COLI_SIMD()
    for (int e = 0; e < 256; e++) {
        products[e] = 2.0 * (m[0] * codebook->weights[0][e] + m[1] * codebook->weights[1][e] +
                             m[2] * codebook->weights[2][e] + m[3] * codebook->weights[3][e]);
    }
}

/* First entry with the smallest scale |g_e|^2 - products[e], which goes to *smallest. */
static int e8_nearest(const coli_e8_search *codebook, const double products[256], double scale, double *smallest) {
    double scores[256], low = HUGE_VAL;
    int nearest = 256;
    COLI_SIMD(reduction(min : low))
    for (int e = 0; e < 256; e++) {
        scores[e] = scale * codebook->lengths[e] - products[e];
        low = scores[e] < low ? scores[e] : low;
    }
    COLI_SIMD(reduction(min : nearest))
    for (int e = 0; e < 256; e++) {
        int candidate = scores[e] == low ? e : 256;
        nearest = candidate < nearest ? candidate : nearest;
    }
    *smallest = low;
    return nearest;
}

static int e8_fit(const coli_e8_search *codebook, const float magnitudes[32], float d, uint8_t indices[8]) {
    double products[8][256], best_error = HUGE_VAL;
    int best_code = 0;
    for (int group = 0; group < 8; group++) e8_products(codebook, magnitudes + 4 * group, products[group]);
    for (int code = 0; code < 16; code++) {
        double scale = d * (0.5 + code) * 0.5, error = 0, score;
        uint8_t candidate[8];
        if (scale < 1e-20) scale = 1e-20;
        for (int group = 0; group < 8; group++) {
            candidate[group] = (uint8_t)e8_nearest(codebook, products[group], scale, &score);
            error += scale * score;
        }
        if (error < best_error) {
            best_error = error;
            best_code = code;
            memcpy(indices, candidate, sizeof candidate);
        }
    }
    return best_code;
}

#define TABLE_NAME_(name) coli_kernels_##name
#define TABLE_NAME(name) TABLE_NAME_(name)
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

const coli_kernels TABLE_NAME(COLI_KERNELS_NAME) = {
    .name = TEXT(COLI_KERNELS_NAME),
    .decode_row = decode_row,
    .dot_rows = dot_rows,
    .flip_signs = flip_signs,
    .hadamard = hadamard,
    .add_scaled = add_scaled,
    .e8_fit = e8_fit,
};
