/* e8.h - "e8": 3.0625 bits a weight from a codebook of 256 E8-lattice quadruples (ggml's iq3_xxs grid).
 *
 * A row is ceil(I / 256) super-blocks of 98 bytes; the last one may be partial. A super-block of 256 weights:
 *
 *     bytes  0 ... 63   64 codebook indices, one for 4 consecutive weights
 *     bytes 64 ... 95   8 little-endian words, word b for the 32 weights of sub-block b:
 *
 *                         31   28 27      21 20      14 13       7 6        0
 *                        +-------+----------+----------+----------+----------+
 *                        | code  | signs l3 | signs l2 | signs l1 | signs l0 |
 *                        +-------+----------+----------+----------+----------+
 *
 *     bytes 96, 97      super-scale d, IEEE fp16, little-endian
 *
 * Lane l of sub-block b is the 8 weights 32 b + 8 l ..., its indices are 8 b + 2 l and the next. Seven sign bits are
 * stored, 1 = negative; the eighth is their XOR, so every lane has an even number of negatives. Codebook bytes are doubled
 * magnitudes. With db = d (0.5 + code) 0.5, a weight is +-(byte 0.5) db: every step is exact in float32. */
#ifndef COLI_FORMATS_E8_H
#define COLI_FORMATS_E8_H

#include "floats.h"

#define COLI_E8_BLOCK 256 /* weights in a super-block */
#define COLI_E8_BLOCK_BYTES 98
#define COLI_E8_SUBBLOCK 32 /* weights that share a sub-scale */
#define COLI_E8_SUBBLOCKS 8
#define COLI_E8_INDICES 64
#define COLI_E8_WORDS_OFFSET 64
#define COLI_E8_SCALE_OFFSET 96
#define COLI_E8_CODEBOOK_BYTES 1024

COLI_FN int coli_e8_blocks(int columns) {
    return coli_ceil_div(columns, COLI_E8_BLOCK);
}
COLI_FN size_t coli_e8_row_bytes(int columns) {
    return (size_t)coli_e8_blocks(columns) * COLI_E8_BLOCK_BYTES;
}

/* Sub-scale of the sub-block of `word` under the super-scale d. */
COLI_FN float coli_e8_scaled(float d, uint32_t word) {
    return d * (0.5f + (float)(word >> 28)) * 0.5f;
}
/* The same from the super-scale's bits. */
COLI_FN float coli_e8_subscale(uint32_t d_bits, uint32_t word) {
    return coli_e8_scaled(coli_f16_to_f32(d_bits), word);
}

/* The 8 sign bits of lane l: the stored seven and their parity in bit 7. */
COLI_FN uint32_t coli_e8_signs(uint32_t word, int l) {
    uint32_t signs = word >> 7 * l & 127u, parity = signs ^ signs >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return signs | (parity & 1u) << 7;
}

/* The sign bits of all four lanes, lane l in byte l. */
COLI_FN uint32_t coli_e8_subblock_signs(uint32_t word) {
    uint32_t signs = (word & 0x7fu) | (word << 1 & 0x7f00u) | (word << 2 & 0x7f0000u) | (word << 3 & 0x7f000000u);
    uint32_t parity = signs ^ (signs >> 4 & 0x0f0f0f0fu);
    parity ^= parity >> 2 & 0x3f3f3f3fu;
    parity ^= parity >> 1 & 0x7f7f7f7fu;
    return signs | (parity & 0x01010101u) << 7;
}

/* A weight from its codebook byte, its sign bit and its sub-scale. */
COLI_FN float coli_e8_weight(uint8_t byte, uint32_t negative, float subscale) {
    return coli_bits_to_f32(coli_f32_to_bits((float)byte * 0.5f * subscale) ^ negative << 31);
}

/* 8 weights of a lane; `first` and `second` are the codebook entries of its two indices. */
COLI_FN void coli_e8_lane(const uint8_t first[4], const uint8_t second[4], uint32_t signs, float subscale,
                          float w[COLI_LANE]) {
    for (int j = 0; j < 4; j++) {
        w[j] = coli_e8_weight(first[j], signs >> j & 1u, subscale);
        w[4 + j] = coli_e8_weight(second[j], signs >> (4 + j) & 1u, subscale);
    }
}

#endif
