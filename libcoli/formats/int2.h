/* int2.h - "int2": four codes a byte, w = q s[row]. Row: ceil(I / 4) bytes, lowest bits first; stored = q + 2, q in [-2,
 * 1]. */
#ifndef COLI_FORMATS_INT2_H
#define COLI_FORMATS_INT2_H

#include "portable.h"

#define COLI_INT2_MIN (-2)
#define COLI_INT2_MAX 1

COLI_FN size_t coli_int2_row_bytes(int columns) {
    return (size_t)coli_ceil_div(columns, 4);
}

/* 8 codes from the 16 bits that hold them. */
COLI_FN void coli_int2_lane(uint32_t half, float q[COLI_LANE]) {
    for (int j = 0; j < COLI_LANE; j++) q[j] = (float)((int)(half >> 2 * j & 3u) - 2);
}

#endif
