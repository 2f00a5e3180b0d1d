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

/* Vectors of the instruction set; arithmetic operators work on them, the minimum does not. Loose ones are floats in memory,
 * of any alignment. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define VECTOR_MIN(a, b) _mm512_min_ps(a, b)
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define VECTOR_MIN(a, b) _mm256_min_ps(a, b)
#else
#define VECTOR_BYTES 16
#define VECTOR_MIN(a, b)                                                                                                   \
    ((vector)(((vector_bits)((a) < (b)) & (vector_bits)(a)) | (~(vector_bits)((a) < (b)) & (vector_bits)(b))))
typedef int32_t vector_bits __attribute__((vector_size(VECTOR_BYTES)));
#endif
typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
typedef float loose_vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
static inline vector vector_min(vector a, vector b) {
    return VECTOR_MIN(a, b);
}

static inline loose_vector *vectors(float *floats) {
    return (loose_vector *)floats;
}
static inline const loose_vector *const_vectors(const float *floats) {
    return (const loose_vector *)floats;
}

#include "e8_lines.h"

/*------   E8 reference: what float32 leaves open is decided exactly   ------*/

/* In double, products of float32 magnitudes and weights are exact and scores nearly so; ties between entries and between
 * codes are recognised as ties, which the reference rule needs. That is slow, so float32 comes first, in units in which
 * magnitudes and sub-scales are at most 1, and everything within its error of the best is looked at again.
 *
 * The error of a score, s * length - product, is below 16 * 2^-24 of both terms together: four roundings of the product,
 * two of s * length, one of the difference, and what adding up eight of them does. 3844 is the largest length and 62 twice
 * the largest weight. The constant is for what underflows. */
#define E8_ROUNDING (16 * 0x1p-24f)
static inline float e8_score_error(float scale, float magnitudes) {
    return E8_ROUNDING * (3844 * scale + 62 * magnitudes) + 1e-30f;
}

typedef struct {
    const float *magnitudes; /* [32] */
    float inverse_unit;      /* a power of two */
    float sums[8];           /* of the groups' magnitudes, in units */
    float maxima[8][COLI_E8_SLOTS];
} fitted_subblock;

static void e8_approximate(const coli_e8_search *codebook, const float magnitudes[4], float inverse_unit, float *sum,
                           float maxima[COLI_E8_SLOTS]) {
    float products[COLI_E8_PLACES], m[4];
    *sum = 0;
    for (int k = 0; k < 4; k++) {
        m[k] = magnitudes[k] * inverse_unit;
        *sum += m[k];
        m[k] *= 2;
    }
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        float product = m[0] * codebook->weights[0][place];
        product = MULTIPLY_ADD(m[1], codebook->weights[1][place], product);
        product = MULTIPLY_ADD(m[2], codebook->weights[2][place], product);
        products[place] = MULTIPLY_ADD(m[3], codebook->weights[3][place], product);
    }
    e8_slot_maxima(codebook, products, maxima);
}

/* The nearest entry of a group under a scale, the lowest of equals, and its exact score. */
static int e8_nearest(const coli_e8_search *codebook, const fitted_subblock *subblock, int group, double scale,
                      double *lowest) {
    const float *m = subblock->magnitudes + 4 * group;
    float scores[COLI_E8_SLOTS], in_units = (float)(scale * subblock->inverse_unit);
    float margin = 2 * e8_score_error(in_units, subblock->sums[group]);
    int first, last, nearest = 0;
    float limit = margin + e8_lowest_slots(codebook, subblock->maxima[group], in_units, margin, scores, &first, &last);
    *lowest = HUGE_VAL;
    for (int slot = first; slot <= last; slot++) {
        if (scores[slot] > limit) continue;
        for (int r = 0, place = slot; r < COLI_E8_ROUNDS && slot < codebook->round_slots[r];
             place += codebook->round_slots[r++]) {
            double product =
                coli_e8_reference_product(m[0], m[1], m[2], m[3], codebook->weights[0][place], codebook->weights[1][place],
                                          codebook->weights[2][place], codebook->weights[3][place]);
            double score = scale * codebook->lengths[place] - product;
            if (score < *lowest || (score == *lowest && codebook->entries[place] < nearest)) {
                *lowest = score;
                nearest = codebook->entries[place];
            }
        }
    }
    return nearest;
}

