/* fp8.h - "fp8-e4m3-b128": e4m3 bytes, one f32 scale for each block of 128 x 128, w = v s[row / 128, column / 128].
 *
 * Row: I bytes. Decoded through a table of 256 floats, which on the GPU the host may replace. */
#ifndef COLI_FORMATS_FP8_H
#define COLI_FORMATS_FP8_H

#include "floats.h"

#define COLI_FP8_BLOCK 128

COLI_FN size_t coli_fp8_row_bytes(int columns) {
    return (size_t)columns;
}

/* 8 values from the two little-endian words that hold them. */
COLI_FN void coli_fp8_lane(uint32_t low, uint32_t high, const float table[256], float v[COLI_LANE]) {
    for (int j = 0; j < 4; j++) {
        v[j] = table[low >> 8 * j & 255u];
        v[4 + j] = table[high >> 8 * j & 255u];
    }
}

#endif
