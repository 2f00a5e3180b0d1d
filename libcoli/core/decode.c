/* decode.c - a whole matrix to float32. The decoding of a row is in decode_row.h. */
#include "kernels.h"
#include "parallel.h"
#include "status.h"

coli_status coli_decode(const coli_matrix *matrix, float *w) {
    FORWARD_ERROR(coli_matrix_check(matrix));
    RETURN_ERROR_IF(!w, COLI_E_ARGUMENT, "w, which receives the decoded weights, is NULL");
    const coli_kernels *kernels = coli_kernels_current();
    size_t rows = (size_t)matrix->rows, columns = (size_t)matrix->columns;
    int team = coli_team(rows, columns);
    COLI_PARALLEL_FOR(team, row, rows, kernels->decode_row(matrix, (int)row, w + row * columns));
    return COLI_OK;
}
