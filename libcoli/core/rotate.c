/* rotate.c - the rotation that E8 weights and their activations go through: see formats/signs.h. */
#include <math.h>
#include <string.h>

#include "../formats/signs.h"
#include "kernels.h"
#include "matrix.h"
#include "parallel.h"
#include "status.h"
#include "tables.h"

enum { FORWARD, INVERSE };

static void flip_block(const coli_kernels *kernels, float *block, int n) {
    const uint8_t *signs = coli_sign_table();
    if (n >= 8) {
        kernels->flip_signs(block, n, signs + n / 8);
    } else {
        for (int i = 0; i < n; i++) {
            if (coli_sign(signs, n, i)) block[i] = -block[i];
        }
    }
}

static void rotate_row(const coli_kernels *kernels, float *row, int dim, int direction) {
    for (int start = 0, n; start < dim; start += n) {
        float *block = row + start;
        n = coli_rotation_block(dim - start);
        if (direction == FORWARD) flip_block(kernels, block, n);
        kernels->hadamard(block, n, (float)(1.0 / sqrt(n)));
        if (direction == INVERSE) flip_block(kernels, block, n);
    }
}

static coli_status rotate_rows(const float *x, float *y, size_t rows, int dim, int direction) {
    RETURN_ERROR_IF(dim < 1, COLI_E_SHAPE, "dim must be 1 or more, got %d", dim);
    if (rows == 0) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s, %zu rows of %d floats, is NULL", x ? "y" : "x", rows, dim);
    FORWARD_ERROR(coli_check_rows("x", rows, dim));
    const coli_kernels *kernels = coli_kernels_current();
    int team = coli_team(rows, (size_t)dim * 4);
    COLI_PARALLEL_FOR(team)
    for (size_t row = 0; row < rows; row++) {
        float *rotated = y + row * (size_t)dim;
        if (x != y) memcpy(rotated, x + row * (size_t)dim, (size_t)dim * sizeof(float));
        rotate_row(kernels, rotated, dim, direction);
    }
    return COLI_OK;
}

coli_status coli_rotate_rows(const float *x, float *y, size_t rows, int dim) {
    return rotate_rows(x, y, rows, dim, FORWARD);
}

coli_status coli_unrotate_rows(const float *x, float *y, size_t rows, int dim) {
    return rotate_rows(x, y, rows, dim, INVERSE);
}
