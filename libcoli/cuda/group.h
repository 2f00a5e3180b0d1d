/* group.h - groups of experts: from the caller's tensors and rows to what the kernels take. */
#ifndef COLI_CUDA_GROUP_H
#define COLI_CUDA_GROUP_H

#include "kernels/expert.h"
#include "tensor.h"

namespace coli {

/* The arguments that all group calls share. */
struct GroupCall {
    ColiCudaTensor *const *gates, *const *ups, *const *downs;
    const int *rows;
    int count;
};

/* The device of a group, NULL with an error set where the first gate does not tell. Needs no lock. */
Context *context_of(const GroupCall &call);

/* Checks tensors, shapes and rows (each at least `least_rows`). The caller holds the device. *total_rows receives the sum
 * of the rows. */
bool check_group(const GroupCall &call, int least_rows, int *total_rows);

/* Parameters of experts begin ... of a group that was checked, COLI_CUDA_MAX_EXPERTS of them at most; their rows start at
 * `first_row`. All but the pointers. */
GroupParams group_params(const GroupCall &call, int begin, int first_row);

/* How those experts are computed on a GPU; `plans` may be NULL. */
GroupPlan plan_of(const GpuTraits &gpu, PlanCache *plans, const GroupParams &params);

/* y [S, O] = x [S, I] w^T as a group: one expert that is a down matrix alone. All but the tables. */
GroupParams product_params(const ColiCudaTensor &w, float *y, const float *x, int S);
ProductPlan plan_of_product(const GpuTraits &gpu, PlanCache *plans, const GroupParams &params);

/* Bytes of rows in a workspace. */
size_t rows_bytes(int rows, int dim);
} // namespace coli

#endif
