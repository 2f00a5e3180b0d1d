/* encode_e8.h - what the three qualities of the E8 encoder share. */
#ifndef COLI_CORE_ENCODE_E8_H
#define COLI_CORE_ENCODE_E8_H

#include "../formats/e8.h"
#include "encode.h"
#include "kernels.h"

#define COLI_E8_CODES 16
#define COLI_E8_LANES (COLI_E8_SUBBLOCK / COLI_LANE)

/* Each writes one super-block of finite weights w. */
void coli_e8_reference_block(const float w[COLI_E8_BLOCK], uint8_t block[COLI_E8_BLOCK_BYTES]);
/* `importance` [256] weighs the squared errors, NULL: all alike. Never worse than the reference rule by that measure. */
void coli_e8_search_block(const float w[COLI_E8_BLOCK], const float *importance, uint8_t block[COLI_E8_BLOCK_BYTES]);

/* What a super-block decodes to. */
void coli_e8_decode_block(const uint8_t block[COLI_E8_BLOCK_BYTES], float w[COLI_E8_BLOCK]);

/* fp16 bits of a number from 0 on, to the nearest even, rounded once; the largest finite ones above that. */
uint32_t coli_double_to_f16(double value);

/* Bit j is set where weight j of a lane is negative; and whether that is an odd number of them. */
static inline uint32_t coli_e8_sign_bits(const float w[COLI_LANE]) {
    uint32_t signs = 0;
    for (int j = 0; j < COLI_LANE; j++) signs |= (uint32_t)(w[j] < 0) << j;
    return signs;
}
static inline int coli_e8_is_odd(uint32_t signs) {
    signs ^= signs >> 4;
    signs ^= signs >> 2;
    return (int)((signs ^ signs >> 1) & 1u);
}
static inline void coli_e8_store_word(uint8_t block[COLI_E8_BLOCK_BYTES], int subblock, uint32_t word) {
    for (int i = 0; i < 4; i++) block[COLI_E8_WORDS_OFFSET + 4 * subblock + i] = (uint8_t)(word >> 8 * i);
}
static inline void coli_e8_store_scale(uint8_t block[COLI_E8_BLOCK_BYTES], uint32_t d_bits) {
    block[COLI_E8_SCALE_OFFSET] = (uint8_t)d_bits;
    block[COLI_E8_SCALE_OFFSET + 1] = (uint8_t)(d_bits >> 8);
}

/*------   Parts of the search   ------*/

/* A super-block to search scales for; `subblocks` may point into `importance`, so it does not move. */
typedef struct coli_e8_problem {
    coli_e8_subblock subblocks[COLI_E8_SUBBLOCKS];
    float importance[COLI_E8_BLOCK]; /* at most 1 */
    double unit;                     /* a weight is magnitude * unit */
} coli_e8_problem;

/* A choice of scales, and how it changes the squared error of zeros, in units. */
typedef struct coli_e8_scales {
    double gain;
    uint32_t d_bits;
    uint8_t codes[COLI_E8_SUBBLOCKS];
} coli_e8_scales;

/* For magnitudes from 0 to 1: the unit that `largest` asks for. */
static inline double coli_power_of_two_above(double largest) {
    int exponent;
    frexp(largest, &exponent);
    return ldexp(1, exponent);
}

void coli_e8_set_problem(coli_e8_problem *problem, const float w[COLI_E8_BLOCK], const float *importance, double unit);
void coli_e8_set_lane(coli_e8_subblock *subblock, int lane, const float w[COLI_LANE], double unit);
/* The best scales; 0 where zeros are better than anything. */
int coli_e8_search_scales(const coli_e8_problem *problem, coli_e8_scales *best);
/* The super-scale of those bits in a unit. */
float coli_e8_unit_scale(uint32_t d_bits, double unit);
/* The best sub-scale code under super-scale d. */
int coli_e8_best_code(const coli_e8_subblock *subblock, float d);
/* The best entries of a lane under a sub-scale, and its eight sign bits. */
uint32_t coli_e8_choose_lane(const coli_e8_subblock *subblock, int lane, const float w[COLI_LANE], float scale,
                             uint8_t indices[2]);

#endif
