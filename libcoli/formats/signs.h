/* signs.h - blocks of a rotated dimension, and the random signs of each block.
 *
 * A rotation of n (a power of two) multiplies element i by sign i, applies the Walsh-Hadamard transform in natural order
 * and scales by 1 / sqrt(n). The signs depend on n alone. */
#ifndef COLI_FORMATS_SIGNS_H
#define COLI_FORMATS_SIGNS_H

#include "portable.h"

#define COLI_ROTATION_MAX_BLOCK 32768

/* Size of the block that starts a remainder of `remaining` elements: the largest power of two that divides it, within the
 * limit. Blocks follow each other from offset 0: 6144 = 2048 + 4096. */
COLI_FN int coli_rotation_block(int remaining) {
    int block = remaining & -remaining;
    return block < COLI_ROTATION_MAX_BLOCK ? block : COLI_ROTATION_MAX_BLOCK;
}

/* Signs of all block sizes in one table: those of size n are the bits n ... 2n - 1, lowest first in each byte; sizes below
 * 8 share the first bytes. 1 = negate. */
#define COLI_SIGN_TABLE_BYTES (2 * COLI_ROTATION_MAX_BLOCK / 8)

/* Sign bit of element i in a block of n. */
COLI_FN uint32_t coli_sign(const uint8_t *table, int n, int i) {
    int bit = n + i;
    return table[bit >> 3] >> (bit & 7) & 1u;
}

/* Fills the table from xorshift64*, seeded with 417 + n; bit i of the stream is bit i mod 8 of its byte i / 8, and a byte
 * is the top 8 bits of a draw. */
static inline void coli_sign_table_fill(uint8_t table[COLI_SIGN_TABLE_BYTES]) {
    memset(table, 0, COLI_SIGN_TABLE_BYTES);
    for (int n = 1; n <= COLI_ROTATION_MAX_BLOCK; n *= 2) {
        uint64_t state = 417u + (uint64_t)n;
        uint8_t draw = 0;
        for (int i = 0; i < n; i++) {
            if (i % 8 == 0) {
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                draw = (uint8_t)((state * 2685821657736338717u) >> 56);
            }
            table[(n + i) >> 3] |= (uint8_t)((draw >> (i & 7) & 1u) << ((n + i) & 7));
        }
    }
}

#endif
