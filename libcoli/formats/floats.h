/* floats.h - small floating-point formats to float32, exactly, and float32 to fp16. */
#ifndef COLI_FORMATS_FLOATS_H
#define COLI_FORMATS_FLOATS_H

#include "portable.h"

/* IEEE binary16, all 65536 values: subnormals are m * 2^-24, infinities stay, NaN stays NaN. */
COLI_FN float coli_f16_to_f32(uint32_t h) {
    uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude < 0x0400u) return coli_bits_to_f32(sign | coli_f32_to_bits((float)magnitude * 0x1p-24f));
    if (magnitude < 0x7c00u) return coli_bits_to_f32(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
    return coli_bits_to_f32(sign | 0x7f800000u | (magnitude & 0x03ffu) << 13);
}

/* Nearest even; beyond 65504 + half a step to infinity; NaN to a quiet NaN. */
COLI_FN uint32_t coli_f32_to_f16(float f) {
    uint32_t bits = coli_f32_to_bits(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) { /* subnormal or zero: adding 0.5 rounds the float at the step of 2^-24 */
        return sign | (coli_f32_to_bits(coli_bits_to_f32(magnitude) + 0.5f) - 0x3f000000u);
    }
    return sign | (magnitude - ((127u - 15u) << 23) + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
}

/* e4m3fn: 4 exponent bits of bias 7, no infinities; 0x7f and 0xff are NaN. */
COLI_FN float coli_e4m3_to_f32(uint32_t b) {
    uint32_t sign = (b & 0x80u) << 24, magnitude = b & 0x7fu;
    if (magnitude < 0x08u) return coli_bits_to_f32(sign | coli_f32_to_bits((float)magnitude * 0x1p-9f));
    if (magnitude < 0x7fu) return coli_bits_to_f32(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
    return coli_bits_to_f32(sign | 0x7fc00000u);
}

/* e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; only the low 4 bits count. */
COLI_FN float coli_e2m1_to_f32(uint32_t b) {
    uint32_t sign = (b & 8u) << 28, magnitude = b & 7u;
    if (magnitude < 2u) return coli_bits_to_f32(sign | (magnitude ? 0x3f000000u : 0u));
    return coli_bits_to_f32(sign | ((magnitude << 22) + ((127u - 1u) << 23)));
}

/* ue8m0: the byte is float32's exponent field, so 0 is +0 and 255 is +infinity. */
COLI_FN float coli_ue8m0_to_f32(uint32_t b) {
    return coli_bits_to_f32(b << 23);
}

#endif
