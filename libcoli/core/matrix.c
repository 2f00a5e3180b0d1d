/* matrix.c - do the fields of a coli_matrix fit each other? */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../formats/e8.h"
#include "../formats/geometry.h"
#include "matrix.h"
#include "status.h"

const char *coli_matrix_describe(const coli_matrix *matrix, char description[COLI_DESCRIPTION_BYTES]) {
    char group[16] = "";
    const char *name = coli_format_get(matrix->format)->name;
    if (matrix->format == COLI_INT4_GROUPED) {
        name = "int4-g";
        snprintf(group, sizeof group, "%d", matrix->group_size);
    }
    snprintf(description, COLI_DESCRIPTION_BYTES, "%s%s matrix [%d, %d]", name, group, matrix->rows, matrix->columns);
    return description;
}

/* Whether `rows` rows of so many bytes are more than memory can be addressed for. */
static int too_large(int rows, size_t row_bytes) {
    return (size_t)rows > PTRDIFF_MAX / row_bytes;
}

static coli_status check_shape(const coli_matrix *matrix, const char *description) {
    RETURN_ERROR_IF(matrix->rows < 1 || matrix->columns < 1, COLI_E_SHAPE, "%s: rows and columns must be 1 or more",
                    description);
    if (matrix->format == COLI_INT4_GROUPED) {
        RETURN_ERROR_IF(matrix->group_size < 1, COLI_E_SHAPE, "%s: group_size must be 1 or more, got %d", description,
                        matrix->group_size);
    } else {
        RETURN_ERROR_IF(matrix->group_size != 0, COLI_E_SHAPE,
                        "%s: group_size must be 0, since only int4-g has groups of a free size; got %d", description,
                        matrix->group_size);
    }
    RETURN_ERROR_IF(too_large(matrix->rows, coli_row_bytes(matrix->format, matrix->columns)) ||
                        too_large(matrix->rows, (size_t)matrix->columns * sizeof(float)),
                    COLI_E_SHAPE, "%s is larger than this machine can address", description);
    return COLI_OK;
}

static coli_status check_pointers(const coli_matrix *matrix, const char *description) {
    size_t scale_bytes = coli_scale_bytes(matrix->format, matrix->rows, matrix->columns, matrix->group_size);
    RETURN_ERROR_IF(!matrix->weights, COLI_E_ARGUMENT, "%s needs %zu weight bytes, got NULL", description,
                    coli_weight_bytes(matrix->format, matrix->rows, matrix->columns));
    RETURN_ERROR_IF(scale_bytes && !matrix->scales, COLI_E_ARGUMENT, "%s needs %zu bytes of scales, got NULL", description,
                    scale_bytes);
    return COLI_OK;
}

coli_status coli_matrix_check_fields(const coli_matrix *matrix) {
    char description[COLI_DESCRIPTION_BYTES];
    RETURN_ERROR_IF(!matrix, COLI_E_ARGUMENT, "the matrix is NULL");
    RETURN_ERROR_IF(!coli_format_get(matrix->format), COLI_E_FORMAT, "format must be 0 ... %d, got %d",
                    COLI_FORMAT_COUNT - 1, matrix->format);
    coli_matrix_describe(matrix, description);
    FORWARD_ERROR(check_shape(matrix, description));
    RETURN_ERROR_IF(matrix->flags & ~COLI_UNROTATED, COLI_E_ARGUMENT, "%s: flags must be 0 or COLI_UNROTATED (%d), got %d",
                    description, COLI_UNROTATED, matrix->flags);
    if (matrix->format != COLI_E8) {
        RETURN_ERROR_IF(matrix->flags & COLI_UNROTATED, COLI_E_ARGUMENT, "%s: COLI_UNROTATED is for e8 alone", description);
        RETURN_ERROR_IF(matrix->codebook, COLI_E_ARGUMENT, "%s: a codebook is for e8 alone, expected NULL", description);
    }
    return COLI_OK;
}

coli_status coli_matrix_check(const coli_matrix *matrix) {
    char description[COLI_DESCRIPTION_BYTES];
    FORWARD_ERROR(coli_matrix_check_fields(matrix));
    return check_pointers(matrix, coli_matrix_describe(matrix, description));
}

int coli_matrix_rotated(const coli_matrix *matrix) {
    return matrix->format == COLI_E8 && !(matrix->flags & COLI_UNROTATED);
}

int coli_matrix_same_kind(const coli_matrix *a, const coli_matrix *b) {
    return a->format == b->format && a->rows == b->rows && a->columns == b->columns && a->group_size == b->group_size &&
           a->flags == b->flags;
}

int coli_matrix_same_codebook(const coli_matrix *a, const coli_matrix *b) {
    const void *one = a->codebook ? a->codebook : coli_e8_codebook(), *two = b->codebook ? b->codebook : coli_e8_codebook();
    return one == two || !memcmp(one, two, COLI_E8_CODEBOOK_BYTES);
}

size_t coli_matrix_bytes(const coli_matrix *m) {
    return coli_weight_bytes(m->format, m->rows, m->columns) +
           coli_scale_bytes(m->format, m->rows, m->columns, m->group_size);
}

coli_status coli_check_rows(const char *name, size_t rows, int dim) {
    RETURN_ERROR_IF(rows > PTRDIFF_MAX / sizeof(float) / (size_t)dim, COLI_E_SHAPE,
                    "%s of %zu rows of %d floats is more than memory can hold", name, rows, dim);
    return COLI_OK;
}
