/* host_calls.h - products of rows in host memory: staging around the kernels. The caller holds the device. */
#ifndef COLI_CUDA_HOST_CALLS_H
#define COLI_CUDA_HOST_CALLS_H

#include "dispatch.h"

namespace coli {

/* y [S, O] = x [S, I] w^T; waits. */
bool run_matmul(const ColiCudaTensor &w, float *y, const float *x, int S);

/* y = the group's rows of x; waits. */
bool run_group(Context &context, GroupParams &params, int total_rows, float *y, const float *x);
/* The same in two halves; the rows end in context.issued.host_y. */
bool issue_group(Context &context, GroupParams &params, int total_rows, const float *x);

/* Rows of a batch on their way to experts, and from them to sums: row r of the experts is row x_index[r] of x, and goes
 * into y[row_tokens[r]] with the factor row_weights[r]. */
struct RowSums {
    const int *x_index, *row_tokens;
    const float *row_weights;
    int tokens; /* rows of y */
};
/* As issue_group; context.issued.host_y holds the sums in the end. */
bool issue_group_sum(Context &context, GroupParams &params, int total_rows, const float *x, const RowSums &sums);
bool take_group(Context &context);

} // namespace coli

#endif
