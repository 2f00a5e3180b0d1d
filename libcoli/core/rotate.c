/* rotate.c - the rotation that E8 weights and their activations go through: see formats/signs.h. */
#include <math.h>
#include <string.h>

#include "../formats/signs.h"
#include "kernels.h"
#include "matrix.h"
#include "parallel.h"
#include "status.h"
#include "tables.h"

static void flip_block(const coli_kernels *kernels, const float *x, float *y, int n) {
    const uint8_t *signs = coli_sign_table();
    if (n >= 8) {
        kernels->flip_signs(x, y, n, signs + n / 8);
    } else {
        for (int i = 0; i < n; i++) y[i] = coli_sign(signs, n, i) ? -x[i] : x[i];
    }
}

static float scale_of(int n) {
    return (float)(1.0 / sqrt(n));
}

static void rotate_row(const coli_kernels *kernels, const float *x, float *y, int dim) {
    for (int start = 0, n; start < dim; start += n) {
        n = coli_rotation_block(dim - start);
        flip_block(kernels, x + start, y + start, n);
        kernels->hadamard(y + start, n, scale_of(n));
    }
}

static void unrotate_row(const coli_kernels *kernels, const float *x, float *y, int dim) {
    if (x != y) memcpy(y, x, (size_t)dim * sizeof *y);
    for (int start = 0, n; start < dim; start += n) {
        n = coli_rotation_block(dim - start);
        kernels->hadamard(y + start, n, scale_of(n));
        flip_block(kernels, y + start, y + start, n);
    }
}

typedef void (*row_function)(const coli_kernels *kernels, const float *x, float *y, int dim);

static coli_status rotate_rows(const float *x, float *y, size_t rows, int dim, row_function rotate) {
    RETURN_ERROR_IF(dim < 1, COLI_E_SHAPE, "dim must be 1 or more, got %d", dim);
    if (rows == 0) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s, %zu rows of %d floats, is NULL", x ? "y" : "x", rows, dim);
    FORWARD_ERROR(coli_check_rows("x", rows, dim));
    const coli_kernels *kernels = coli_kernels_current();
    int team = coli_team(rows, (size_t)dim * 4);
    COLI_PARALLEL_FOR(team, row, rows, rotate(kernels, x + row * (size_t)dim, y + row * (size_t)dim, dim));
    return COLI_OK;
}

coli_status coli_rotate_rows(const float *x, float *y, size_t rows, int dim) {
    return rotate_rows(x, y, rows, dim, rotate_row);
}

coli_status coli_unrotate_rows(const float *x, float *y, size_t rows, int dim) {
    return rotate_rows(x, y, rows, dim, unrotate_row);
}
