/* encode.c - coli_encode: checks, and the loop over rows. The rules of the formats are in encode_int.c, encode_float.c and
 * encode_e8.c. */
#include <math.h>
#include <string.h>

#include "../formats/geometry.h"
#include "encode.h"
#include "parallel.h"
#include "status.h"

static int all_finite(const float *w, int n) {
    uint32_t seen = 0;
    for (int i = 0; i < n; i++) seen |= (coli_f32_to_bits(w[i]) & 0x7f800000u) == 0x7f800000u;
    return !seen;
}

static coli_status check_finite(const float *w, int rows, int columns) {
    for (int row = 0; row < rows; row++) {
        const float *weights = w + (size_t)row * (size_t)columns;
        if (all_finite(weights, columns)) continue;
        int column = 0;
        while (isfinite(weights[column])) column++;
        RETURN_ERROR(COLI_E_NOT_FINITE, "weights must be finite, got %f at row %d, column %d", (double)weights[column], row,
                     column);
    }
    return COLI_OK;
}

static void encode_f32_row(const coli_encoding *encoding, int row) {
    size_t row_bytes = coli_f32_row_bytes(encoding->columns);
    memcpy(encoding->weights + (size_t)row * row_bytes, encoding->w + (size_t)row * (size_t)encoding->columns, row_bytes);
}

static void encode_rows(const coli_encoding *encoding, int row) {
    switch (encoding->format) {
    case COLI_F32:
        encode_f32_row(encoding, row);
        break;
    case COLI_INT8:
    case COLI_INT4:
    case COLI_INT2:
    case COLI_INT4_GROUPED:
    case COLI_INT3_G64:
        coli_encode_int_row(encoding, row);
        break;
    case COLI_E8:
        coli_encode_e8_row(encoding, row);
        break;
    case COLI_MXFP4:
        coli_encode_mxfp4_row(encoding, row);
        break;
    case COLI_FP8_B128:
        coli_encode_fp8_rows(encoding, row);
        break;
    }
}

coli_status coli_encode(int format, const float *w, int rows, int columns, int group_size, void *weights, void *scales) {
    const coli_matrix result = {format, rows, columns, group_size, 0, weights, scales, NULL};
    const coli_encoding encoding = {format, rows, columns, group_size, w, weights, scales};
    FORWARD_ERROR(coli_matrix_check(&result));
    RETURN_ERROR_IF(!w, COLI_E_ARGUMENT, "w, the [%d, %d] weights to encode, is NULL", rows, columns);
    FORWARD_ERROR(check_finite(w, rows, columns));
    int step = coli_geometry_scale_rows(format), steps = coli_ceil_div(rows, step);
    int team = coli_team((size_t)steps, (size_t)step * (size_t)columns * 64);
    COLI_PARALLEL_FOR(team)
    for (int i = 0; i < steps; i++) encode_rows(&encoding, i * step);
    return COLI_OK;
}
