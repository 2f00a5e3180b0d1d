/* geometry.h - sizes of encoded matrices, by format number: the table that the CPU core and the GPU backend share. */
#ifndef COLI_FORMATS_GEOMETRY_H
#define COLI_FORMATS_GEOMETRY_H

#include "../include/coli/coli_common.h"

#include "e8.h"
#include "f32.h"
#include "fp8.h"
#include "int2.h"
#include "int3.h"
#include "int4.h"
#include "int8.h"
#include "mxfp4.h"

#define COLI_FORMAT_COUNT 9

/* Bytes of a row's weights; 0 for a format that does not exist. */
COLI_FN size_t coli_geometry_row_bytes(int format, int columns) {
    switch (format) {
    case COLI_F32:
        return coli_f32_row_bytes(columns);
    case COLI_INT8:
        return coli_int8_row_bytes(columns);
    case COLI_INT4:
    case COLI_INT4_GROUPED:
        return coli_int4_row_bytes(columns);
    case COLI_INT2:
        return coli_int2_row_bytes(columns);
    case COLI_INT3_G64:
        return coli_int3_row_bytes(columns);
    case COLI_E8:
        return coli_e8_row_bytes(columns);
    case COLI_MXFP4:
        return coli_mxfp4_row_bytes(columns);
    case COLI_FP8_B128:
        return coli_fp8_row_bytes(columns);
    default:
        return 0;
    }
}

/* Columns that share a scale; the whole row where there is one scale a row, 0 where there is none. */
COLI_FN int coli_geometry_scale_columns(int format, int columns, int group_size) {
    switch (format) {
    case COLI_INT8:
    case COLI_INT4:
    case COLI_INT2:
        return columns;
    case COLI_INT4_GROUPED:
        return group_size;
    case COLI_INT3_G64:
        return COLI_INT3_GROUP;
    case COLI_MXFP4:
        return COLI_MXFP4_GROUP;
    case COLI_FP8_B128:
        return COLI_FP8_BLOCK;
    default:
        return 0;
    }
}

/* Rows that share a scale. */
COLI_FN int coli_geometry_scale_rows(int format) {
    return format == COLI_FP8_B128 ? COLI_FP8_BLOCK : 1;
}

COLI_FN size_t coli_geometry_scale_bytes_each(int format) {
    return format == COLI_MXFP4 ? 1 : sizeof(float);
}

/* Scales of the matrix; 0 where the format has none, or a group size is missing. */
COLI_FN size_t coli_geometry_scale_count(int format, int rows, int columns, int group_size) {
    int shared = coli_geometry_scale_columns(format, columns, group_size);
    if (shared < 1) return 0;
    return (size_t)coli_ceil_div(rows, coli_geometry_scale_rows(format)) * (size_t)coli_ceil_div(columns, shared);
}

#endif