/* Approximate squared errors under 16 scales, less those of zeros, in units. */
static void e8_approximate_errors(const coli_e8_search *codebook, const fitted_subblock *subblock, const float scales[16],
                                  float errors[16]) {
    float scores[16];
    for (int code = 0; code < 16; code++) errors[code] = 0;
    for (int group = 0; group < 8; group++) {
        e8_lowest(subblock->maxima[group], codebook->lengths, COLI_E8_SLOTS, scales, scores);
        for (int code = 0; code < 16; code++) errors[code] += scales[code] * scores[code];
    }
}

static void e8_set_fitted(const coli_e8_search *codebook, const float magnitudes[32], double largest_scale,
                          fitted_subblock *subblock) {
    float largest = (float)largest_scale;
    for (int i = 0; i < 32; i++) largest = magnitudes[i] > largest ? magnitudes[i] : largest;
    subblock->magnitudes = magnitudes;
    subblock->inverse_unit = (float)(1 / coli_power_of_two_above(largest));
    for (int group = 0; group < 8; group++)
        e8_approximate(codebook, magnitudes + 4 * group, subblock->inverse_unit, &subblock->sums[group],
                       subblock->maxima[group]);
}

/* Bits of the codes whose errors may be the lowest. */
static unsigned e8_possible_codes(const coli_e8_search *codebook, const fitted_subblock *subblock,
                                  const double scales[16]) {
    float in_units[16], errors[16], margins[16], sum = 0, limit = HUGE_VALF;
    unsigned possible = 0;
    for (int code = 0; code < 16; code++) in_units[code] = (float)(scales[code] * subblock->inverse_unit);
    for (int group = 0; group < 8; group++) sum += subblock->sums[group];
    e8_approximate_errors(codebook, subblock, in_units, errors);
    for (int code = 0; code < 16; code++) {
        margins[code] = in_units[code] * e8_score_error(8 * in_units[code], sum) + 1e-30f;
        limit = fminf(limit, errors[code] + margins[code]);
    }
    for (int code = 0; code < 16; code++) possible |= (unsigned)(errors[code] - margins[code] <= limit) << code;
    return possible;
}

static int e8_fit(const coli_e8_search *codebook, const float magnitudes[32], float d, uint8_t indices[8]) {
    fitted_subblock subblock;
    double scales[16], lowest = HUGE_VAL;
    int best = 0;
    for (int code = 0; code < 16; code++) {
        scales[code] = coli_e8_reference_subscale(d, code);
    }
    e8_set_fitted(codebook, magnitudes, scales[15], &subblock);
    unsigned possible = e8_possible_codes(codebook, &subblock, scales);
    for (int code = 0; code < 16; code++) {
        if (!(possible >> code & 1u)) continue;
        uint8_t found[8];
        double error = 0, score;
        for (int group = 0; group < 8; group++) {
            found[group] = (uint8_t)e8_nearest(codebook, &subblock, group, scales[code], &score);
            error += scales[code] * score;
        }
        if (error < lowest) {
            lowest = error;
            best = code;
            memcpy(indices, found, sizeof found);
        }
    }
    return best;
}

/*------   E8 search: entries, sub-scales and flips at once   ------*/

/* What the scores of a group of four magnitudes are made of, with all signs as they are or one of them flipped. */
typedef struct {
    float products[COLI_E8_PLACES]; /* 2 m g; with a flip the largest of the four */
    float maxima[COLI_E8_SLOTS];    /* of the slots, which matter where lengths are the codebook's */
} group_choice;

typedef struct {
    int weighted; /* whether lengths are the group's own, by its importance */
    float lengths[COLI_E8_PLACES];
    group_choice kept, flipped;
} group_lines;

static inline void e8_weighted_lengths(const coli_e8_search *codebook, const float h[4], float lengths[COLI_E8_PLACES]) {
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        float g0 = codebook->weights[0][place], g1 = codebook->weights[1][place];
        float g2 = codebook->weights[2][place], g3 = codebook->weights[3][place];
        lengths[place] = coli_e8_weighted_length(h, g0, g1, g2, g3);
    }
}

