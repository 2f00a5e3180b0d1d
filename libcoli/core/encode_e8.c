/* encode_e8.c - E8: the reference rule, and the way of rows through super-blocks. The reference takes the super-scale from
 * the block's RMS, then for each sub-block the sub-scale code and the codebook entries with the smallest squared error. */
#include <math.h>
#include <string.h>

#include "encode_e8.h"
#include "kernels.h"
#include "tables.h"

/* fp16 bits of d = RMS / 20. */
static uint32_t super_scale(const float block[COLI_E8_BLOCK]) {
    double squares = 0;
    for (int i = 0; i < COLI_E8_BLOCK; i++) squares += (double)block[i] * block[i];
    return coli_e8_reference_scale(squares);
}

void coli_e8_reference_block(const float w[COLI_E8_BLOCK], uint8_t block[COLI_E8_BLOCK_BYTES]) {
    const coli_kernels *kernels = coli_kernels_current();
    float magnitudes[COLI_E8_BLOCK];
    uint32_t d_bits = super_scale(w);
    for (int i = 0; i < COLI_E8_BLOCK; i++) magnitudes[i] = fabsf(w[i]);
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        int code = kernels->e8_fit(coli_e8_search_table(), magnitudes + COLI_E8_SUBBLOCK * b, coli_f16_to_f32(d_bits),
                                   block + COLI_E8_INDICES / COLI_E8_SUBBLOCKS * b);
        uint32_t word = (uint32_t)code << 28;
        for (int l = 0; l < COLI_E8_LANES; l++)
            word |= coli_e8_reference_signs(w + COLI_E8_SUBBLOCK * b + COLI_LANE * l) << 7 * l;
        coli_e8_store_word(block, b, word);
    }
    coli_e8_store_scale(block, d_bits);
}

void coli_e8_decode_block(const uint8_t block[COLI_E8_BLOCK_BYTES], float w[COLI_E8_BLOCK]) {
    for (int lane = 0; lane < COLI_E8_BLOCK / COLI_LANE; lane++)
        coli_e8_decode_lane(block, lane, coli_e8_codebook(), w + COLI_LANE * lane);
}

static void encode_block(const coli_encoding *encoding, const float w[COLI_E8_BLOCK], const float *importance,
                         uint8_t block[COLI_E8_BLOCK_BYTES]) {
    if (encoding->e8->quality == COLI_E8_REFERENCE) {
        coli_e8_reference_block(w, block);
    } else {
        coli_e8_search_block(w, importance, block);
    }
}

void coli_encode_e8_row(const coli_encoding *encoding, int row) {
    int columns = encoding->columns;
    const float *w = encoding->w + (size_t)row * (size_t)columns, *importance = encoding->e8->importance;
    uint8_t *bytes = encoding->weights + (size_t)row * coli_e8_row_bytes(columns);
    for (int start = 0; start < columns; start += COLI_E8_BLOCK, bytes += COLI_E8_BLOCK_BYTES) {
        size_t left = (size_t)(columns - start);
        if (left >= COLI_E8_BLOCK) {
            encode_block(encoding, w + start, importance ? importance + start : NULL, bytes);
        } else { /* what stands for columns that do not exist weighs nothing */
            float padded[COLI_E8_BLOCK] = {0}, padded_importance[COLI_E8_BLOCK] = {0};
            memcpy(padded, w + start, left * sizeof(float));
            for (size_t i = 0; i < left; i++) padded_importance[i] = importance ? importance[(size_t)start + i] : 1;
            encode_block(encoding, padded, padded_importance, bytes);
        }
    }
}
