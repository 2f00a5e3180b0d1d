/* mxfp4.h - "mxfp4": e2m1 nibbles, one ue8m0 byte for 32 columns, w = v 2^(s - 127).
 *
 * Row: ceil(I / 2) bytes, low nibble = even column; scales are bytes [O, ceil(I / 32)]. */
#ifndef COLI_FORMATS_MXFP4_H
#define COLI_FORMATS_MXFP4_H

#include "floats.h"

#define COLI_MXFP4_GROUP 32

COLI_FN size_t coli_mxfp4_row_bytes(int columns) {
    return (size_t)coli_ceil_div(columns, 2);
}

/* 8 values from the little-endian word that holds them. */
COLI_FN void coli_mxfp4_lane(uint32_t word, float v[COLI_LANE]) {
    for (int j = 0; j < COLI_LANE; j++) v[j] = coli_e2m1_to_f32(word >> 4 * j);
}

#endif
