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

/* Encodes what has been checked. */
static void encode_matrix(const coli_encoding *encoding) {
    int step = coli_geometry_scale_rows(encoding->format), steps = coli_ceil_div(encoding->rows, step);
    int team = coli_team((size_t)steps, (size_t)step * (size_t)encoding->columns * 64);
    COLI_PARALLEL_FOR(team, i, (size_t)steps, encode_rows(encoding, (int)i * step));
}

static coli_status check_encoding(const coli_encoding *encoding) {
    const coli_matrix result = {encoding->format,
                                encoding->rows,
                                encoding->columns,
                                encoding->group_size,
                                0,
                                encoding->weights,
                                encoding->scales,
                                NULL};
    FORWARD_ERROR(coli_matrix_check(&result));
    RETURN_ERROR_IF(!encoding->w, COLI_E_ARGUMENT, "w, the [%d, %d] weights to encode, is NULL", encoding->rows,
                    encoding->columns);
    return check_finite(encoding->w, encoding->rows, encoding->columns);
}

static const coli_e8_options default_e8_options = {.size = sizeof default_e8_options};

coli_status coli_encode(int format, const float *w, int rows, int columns, int group_size, void *weights, void *scales) {
    const coli_encoding encoding = {format, rows, columns, group_size, w, weights, scales, &default_e8_options};
    FORWARD_ERROR(check_encoding(&encoding));
    encode_matrix(&encoding);
    return COLI_OK;
}

static coli_status check_importance(const float *importance, int columns) {
    for (int i = 0; importance && i < columns; i++) {
        RETURN_ERROR_IF(!isfinite(importance[i]), COLI_E_NOT_FINITE, "importance must be finite, got %f at column %d",
                        (double)importance[i], i);
        RETURN_ERROR_IF(importance[i] < 0, COLI_E_ARGUMENT, "importance must be 0 or more, got %g at column %d",
                        (double)importance[i], i);
    }
    return COLI_OK;
}

static coli_status check_e8_options(const coli_e8_options *options, int columns) {
    RETURN_ERROR_IF(options->size != sizeof *options, COLI_E_ARGUMENT,
                    "coli_e8_options.size must be sizeof(coli_e8_options), %zu, got %zu", sizeof *options, options->size);
    RETURN_ERROR_IF(options->quality < COLI_E8_SEARCH || options->quality > COLI_E8_CALIBRATED, COLI_E_ARGUMENT,
                    "quality must be COLI_E8_SEARCH, COLI_E8_REFERENCE or COLI_E8_CALIBRATED, got %d", options->quality);
    RETURN_ERROR_IF(options->importance && options->quality != COLI_E8_SEARCH, COLI_E_ARGUMENT,
                    "importance is for COLI_E8_SEARCH, got it with quality %d", options->quality);
    RETURN_ERROR_IF((options->quality == COLI_E8_CALIBRATED) != (options->hessian != NULL), COLI_E_ARGUMENT,
                    "COLI_E8_CALIBRATED, and no other quality, needs a hessian; got quality %d and %s", options->quality,
                    options->hessian ? "one" : "NULL");
    RETURN_ERROR_IF(!(options->damping >= 0 && options->damping <= 1), COLI_E_ARGUMENT, "damping must be 0 ... 1, got %g",
                    (double)options->damping);
    return check_importance(options->importance, columns);
}

coli_status coli_encode_e8(const coli_e8_options *options, const float *w, int rows, int columns, void *weights) {
    if (!options) options = &default_e8_options;
    const coli_encoding encoding = {COLI_E8, rows, columns, 0, w, weights, NULL, options};
    FORWARD_ERROR(check_encoding(&encoding));
    FORWARD_ERROR(check_e8_options(options, columns));
    if (options->quality == COLI_E8_CALIBRATED) return coli_encode_e8_calibrated(&encoding);
    encode_matrix(&encoding);
    return COLI_OK;
}
