/* int8.h - "int8": one signed byte a weight, w = q s[row]. Row: I bytes. */
#ifndef COLI_FORMATS_INT8_H
#define COLI_FORMATS_INT8_H

#include "portable.h"

#define COLI_INT8_MIN (-128)
#define COLI_INT8_MAX 127

COLI_FN size_t coli_int8_row_bytes(int columns) {
    return (size_t)columns;
}

/* 8 codes from the two little-endian words that hold them. */
COLI_FN void coli_int8_lane(uint32_t low, uint32_t high, float q[COLI_LANE]) {
    for (int j = 0; j < 4; j++) {
        q[j] = (float)(int8_t)(low >> 8 * j);
        q[4 + j] = (float)(int8_t)(high >> 8 * j);
    }
}

#endif
