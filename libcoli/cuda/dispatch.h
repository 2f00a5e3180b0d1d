/* dispatch.h - groups and products on the device: which experts take which kernels.
 *
 * Experts of up to kMaxPassRows rows take the kernels of kernels/expert.h or, if GPU and formats are theirs, of
 * kernels/batch.h, which give the same bits and are faster from some rows on. Above, those of kernels/prefill.h take over,
 * if GPU and formats are theirs; where the host does without exactness, they round activations to fp16. */
#ifndef COLI_CUDA_DISPATCH_H
#define COLI_CUDA_DISPATCH_H

#include "group.h"
#include "kernels/batch.h"
#include "kernels/prefill.h"

namespace coli {

/* On from the start. Process-wide; not to be called while products are launched. */
void require_exact(bool exact);

/* Bytes of the hidden rows, the rotated ones, and what kernels make of activations, for `experts` experts together. */
size_t workspace_bytes(int total_rows, int D, int H, int experts);
void place_workspace(GroupParams *params, int total_rows, void *workspace);

/* A group by the kernels that its experts take; parts of no experts are not launched. */
struct GroupParts {
    GroupParams few, some, many;
    GroupPlan of_few;
    BatchPlan of_some;
    PrefillPlan of_many;
};
GroupParts split_group(const GpuTraits &gpu, PlanCache *plans, const GroupParams &params);

cudaError_t launch_group(Context &context, const GroupParams &params, cudaStream_t stream);

/* A product alone (product_params). `workspace` has product_workspace_bytes, or is NULL: then it is exact. */
size_t product_workspace_bytes(int S, int I);
cudaError_t launch_product(Context &context, const GroupParams &params, void *workspace, cudaStream_t stream);

} // namespace coli

#endif