/* The maxima of the flipped choice are set for odd lanes alone, which use it. */
static void e8_group_lines(const coli_e8_search *codebook, const coli_e8_subblock *subblock, int group, int odd,
                           group_lines *lines) {
    const float *magnitudes = subblock->magnitudes + 4 * group;
    float m[4];
    for (int k = 0; k < 4; k++) m[k] = magnitudes[k] * (subblock->importance ? subblock->importance[4 * group + k] : 1.0f);
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        float x0 = m[0] * codebook->weights[0][place], x1 = m[1] * codebook->weights[1][place];
        float x2 = m[2] * codebook->weights[2][place], x3 = m[3] * codebook->weights[3][place];
        lines->kept.products[place] = coli_e8_kept_product(x0, x1, x2, x3);
        lines->flipped.products[place] = coli_e8_flipped_product(lines->kept.products[place], x0, x1, x2, x3);
    }
    lines->weighted = subblock->importance != NULL;
    if (lines->weighted) {
        e8_weighted_lengths(codebook, subblock->importance + 4 * group, lines->lengths);
    } else {
        e8_slot_maxima(codebook, lines->kept.products, lines->kept.maxima);
        if (odd) e8_slot_maxima(codebook, lines->flipped.products, lines->flipped.maxima);
    }
}

/* The lowest score under each of the scales. */
static void e8_lowest_scores(const coli_e8_search *codebook, const group_lines *lines, const group_choice *choice,
                             const float *scales, int count, float *scores) {
    float needed[COLI_E8_SLOTS], needed_lengths[COLI_E8_SLOTS];
    const float *products = choice->products, *lengths = lines->lengths;
    int line_count = COLI_E8_PLACES;
    if (!lines->weighted) {
        line_count = e8_needed_lines(codebook, choice->maxima, needed, needed_lengths);
        products = needed;
        lengths = needed_lengths;
    }
    for (int i = 0; i < count; i += 16) e8_lowest(products, lengths, line_count, scales + i, scores + i);
}

static void e8_gains(const coli_e8_search *codebook, const coli_e8_subblock *subblock, const float *scales, int count,
                     float *gains) {
    group_lines first, second;
    float a[COLI_E8_TRIALS], b[COLI_E8_TRIALS], a_flipped[COLI_E8_TRIALS], b_flipped[COLI_E8_TRIALS];
    for (int i = 0; i < count; i++) gains[i] = 0;
    for (int lane = 0; lane < 4; lane++) {
        int odd = subblock->odd[lane];
        e8_group_lines(codebook, subblock, 2 * lane, odd, &first);
        e8_group_lines(codebook, subblock, 2 * lane + 1, odd, &second);
        e8_lowest_scores(codebook, &first, &first.kept, scales, count, a);
        e8_lowest_scores(codebook, &second, &second.kept, scales, count, b);
        if (!odd) {
            for (int i = 0; i < count; i++) gains[i] += scales[i] * (a[i] + b[i]);
            continue;
        }
        e8_lowest_scores(codebook, &first, &first.flipped, scales, count, a_flipped);
        e8_lowest_scores(codebook, &second, &second.flipped, scales, count, b_flipped);
        for (int i = 0; i < count; i++) {
            float in_first = a_flipped[i] + b[i], in_second = a[i] + b_flipped[i];
            gains[i] += scales[i] * (in_first <= in_second ? in_first : in_second);
        }
    }
}

/* The entry with the lowest score, the lowest of equals, where lengths are the codebook's. */
static int e8_entry_by_slots(const coli_e8_search *codebook, const group_choice *choice, float scale, float *lowest) {
    float scores[COLI_E8_SLOTS];
    int first, last, entry = 256;
    *lowest = e8_lowest_slots(codebook, choice->maxima, scale, 0, scores, &first, &last);
    for (int slot = first; slot <= last; slot++) { /* nearly always one */
        for (int r = 0, place = slot; r < COLI_E8_ROUNDS && slot < codebook->round_slots[r];
             place += codebook->round_slots[r++]) {
            float score = scale * codebook->lengths[place] - choice->products[place];
            if (score == *lowest && codebook->entries[place] < entry) entry = codebook->entries[place];
        }
    }
    return entry < 256 ? entry : 0; /* there is none when all scores are NaN */
}

