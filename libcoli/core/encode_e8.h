/* encode_e8.h - what the three qualities of the E8 encoder share. */
#ifndef COLI_CORE_ENCODE_E8_H
#define COLI_CORE_ENCODE_E8_H

#include "../formats/e8_encode.h"
#include "encode.h"
#include "kernels.h"

/* Each writes one super-block of finite weights w. */
void coli_e8_reference_block(const float w[COLI_E8_BLOCK], uint8_t block[COLI_E8_BLOCK_BYTES]);
/* `importance` [256] weighs the squared errors, NULL: all alike. Never worse than the reference rule by that measure. */
void coli_e8_search_block(const float w[COLI_E8_BLOCK], const float *importance, uint8_t block[COLI_E8_BLOCK_BYTES]);

/* What a super-block decodes to. */
void coli_e8_decode_block(const uint8_t block[COLI_E8_BLOCK_BYTES], float w[COLI_E8_BLOCK]);

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

void coli_e8_set_problem(coli_e8_problem *problem, const float w[COLI_E8_BLOCK], const float *importance, double unit);
void coli_e8_set_lane(coli_e8_subblock *subblock, int lane, const float w[COLI_LANE], double unit);
/* The best scales; 0 where zeros are better than anything. */
int coli_e8_search_scales(const coli_e8_problem *problem, coli_e8_scales *best);
/* The best sub-scale code under super-scale d. */
int coli_e8_best_code(const coli_e8_subblock *subblock, float d);
/* The best entries of a lane under a sub-scale, and its eight sign bits. */
uint32_t coli_e8_choose_lane(const coli_e8_subblock *subblock, int lane, const float w[COLI_LANE], float scale,
                             uint8_t indices[2]);

#endif
