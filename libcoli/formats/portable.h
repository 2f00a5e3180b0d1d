/* portable.h - what lets one header of format code compile as C11, C++17 and device code.
 *
 * Headers in this folder hold geometry and decode of the weight formats, one format a file. They allocate nothing and call
 * nothing of the system. */
#ifndef COLI_FORMATS_PORTABLE_H
#define COLI_FORMATS_PORTABLE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Prefix of every function here: inlined, on both sides when a GPU compiler reads it. */
#if defined(__CUDACC__) || defined(__HIPCC__)
#define COLI_FN static __host__ __device__ __forceinline__
#else
#define COLI_FN static inline
#endif

/* A lane is 8 consecutive columns of a row: the unit in which all formats are decoded. */
#define COLI_LANE 8

COLI_FN int coli_ceil_div(int a, int b) {
    return a / b + (a % b != 0);
}

/* Little-endian loads from bytes of any alignment. */
COLI_FN uint32_t coli_load_u16(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}
COLI_FN uint32_t coli_load_u32(const uint8_t *p) {
    return coli_load_u16(p) | coli_load_u16(p + 2) << 16;
}

COLI_FN float coli_bits_to_f32(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
COLI_FN uint32_t coli_f32_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

#endif