/* The entry with the lowest of scores, the lowest of equals; there is none when all are NaN. */
static inline int e8_lowest_entry(const coli_e8_search *codebook, const float scores[COLI_E8_PLACES], float *lowest) {
    float low = HUGE_VALF;
    int entry = 256;
    COLI_SIMD(reduction(min : low))
    for (int place = 0; place < COLI_E8_PLACES; place++) low = scores[place] < low ? scores[place] : low;
    COLI_SIMD(reduction(min : entry))
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        int candidate = scores[place] == low ? codebook->entries[place] : 256;
        entry = candidate < entry ? candidate : entry;
    }
    *lowest = low;
    return entry < 256 ? entry : 0;
}

/* The same whatever the lengths are. */
static int e8_entry(const coli_e8_search *codebook, const group_lines *lines, const group_choice *choice, float scale,
                    float *lowest) {
    if (!lines->weighted) return e8_entry_by_slots(codebook, choice, scale, lowest);
    float scores[COLI_E8_PLACES];
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++)
        scores[place] = scale * lines->lengths[place] - choice->products[place];
    return e8_lowest_entry(codebook, scores, lowest);
}

static int e8_choose(const coli_e8_search *codebook, const coli_e8_subblock *subblock, int lane, float scale,
                     uint8_t indices[2]) {
    float kept[2], flipped[2];
    int kept_entry[2], flipped_entry[2], odd = subblock->odd[lane];
    for (int half = 0; half < 2; half++) {
        group_lines lines;
        e8_group_lines(codebook, subblock, 2 * lane + half, odd, &lines);
        kept_entry[half] = e8_entry(codebook, &lines, &lines.kept, scale, &kept[half]);
        if (odd) flipped_entry[half] = e8_entry(codebook, &lines, &lines.flipped, scale, &flipped[half]);
    }
    int flip = -1;
    if (odd) {
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

static int e8_lowest_quadratic(const coli_e8_search *codebook, const float linear[4], const float quadratic[4][4],
                               float *lowest) {
    float scores[COLI_E8_PLACES];
    COLI_SIMD()
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        float g0 = codebook->weights[0][place], g1 = codebook->weights[1][place];
        float g2 = codebook->weights[2][place], g3 = codebook->weights[3][place];
        float by0 = linear[0] + quadratic[0][0] * g0 + quadratic[0][1] * g1 + quadratic[0][2] * g2 + quadratic[0][3] * g3;
        float by1 = linear[1] + quadratic[1][1] * g1 + quadratic[1][2] * g2 + quadratic[1][3] * g3;
        float by2 = linear[2] + quadratic[2][2] * g2 + quadratic[2][3] * g3;
        float by3 = linear[3] + quadratic[3][3] * g3;
        scores[place] = g0 * by0 + g1 * by1 + g2 * by2 + g3 * by3;
    }
    return e8_lowest_entry(codebook, scores, lowest);
}

/* Sums of some vectors of columns stay in registers for all rows of w. */
static inline __attribute__((always_inline)) void add_products_in(int count_of_vectors, float *y, const float *x, int count,
                                                                  const float *w, size_t stride) {
    vector sums[8];
    for (int v = 0; v < count_of_vectors; v++) sums[v] = const_vectors(y)[v];
    for (int k = 0; k < count; k++) {
        const loose_vector *row = const_vectors(w + (size_t)k * stride);
        for (int v = 0; v < count_of_vectors; v++) sums[v] += x[k] * row[v];
    }
    for (int v = 0; v < count_of_vectors; v++) vectors(y)[v] = sums[v];
}

static void add_products(float *y, int columns, const float *x, int count, const float *w, size_t stride) {
    enum { LANE = VECTOR_BYTES / sizeof(float) };
    int start = 0;
    for (; start + 8 * LANE <= columns; start += 8 * LANE) add_products_in(8, y + start, x, count, w + start, stride);
    for (; start + 4 * LANE <= columns; start += 4 * LANE) add_products_in(4, y + start, x, count, w + start, stride);
    for (; start + 2 * LANE <= columns; start += 2 * LANE) add_products_in(2, y + start, x, count, w + start, stride);
    for (; start + LANE <= columns; start += LANE) add_products_in(1, y + start, x, count, w + start, stride);
    for (; start < columns; start++) {
        float sum = y[start];
        for (int k = 0; k < count; k++) sum += x[k] * w[(size_t)k * stride + (size_t)start];
        y[start] = sum;
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
    .e8_lowest_quadratic = e8_lowest_quadratic,
    .add_products = add_products,
};
