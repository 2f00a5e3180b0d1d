/* decode.c - a whole matrix to float32. The decoding of a row is in decode_row.h. */
#include "kernels.h"
#include "parallel.h"
#include "status.h"

coli_status coli_decode(const coli_matrix *matrix, float *w) {
    FORWARD_ERROR(coli_matrix_check(matrix));
    RETURN_ERROR_IF(!w, COLI_E_ARGUMENT, "w, which receives the decoded weights, is NULL");
    const coli_kernels *kernels = coli_kernels_current();
    int rows = matrix->rows, team = coli_team((size_t)rows, (size_t)matrix->columns);
    COLI_PARALLEL_FOR(team)
    for (int row = 0; row < rows; row++) {
        kernels->decode_row(matrix, row, w + (size_t)row * (size_t)matrix->columns);
    }
    return COLI_OK;
}
