/* kernels_impl.h - the kernels, written once. A file that includes it names its instruction set in COLI_KERNELS_NAME and is
 * compiled with the flags of that set; the loops are plain C that the compiler vectorises, but for the E8
 * decode of decode_row.h. */
#include <math.h>

#include "../formats/e8_encode.h"
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

/* Vectors of the instruction set; arithmetic operators work on them, the minimum does not. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define VECTOR_MIN_F64(a, b) _mm512_min_pd(a, b)
#define VECTOR_MIN_F32(a, b) _mm512_min_ps(a, b)
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define VECTOR_MIN_F64(a, b) _mm256_min_pd(a, b)
#define VECTOR_MIN_F32(a, b) _mm256_min_ps(a, b)
#else
#define VECTOR_BYTES 16
#define VECTOR_MIN_F64(a, b)                                                                                               \
    ((vector_f64)(((bits_f64)((a) < (b)) & (bits_f64)(a)) | (~(bits_f64)((a) < (b)) & (bits_f64)(b))))
#define VECTOR_MIN_F32(a, b)                                                                                               \
    ((vector_f32)(((bits_f32)((a) < (b)) & (bits_f32)(a)) | (~(bits_f32)((a) < (b)) & (bits_f32)(b))))
typedef int64_t bits_f64 __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t bits_f32 __attribute__((vector_size(VECTOR_BYTES)));
#endif
typedef double vector_f64 __attribute__((vector_size(VECTOR_BYTES)));
typedef float vector_f32 __attribute__((vector_size(VECTOR_BYTES)));
static inline vector_f64 vector_min_f64(vector_f64 a, vector_f64 b) {
    return VECTOR_MIN_F64(a, b);
}
static inline vector_f32 vector_min_f32(vector_f32 a, vector_f32 b) {
    return VECTOR_MIN_F32(a, b);
}

#define REAL double
#define NAMED(name) name##_f64
#include "e8_lines.h"
#undef REAL
#undef NAMED
#define REAL float
#define NAMED(name) name##_f32
#include "e8_lines.h"
#undef REAL
#undef NAMED

/* products[p] = 2 m g for the entry g at place p, in double, where it is exact. */
static inline void e8_products(const coli_e8_search *codebook, const float m[4], double products[COLI_E8_PLACES]) {
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        products[place] = coli_e8_reference_product(m[0], m[1], m[2], m[3], codebook->weights_f64[0][place],
                                                    codebook->weights_f64[1][place], codebook->weights_f64[2][place],
                                                    codebook->weights_f64[3][place]);
    }
}

static int e8_fit(const coli_e8_search *codebook, const float magnitudes[32], float d, uint8_t indices[8]) {
    double products[8][COLI_E8_PLACES], scales[16], errors[16] = {0};
    for (int code = 0; code < 16; code++) {
        scales[code] = coli_e8_reference_subscale(d, code);
    }
    for (int group = 0; group < 8; group++) {
        double slopes[COLI_E8_SLOTS], scores[16];
        e8_products(codebook, magnitudes + 4 * group, products[group]);
        e8_slot_maxima_f64(codebook, products[group], slopes);
        e8_lowest_f64(slopes, codebook->lengths_f64, COLI_E8_SLOTS, scales, scores);
        for (int code = 0; code < 16; code++) errors[code] += scales[code] * scores[code];
    }
    int best = 0;
    for (int code = 1; code < 16; code++) {
        if (errors[code] < errors[best]) best = code;
    }
    for (int group = 0; group < 8; group++) {
        double score;
        indices[group] = (uint8_t)e8_entry_f64(codebook, products[group], codebook->lengths_f64, scales[best], &score);
    }
    return best;
}

/*------   E8 search: entries, sub-scales and flips at once   ------*/

/* What the scores of a group of four magnitudes are made of: 2 m g with all signs as they are, and at most, over the four
 * choices, with one of them flipped. Without importance the lines of a slot are one, its maximum. */
typedef struct {
    int count; /* COLI_E8_SLOTS or COLI_E8_PLACES */
    float kept[COLI_E8_PLACES], flipped[COLI_E8_PLACES];
    float own_lengths[COLI_E8_PLACES];
    const float *lengths;
} group_lines;

