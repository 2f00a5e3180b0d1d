/* matmul.c - products with encoded weights: each weight row is decoded once, then multiplied with all rows of x. */
#include <stdlib.h>

#include "kernels.h"
#include "matrix.h"
#include "parallel.h"
#include "status.h"

void coli_matmul_in(float *scratch, int threads, const coli_matrix *w, const float *x, size_t S, float *y) {
    const coli_kernels *kernels = coli_kernels_current();
    size_t rows = (size_t)w->rows, columns = (size_t)w->columns;
    int team = coli_team(rows, columns * (1 + S));
    if (team > threads) team = threads;
    COLI_PARALLEL_FOR(team, row, rows, {
        float *decoded = scratch + coli_worker * columns;
        kernels->decode_row(w, (int)row, decoded);
        kernels->dot_rows(decoded, x, S, w->columns, y + row, rows);
    });
}

coli_status coli_matmul(const coli_matrix *w, const float *x, size_t S, float *y) {
    FORWARD_ERROR(coli_matrix_check(w));
    if (S == 0) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s is NULL: x [%zu, %d] and y [%zu, %d] are needed", x ? "y" : "x", S,
                    w->columns, S, w->rows);
    FORWARD_ERROR(coli_check_rows("x", S, w->columns));
    FORWARD_ERROR(coli_check_rows("y", S, w->rows));
    int threads = coli_team((size_t)w->rows, (size_t)w->columns * (1 + S));
    size_t row_bytes = (size_t)w->columns * sizeof(float);
    float *scratch = malloc((size_t)threads * row_bytes);
    RETURN_ERROR_IF(!scratch, COLI_E_MEMORY, "no memory for %d decoded rows of %zu bytes", threads, row_bytes);
    coli_matmul_in(scratch, threads, w, x, S, y);
    free(scratch);
    return COLI_OK;
}
