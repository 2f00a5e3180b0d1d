/* int3.h - "int3-g64": 64 columns in 24 bytes with one f32 scale, w = q s[row, column / 64].
 *
 * Per group: 16 bytes of the codes' low two bits (as in int2.h), then 8 bytes of their third bit, lowest bit first;
 * stored = q + 4, q in [-4, 3]. Row: ceil(I / 64) groups; padding is 4 (weight 0) when written, never read. */
#ifndef COLI_FORMATS_INT3_H
#define COLI_FORMATS_INT3_H

#include "portable.h"

#define COLI_INT3_MIN (-4)
#define COLI_INT3_MAX 3
#define COLI_INT3_GROUP 64
#define COLI_INT3_GROUP_BYTES 24
#define COLI_INT3_HIGH_OFFSET 16 /* of the third bits inside a group */

COLI_FN size_t coli_int3_row_bytes(int columns) {
    return (size_t)coli_ceil_div(columns, COLI_INT3_GROUP) * COLI_INT3_GROUP_BYTES;
}

/* 8 codes from the 16 low bits and the 8 high bits that hold them. */
COLI_FN void coli_int3_lane(uint32_t low, uint32_t high, float q[COLI_LANE]) {
    for (int j = 0; j < COLI_LANE; j++) q[j] = (float)((int)((low >> 2 * j & 3u) | (high >> j & 1u) << 2) - 4);
}

#endif
