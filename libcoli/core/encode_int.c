/* encode_int.c - integer codes with a scale for each group of columns (a group may be the whole row).
 *
 * The scale maps the group's largest magnitude to the largest code and is at least 1e-8, so that a group of zeros gets zero
 * codes; codes are rounded to the nearest, half to even. All of it in float32: other encoders of these formats do so. */
#include <math.h>
#include <string.h>

#include "../formats/geometry.h"
#include "encode.h"

typedef struct {
    int min, max; /* codes */
    int bits;     /* of a stored code, which is code - min; int8 stores the code itself */
} code_range;

static code_range range_of(int format) {
    switch (format) {
    case COLI_INT8:
        return (code_range){COLI_INT8_MIN, COLI_INT8_MAX, 8};
    case COLI_INT2:
        return (code_range){COLI_INT2_MIN, COLI_INT2_MAX, 2};
    case COLI_INT3_G64:
        return (code_range){COLI_INT3_MIN, COLI_INT3_MAX, 3};
    default:
        return (code_range){COLI_INT4_MIN, COLI_INT4_MAX, 4};
    }
}

static float scale_for(const float *group, int columns, code_range range) {
    float scale = fmaxf(coli_largest(group, columns) / (float)range.max, 1e-8f);
    /* near the end of float32 the quotient may be rounded so far up that the largest code would decode to infinity */
    return isinf(scale * (float)range.max) ? nextafterf(scale, 0) : scale;
}

static int code_for(float w, float scale, code_range range) {
    float code = rintf(w / scale);
    return (int)fminf(fmaxf(code, (float)range.min), (float)range.max);
}

/* Packs 8 codes into the lane's bytes, lowest bits first. */
static void pack_lane(const int codes[COLI_LANE], code_range range, uint8_t *bytes) {
    uint64_t packed = 0;
    for (int j = 0; j < COLI_LANE; j++) {
        uint64_t stored = range.bits == 8 ? (uint8_t)codes[j] : (uint64_t)(codes[j] - range.min);
        packed |= stored << range.bits * j;
    }
    for (int i = 0; i < range.bits; i++) bytes[i] = (uint8_t)(packed >> 8 * i);
}

/* int3 keeps the low two bits and the third bits of a group apart. */
static void pack_int3_lane(const int codes[COLI_LANE], uint8_t *group, int lane) {
    uint32_t low = 0, high = 0;
    for (int j = 0; j < COLI_LANE; j++) {
        uint32_t stored = (uint32_t)(codes[j] - COLI_INT3_MIN);
        low |= (stored & 3u) << 2 * j;
        high |= (stored >> 2) << j;
    }
    group[2 * lane] = (uint8_t)low;
    group[2 * lane + 1] = (uint8_t)(low >> 8);
    group[COLI_INT3_HIGH_OFFSET + lane] = (uint8_t)high;
}

static void store_lane(int format, const int codes[COLI_LANE], int lane, uint8_t *row, size_t row_bytes) {
    if (format == COLI_INT3_G64) {
        const int lanes_a_group = COLI_INT3_GROUP / COLI_LANE;
        pack_int3_lane(codes, row + (size_t)(lane / lanes_a_group) * COLI_INT3_GROUP_BYTES, lane % lanes_a_group);
    } else {
        uint8_t bytes[COLI_LANE];
        size_t lane_bytes = coli_geometry_row_bytes(format, COLI_LANE), start = (size_t)lane * lane_bytes;
        pack_lane(codes, range_of(format), bytes);
        memcpy(row + start, bytes, row_bytes - start < lane_bytes ? row_bytes - start : lane_bytes);
    }
}

void coli_encode_int_row(const coli_encoding *encoding, int row) {
    int format = encoding->format, columns = encoding->columns;
    code_range range = range_of(format);
    const float *w = encoding->w + (size_t)row * (size_t)columns;
    size_t row_bytes = coli_geometry_row_bytes(format, columns);
    uint8_t *bytes = encoding->weights + (size_t)row * row_bytes;
    int shared = coli_geometry_scale_columns(format, columns, encoding->group_size);
    int groups = coli_ceil_div(columns, shared), group = 0, left_in_group = 0;
    int lanes = format == COLI_INT3_G64 ? groups * (COLI_INT3_GROUP / COLI_LANE) : coli_ceil_div(columns, COLI_LANE);
    float scale = 1;
    for (int lane = 0; lane < lanes; lane++) {
        int codes[COLI_LANE] = {0}; /* columns past the end are stored as weight 0 */
        for (int j = 0; j < COLI_LANE && lane * COLI_LANE + j < columns; j++) {
            const float *next = w + lane * COLI_LANE + j;
            if (left_in_group == 0) {
                left_in_group = group + 1 < groups ? shared : columns - group * shared;
                scale = scale_for(next, left_in_group, range);
                coli_store_scale(encoding, (size_t)row * (size_t)groups + (size_t)group++, scale);
            }
            codes[j] = code_for(*next, scale, range);
            left_in_group--;
        }
        store_lane(format, codes, lane, bytes, row_bytes);
    }
}
