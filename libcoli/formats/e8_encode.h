/* e8_encode.h - the arithmetic of the E8 encoder: what CPUs and GPUs must round alike, so that they choose the same bytes.
 *
 * Code that calls this is compiled without fusing products and sums. Importance weighs the squared errors: 1 where all
 * weights count alike. */
#ifndef COLI_FORMATS_E8_ENCODE_H
#define COLI_FORMATS_E8_ENCODE_H

#include <math.h>

#include "e8.h"

#define COLI_E8_CODES 16
#define COLI_E8_LANES (COLI_E8_SUBBLOCK / COLI_LANE)

/*------   The bytes   ------*/

COLI_FN void coli_e8_store_word(uint8_t block[COLI_E8_BLOCK_BYTES], int subblock, uint32_t word) {
    for (int i = 0; i < 4; i++) block[COLI_E8_WORDS_OFFSET + 4 * subblock + i] = (uint8_t)(word >> 8 * i);
}
COLI_FN void coli_e8_store_scale(uint8_t block[COLI_E8_BLOCK_BYTES], uint32_t d_bits) {
    block[COLI_E8_SCALE_OFFSET] = (uint8_t)d_bits;
    block[COLI_E8_SCALE_OFFSET + 1] = (uint8_t)(d_bits >> 8);
}

/* What lane 0 ... 31 of a super-block decodes to. */
COLI_FN void coli_e8_decode_lane(const uint8_t block[COLI_E8_BLOCK_BYTES], int lane,
                                 const uint8_t codebook[COLI_E8_CODEBOOK_BYTES], float w[COLI_LANE]) {
    uint32_t d_bits = coli_load_u16(block + COLI_E8_SCALE_OFFSET);
    uint32_t word = coli_load_u32(block + COLI_E8_WORDS_OFFSET + lane / COLI_E8_LANES * 4);
    coli_e8_lane(codebook + 4 * block[2 * lane], codebook + 4 * block[2 * lane + 1],
                 coli_e8_signs(word, lane % COLI_E8_LANES), coli_e8_subscale(d_bits, word), w);
}

/*------   Signs   ------*/

/* Bit j is set where weight j of a lane is negative; and whether that is an odd number of them. */
COLI_FN uint32_t coli_e8_sign_bits(const float w[COLI_LANE]) {
    uint32_t signs = 0;
    for (int j = 0; j < COLI_LANE; j++) signs |= (uint32_t)(w[j] < 0) << j;
    return signs;
}
COLI_FN int coli_e8_is_odd(uint32_t signs) {
    signs ^= signs >> 4;
    signs ^= signs >> 2;
    return (int)((signs ^ signs >> 1) & 1u);
}

/* The reference rule, seven sign bits of a lane. A lane must have an even number of negatives: where it has not, the
 * smallest magnitude, the first of equals, takes the other sign. */
COLI_FN uint32_t coli_e8_reference_signs(const float w[COLI_LANE]) {
    uint32_t signs = coli_e8_sign_bits(w);
    int smallest = 0;
    for (int j = 1; j < COLI_LANE; j++) {
        if (fabsf(w[j]) < fabsf(w[smallest])) smallest = j;
    }
    signs ^= (uint32_t)coli_e8_is_odd(signs) << smallest;
    return signs & 127u;
}

/* The search: which of four weights, whose entry is chosen, takes the other sign at the smallest cost. */
COLI_FN int coli_e8_flip(const float magnitudes[4], const float *importance, const uint8_t entry[4]) {
    float lowest = HUGE_VALF;
    int flip = 0;
    for (int k = 0; k < 4; k++) {
        float cost = magnitudes[k] * (importance ? importance[k] : 1.0f) * (float)entry[k];
        if (cost < lowest) {
            lowest = cost;
            flip = k;
        }
    }
    return flip;
}

/*------   Scales   ------*/

/* fp16 bits of a number from 0 on, to the nearest even, rounded once; the largest finite ones above that. Converting to the
 * nearest float32 first would round twice; instead the float32 is cut off, with its lowest bit set as a mark that something
 * was, which decides ties. Sub-scales reach further than the super-scale, so the largest will do. */
