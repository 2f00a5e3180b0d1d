/* kernels/batch.h - experts of some rows, up to kMaxPassRows: Hopper's matrix unit multiplies limbs of all of them with
 * weights that are decoded once.
 *
 * A group is four launches, which overlap at their ends: limbs of x | hidden = activation(gate x, up x) | limbs of hidden,
 * rotated where down wants it | y = down hidden. Results are the bits of kernels/expert.h, whatever the number of rows. */
#ifndef COLI_CUDA_KERNELS_BATCH_H
#define COLI_CUDA_KERNELS_BATCH_H

#include "expert.h"

namespace coli {

/* One launch of kernels/batch_hopper.cu. Offsets are bytes in a block's shared memory, which begins with the E8 codebook
 * where there is one. */
struct BatchProduct {
    bool hidden;   /* gate and up; else down */
    bool codebook; /* a matrix is E8 */
    int pass_rows; /* an expert has at most: 8 or 16 */
    int warps;     /* that multiply, of a block: a strip each; hidden: half of them gate's, half up's */
    int items, blocks;
    int stages, slot_bytes, stage_bytes, ring_offset, barriers_offset, totals_offset, shared_bytes;
};

/* Strips of a matrix that an item has. */
COLI_FN int item_strips(const BatchProduct &plan) {
    return plan.hidden ? plan.warps / 2 : plan.warps;
}

struct BatchPlan {
    bool possible; /* false: shared memory is too small */
    bool rotates;
    BatchProduct hidden, down;
};

/* Whether a GPU has these kernels. They take matrices that multiplies_bytes. */
bool has_batch_kernels(const GpuTraits &gpu);

/* All experts have rows, kMaxPassRows at most. */
BatchPlan plan_batch(const GpuTraits &gpu, const GroupParams &params);
BatchPlan plan_batch_down(const GpuTraits &gpu, const GroupParams &params);

/* Bytes of the limbs of `experts` experts, of rows of up to `columns` columns. 256-byte aligned. */
size_t batch_workspace_bytes(int columns, int experts);

/* As launch_expert_group. Writes params.hidden, and params.rotated where an expert's hidden rows are rotated. */
cudaError_t launch_batch_group(const GroupParams &params, const BatchPlan &plan, void *workspace, cudaStream_t stream);

/* As launch_expert_product of down, but that it rotates the hidden rows where the expert wants it. */
cudaError_t launch_batch_down(const GroupParams &params, const BatchPlan &plan, void *workspace, cudaStream_t stream);

/* Tells the current device, which has the kernels, what they need of it, once, before any launch. */
cudaError_t prepare_batch_kernels(const GpuTraits &gpu);

int describe(const BatchProduct &plan, const char *name, int experts, char *text, size_t capacity);

} // namespace coli

#endif
