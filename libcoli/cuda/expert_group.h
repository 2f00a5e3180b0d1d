/* expert_group.h - groups of experts: checks, parameters for the kernels, and the host-pointer calls around them. */
#ifndef COLI_CUDA_EXPERT_GROUP_H
#define COLI_CUDA_EXPERT_GROUP_H

#include "kernels/expert.h"
#include "tensor.h"

namespace coli {

/* The arguments that all group calls share. */
struct GroupCall {
    ColiCudaTensor *const *gates, *const *ups, *const *downs;
    const int *rows;
    int count;
};

/* Checks tensors, shapes and rows (each at least `least_rows`) and fills everything of `params` but the pointers. *context
 * receives the experts' device, *total_rows the sum of the rows. */
bool prepare_group(const GroupCall &call, int least_rows, Context **context, GroupParams *params, int *total_rows);

/* Bytes of the hidden and the rotated rows together, and their places in such memory. */
size_t workspace_bytes(int total_rows, int H);
void place_workspace(GroupParams *params, int total_rows, void *workspace);

/* y = the group's rows of x, both in host memory; waits. The caller holds the device. */
bool run_group(Context &context, GroupParams &params, int total_rows, float *y, const float *x);
/* The same in two halves; the rows end in context.issued.host_y. */
bool issue_group(Context &context, GroupParams &params, int total_rows, const float *x);
bool take_group(Context &context);

/* y [S, O] = x [S, I] w^T in host memory; waits. The caller holds the device. */
bool run_matmul(const ColiCudaTensor &w, float *y, const float *x, int S);

} // namespace coli

#endif