COLI_FN uint32_t coli_double_to_f16(double value) {
    float nearest = (float)value;
    uint32_t bits = coli_f32_to_bits(nearest);
    if ((double)nearest > value) bits--;
    if ((double)nearest != value) bits |= 1;
    bits = coli_f32_to_f16(coli_bits_to_f32(bits));
    return bits < 0x7bffu ? bits : 0x7bffu;
}

/* The reference rule: super-scale d = RMS / 20, and sub-scales that are never 0. `squares` is the sum over the
 * super-block, first weight first. */
COLI_FN uint32_t coli_e8_reference_scale(double squares) {
    return coli_double_to_f16(sqrt(squares / COLI_E8_BLOCK) / 20 + 1e-12);
}
COLI_FN double coli_e8_reference_subscale(float d, int code) {
    double scale = d * (0.5 + code) * 0.5;
    return scale < 1e-20 ? 1e-20 : scale;
}

/* The search tries these super-scales, in relation to the RMS of the super-block's largest sub-block: from 1/100, under
 * which Gaussian weights use the largest codes, to 1/28, which leaves room for outliers, in steps of the ninth root. */
#define COLI_E8_SEARCH_TRIALS 10
#define COLI_E8_SEARCH_STEP 1.15193211276512
COLI_FN uint32_t coli_e8_search_scale(double rms, int trial) {
    double ratio = 1.0 / 100;
    for (int i = 0; i < trial; i++) ratio *= COLI_E8_SEARCH_STEP;
    return coli_double_to_f16(rms * ratio);
}

/* The super-scale that fits the entries, signs and codes of a super-block best, by least squares: `product` is the sum of
 * importance * decoded * weight, `square` that of importance * decoded^2. */
COLI_FN uint32_t coli_e8_fitted_scale(double product, double square, uint32_t d_bits) {
    double d = coli_f16_to_f32(d_bits);
    return coli_double_to_f16(product > 0 && square > 0 ? d * (product / square) : d);
}

/*------   The search works in units: magnitudes from 0 to 1   ------*/

/* The power of two that `largest` asks for; 1 for 0. */
COLI_FN double coli_power_of_two_above(float largest) {
    double wide = largest; /* where no float32 is subnormal */
    uint64_t bits;
    memcpy(&bits, &wide, sizeof bits);
    bits = largest > 0 ? ((bits >> 52) + 1) << 52 : (uint64_t)1023 << 52;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
COLI_FN float coli_e8_magnitude(float w, double unit) {
    return (float)(fabsf(w) * (1 / unit));
}
/* The super-scale of those bits in a unit. */
COLI_FN float coli_e8_unit_scale(uint32_t d_bits, double unit) {
    return (float)(coli_f16_to_f32(d_bits) / unit);
}

/*------   Scores   ------*/

/* The squared error of four magnitudes m as the entry g under the scale s is |m|^2 + s (s |g|^2 - 2 m g). The bracket is
 * the entry's score, a line over the scale. With importance h, its length |g|^2 is the sum of h g^2 and its product 2 m g
 * that of 2 h m g. Weights of entries are in units of half a codebook byte. */
COLI_FN double coli_e8_reference_product(double m0, double m1, double m2, double m3, double g0, double g1, double g2,
                                         double g3) {
    return 2 * (m0 * g0 + m1 * g1 + m2 * g2 + m3 * g3);
}
/* From the products x = h m g: with all signs as they are, and at most, over the four choices, with one of them flipped. */
COLI_FN float coli_e8_kept_product(float x0, float x1, float x2, float x3) {
    return 2.0f * (x0 + x1 + x2 + x3);
}
COLI_FN float coli_e8_flipped_product(float kept, float x0, float x1, float x2, float x3) {
    float low01 = x0 < x1 ? x0 : x1, low23 = x2 < x3 ? x2 : x3;
    return kept - 4.0f * (low01 < low23 ? low01 : low23);
}
COLI_FN float coli_e8_weighted_length(const float h[4], float g0, float g1, float g2, float g3) {
    return h[0] * (g0 * g0) + h[1] * (g1 * g1) + h[2] * (g2 * g2) + h[3] * (g3 * g3);
}

/* What a weight adds to the squared error. */
COLI_FN double coli_e8_error(float w, float decoded, float importance) {
    double difference = (double)w - decoded;
    return importance * (difference * difference);
}

#endif
