/* encode_float.c - small floats: MXFP4 and fp8 e4m3 in blocks of 128 x 128. Rounding is to the nearest, half to even. */
#include <float.h>
#include <math.h>

#include "../formats/geometry.h"
#include "encode.h"

/* Shared exponent of the OCP microscaling rule: that of the largest magnitude, less 2, the exponent of e2m1's largest
 * value. A group of zeros gets 0. Other groups get at least 1, since a scale of 0 would decode as zero. */
static uint32_t mxfp4_scale(float largest) {
    uint32_t exponent = coli_f32_to_bits(largest) >> 23;
    if (largest == 0) return 0;
    return exponent > 3 ? exponent - 2 : 1;
}

/* Nearest e2m1 of a weight divided by its scale; magnitudes above 6 become 6. The steps between values are 0.5 below 2, 1
 * below 4, and 2 above. */
static uint32_t e2m1_nearest(float w) {
    uint32_t sign = coli_f32_to_bits(w) >> 28 & 8u;
    float magnitude = fabsf(w), code;
    if (magnitude < 2) {
        code = rintf(magnitude * 2);
    } else if (magnitude < 4) {
        code = rintf(magnitude) + 2;
    } else {
        code = fminf(rintf(magnitude / 2) + 4, 7);
    }
    return sign | (uint32_t)code;
}

void coli_encode_mxfp4_row(const coli_encoding *encoding, int row) {
    int columns = encoding->columns, groups = coli_ceil_div(columns, COLI_MXFP4_GROUP);
    const float *w = encoding->w + (size_t)row * (size_t)columns;
    uint8_t *bytes = encoding->weights + (size_t)row * coli_mxfp4_row_bytes(columns);
    for (int group = 0; group < groups; group++) {
        int first = group * COLI_MXFP4_GROUP, left = columns - first;
        int end = first + (left < COLI_MXFP4_GROUP ? left : COLI_MXFP4_GROUP);
        uint32_t scale = mxfp4_scale(coli_largest(w + first, end - first));
        float inverse = ldexpf(1, 127 - (int)scale);
        encoding->scales[(size_t)row * (size_t)groups + (size_t)group] = (uint8_t)scale;
        for (int i = first; i < end; i += 2) {
            uint32_t low = e2m1_nearest(w[i] * inverse), high = i + 1 < end ? e2m1_nearest(w[i + 1] * inverse) : 0;
            bytes[i / 2] = (uint8_t)(low | high << 4);
        }
    }
}

/* Nearest e4m3; magnitudes above 448 become 448. */
static uint8_t e4m3_nearest(float w) {
    uint32_t bits = coli_f32_to_bits(w), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu, code;
    if (magnitude < 0x3c800000u) { /* subnormal: adding 2^14 rounds the float at the step of 2^-9 */
        code = coli_f32_to_bits(coli_bits_to_f32(magnitude) + 0x1p14f) - 0x46800000u;
    } else {
        code = (magnitude - ((127u - 7u) << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    }
    return (uint8_t)(sign | (code < 0x7eu ? code : 0x7eu));
}

/* One block, whose largest magnitude becomes 448, the largest e4m3. A block of zeros gets the smallest normal scale. */
static void encode_fp8_block(const coli_encoding *encoding, int row, int rows, int column, int columns) {
    size_t stride = (size_t)encoding->columns, start = (size_t)row * stride + (size_t)column;
    size_t blocks_a_row = (size_t)coli_ceil_div(encoding->columns, COLI_FP8_BLOCK);
    float largest = 0;
    for (int r = 0; r < rows; r++)
        largest = fmaxf(largest, coli_largest(encoding->w + start + (size_t)r * stride, columns));
    float scale = fmaxf(largest / 448, FLT_MIN);
    coli_store_scale(encoding, (size_t)(row / COLI_FP8_BLOCK) * blocks_a_row + (size_t)(column / COLI_FP8_BLOCK), scale);
    for (int r = 0; r < rows; r++) {
        size_t offset = start + (size_t)r * stride;
        for (int i = 0; i < columns; i++)
            encoding->weights[offset + (size_t)i] = e4m3_nearest(encoding->w[offset + (size_t)i] / scale);
    }
}

static int within_block(int left) {
    return left < COLI_FP8_BLOCK ? left : COLI_FP8_BLOCK;
}

void coli_encode_fp8_rows(const coli_encoding *encoding, int row) {
    int rows = within_block(encoding->rows - row);
    for (int block = 0; block < coli_ceil_div(encoding->columns, COLI_FP8_BLOCK); block++) {
        int column = block * COLI_FP8_BLOCK;
        encode_fp8_block(encoding, row, rows, column, within_block(encoding->columns - column));
    }
}
