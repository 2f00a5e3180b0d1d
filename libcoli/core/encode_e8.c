/* encode_e8.c - the reference rule for E8: super-scale from the block's RMS, then for each sub-block the sub-scale code and
 * the codebook entries with the smallest squared error. */
#include <math.h>
#include <string.h>

#include "../formats/e8.h"
#include "encode.h"
#include "kernels.h"
#include "tables.h"

#define LANES_A_WORD (COLI_E8_SUBBLOCK / COLI_LANE)

/* fp16 bits of a positive number, to the nearest even, rounded once. Converting to the nearest float32 first would round
 * twice; instead the float32 is cut off, with its lowest bit set as a mark that something was, which decides ties. */
static uint32_t double_to_f16(double value) {
    float nearest = (float)value;
    uint32_t bits = coli_f32_to_bits(nearest);
    if ((double)nearest > value) bits--;
    if ((double)nearest != value) bits |= 1;
    return coli_f32_to_f16(coli_bits_to_f32(bits));
}

/* fp16 bits of d = RMS / 20. Where that is more than fp16 holds, the largest finite d: sub-scales reach further. */
static uint32_t super_scale(const float block[COLI_E8_BLOCK]) {
    double squares = 0;
    for (int i = 0; i < COLI_E8_BLOCK; i++) squares += (double)block[i] * block[i];
    uint32_t bits = double_to_f16(sqrt(squares / COLI_E8_BLOCK) / 20 + 1e-12);
    return bits < 0x7bffu ? bits : 0x7bffu;
}

/* Seven sign bits of a lane. A lane must have an even number of negatives: where it has not, the smallest magnitude, the
 * first of equals, takes the other sign. */
static uint32_t lane_signs(const float w[COLI_LANE]) {
    uint32_t signs = 0, parity = 0;
    int smallest = 0;
    for (int j = 0; j < COLI_LANE; j++) {
        uint32_t negative = w[j] < 0;
        signs |= negative << j;
        parity ^= negative;
        if (fabsf(w[j]) < fabsf(w[smallest])) smallest = j;
    }
    signs ^= parity << smallest;
    return signs & 127u;
}

static void store_u32(uint8_t *p, uint32_t value) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(value >> 8 * i);
}

static void encode_block(const float w[COLI_E8_BLOCK], uint8_t block[COLI_E8_BLOCK_BYTES]) {
    const coli_kernels *kernels = coli_kernels_current();
    float magnitudes[COLI_E8_BLOCK];
    uint32_t d_bits = super_scale(w);
    for (int i = 0; i < COLI_E8_BLOCK; i++) magnitudes[i] = fabsf(w[i]);
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        int code = kernels->e8_fit(coli_e8_search_table(), magnitudes + COLI_E8_SUBBLOCK * b, coli_f16_to_f32(d_bits),
                                   block + COLI_E8_INDICES / COLI_E8_SUBBLOCKS * b);
        uint32_t word = (uint32_t)code << 28;
        for (int l = 0; l < LANES_A_WORD; l++) word |= lane_signs(w + COLI_E8_SUBBLOCK * b + COLI_LANE * l) << 7 * l;
        store_u32(block + COLI_E8_WORDS_OFFSET + 4 * b, word);
    }
    block[COLI_E8_SCALE_OFFSET] = (uint8_t)d_bits;
    block[COLI_E8_SCALE_OFFSET + 1] = (uint8_t)(d_bits >> 8);
}

void coli_encode_e8_row(const coli_encoding *encoding, int row) {
    int columns = encoding->columns;
    const float *w = encoding->w + (size_t)row * (size_t)columns;
    uint8_t *bytes = encoding->weights + (size_t)row * coli_e8_row_bytes(columns);
    for (int b = 0; b < columns / COLI_E8_BLOCK; b++) {
        encode_block(w + (size_t)b * COLI_E8_BLOCK, bytes + (size_t)b * COLI_E8_BLOCK_BYTES);
    }
    int rest = columns % COLI_E8_BLOCK;
    if (rest) {
        float padded[COLI_E8_BLOCK] = {0};
        memcpy(padded, w + (columns - rest), (size_t)rest * sizeof(float));
        encode_block(padded, bytes + (size_t)(columns / COLI_E8_BLOCK) * COLI_E8_BLOCK_BYTES);
    }
}
