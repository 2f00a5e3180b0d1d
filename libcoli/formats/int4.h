/* int4.h - "int4": w = q s[row], and "int4-g64" and its like: w = q s[row, column / group_size].
 *
 * Row: ceil(I / 2) bytes. The low nibble is the even column; stored = q + 8, q in [-8, 7]. In an odd row the last high
 * nibble is padding: 8 when written, never read. */
#ifndef COLI_FORMATS_INT4_H
#define COLI_FORMATS_INT4_H

#include "portable.h"

#define COLI_INT4_MIN (-8)
#define COLI_INT4_MAX 7

COLI_FN size_t coli_int4_row_bytes(int columns) {
    return (size_t)coli_ceil_div(columns, 2);
}

/* 8 codes from the little-endian word that holds them. */
COLI_FN void coli_int4_lane(uint32_t word, float q[COLI_LANE]) {
    for (int j = 0; j < COLI_LANE; j++) q[j] = (float)((int)(word >> 4 * j & 15u) - 8);
}

#endif
