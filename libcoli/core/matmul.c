/* matmul.c - products with encoded weights: each weight row is decoded once, then multiplied with all rows of x. */
#include <stdlib.h>

#include "kernels.h"
#include "matrix.h"
#include "parallel.h"
#include "status.h"

coli_status coli_matmul_checked(const coli_matrix *w, const float *x, size_t S, float *y) {
    const coli_kernels *kernels = coli_kernels_current();
    int rows = w->rows, columns = w->columns;
    int team = coli_team((size_t)rows, (size_t)columns * (1 + S));
    size_t decoded_bytes = (size_t)columns * sizeof(float);
    float *decoded = calloc((size_t)team, decoded_bytes);
    RETURN_ERROR_IF(!decoded, COLI_E_MEMORY, "no memory for %d decoded rows of %zu bytes", team, decoded_bytes);
    COLI_PARALLEL_FOR(team)
    for (int row = 0; row < rows; row++) {
        float *own = decoded + (size_t)coli_thread_index() * (size_t)columns;
        kernels->decode_row(w, row, own);
        kernels->dot_rows(own, x, S, columns, y + row, (size_t)rows);
    }
    free(decoded);
    return COLI_OK;
}

coli_status coli_matmul(const coli_matrix *w, const float *x, size_t S, float *y) {
    FORWARD_ERROR(coli_matrix_check(w));
    if (S == 0) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s is NULL: x [%zu, %d] and y [%zu, %d] are needed", x ? "y" : "x", S,
                    w->columns, S, w->rows);
    return coli_matmul_checked(w, x, S, y);
}