/* All places: `kept`, `flipped` and `lengths` for a group. */
static void e8_place_lines(const coli_e8_search *codebook, const coli_e8_subblock *subblock, int group,
                           group_lines *lines) {
    const float *magnitudes = subblock->magnitudes + 4 * group;
    float m[4];
    for (int k = 0; k < 4; k++) m[k] = magnitudes[k] * (subblock->importance ? subblock->importance[4 * group + k] : 1.0f);
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        float x0 = m[0] * codebook->weights_f32[0][place], x1 = m[1] * codebook->weights_f32[1][place];
        float x2 = m[2] * codebook->weights_f32[2][place], x3 = m[3] * codebook->weights_f32[3][place];
        lines->kept[place] = coli_e8_kept_product(x0, x1, x2, x3);
        lines->flipped[place] = coli_e8_flipped_product(lines->kept[place], x0, x1, x2, x3);
    }
    lines->count = COLI_E8_PLACES;
    lines->lengths = codebook->lengths_f32;
    if (!subblock->importance) return;
    const float *h = subblock->importance + 4 * group;
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        float g0 = codebook->weights_f32[0][place], g1 = codebook->weights_f32[1][place];
        float g2 = codebook->weights_f32[2][place], g3 = codebook->weights_f32[3][place];
        lines->own_lengths[place] = coli_e8_weighted_length(h, g0, g1, g2, g3);
    }
    lines->lengths = lines->own_lengths;
}

/* Without importance, lengths are the same in each slot, and its maxima alone matter. */
static void e8_group_lines(const coli_e8_search *codebook, const coli_e8_subblock *subblock, int group,
                           group_lines *lines) {
    e8_place_lines(codebook, subblock, group, lines);
    if (subblock->importance) return;
    e8_slot_maxima_f32(codebook, lines->kept, lines->kept);
    e8_slot_maxima_f32(codebook, lines->flipped, lines->flipped);
    lines->count = COLI_E8_SLOTS;
}

static void e8_gains(const coli_e8_search *codebook, const coli_e8_subblock *subblock, const float *scales, int count,
                     float *gains) {
    group_lines first, second;
    for (int i = 0; i < count; i++) gains[i] = 0;
    for (int lane = 0; lane < 4; lane++) {
        e8_group_lines(codebook, subblock, 2 * lane, &first);
        e8_group_lines(codebook, subblock, 2 * lane + 1, &second);
        for (int i = 0; i < count; i += 16) {
            float a[16], b[16], a_flipped[16], b_flipped[16];
            e8_lowest_f32(first.kept, first.lengths, first.count, scales + i, a);
            e8_lowest_f32(second.kept, second.lengths, second.count, scales + i, b);
            if (!subblock->odd[lane]) {
                for (int j = 0; j < 16; j++) gains[i + j] += scales[i + j] * (a[j] + b[j]);
                continue;
            }
            e8_lowest_f32(first.flipped, first.lengths, first.count, scales + i, a_flipped);
            e8_lowest_f32(second.flipped, second.lengths, second.count, scales + i, b_flipped);
            for (int j = 0; j < 16; j++) {
                float in_first = a_flipped[j] + b[j], in_second = a[j] + b_flipped[j];
                gains[i + j] += scales[i + j] * (in_first <= in_second ? in_first : in_second);
            }
        }
    }
}

static int e8_choose(const coli_e8_search *codebook, const coli_e8_subblock *subblock, int lane, float scale,
                     uint8_t indices[2]) {
    float kept[2], flipped[2];
    int kept_entry[2], flipped_entry[2];
    for (int half = 0; half < 2; half++) {
        group_lines lines;
        e8_place_lines(codebook, subblock, 2 * lane + half, &lines);
        kept_entry[half] = e8_entry_f32(codebook, lines.kept, lines.lengths, scale, &kept[half]);
        if (subblock->odd[lane])
            flipped_entry[half] = e8_entry_f32(codebook, lines.flipped, lines.lengths, scale, &flipped[half]);
    }
    int flip = -1;
    if (subblock->odd[lane]) {
        int half = flipped[0] + kept[1] <= kept[0] + flipped[1] ? 0 : 1;
        kept_entry[half] = flipped_entry[half];
        int first = COLI_LANE * lane + 4 * half;
        flip = 4 * half + coli_e8_flip(subblock->magnitudes + first,
                                       subblock->importance ? subblock->importance + first : NULL,
                                       coli_e8_codebook() + 4 * flipped_entry[half]);
    }
    for (int half = 0; half < 2; half++) indices[half] = (uint8_t)kept_entry[half];
    return flip;
}

static void add_products(float *restrict y, int columns, const float *restrict x, int count, const float *restrict w,
                         size_t stride) {
    for (int k = 0; k < count; k++) {
        const float *row = w + (size_t)k * stride;
        COLI_SIMD()
        for (int j = 0; j < columns; j++) y[j] += x[k] * row[j];
    }
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
    .e8_fit = e8_fit,
    .e8_gains = e8_gains,
    .e8_choose = e8_choose,
    .add_products = add_products,
};
