/* kernels/prefill.h - groups of experts with many activation rows, and matrices with many: on tensor cores, with
 * activations in fp16.
 *
 * Every row of activations is multiplied with the power of two that brings its largest value to 2^13 ... 2^14 and rounded
 * to fp16, with a relative error of 2^-11 at most. What rounding takes away is multiplied too, as fp16 again: of all
 * columns where params.exact asks for it, else of every second quad. Weights are exact. Relative RMS errors with random
 * data:
 *
 *                                of a product    of a group
 *     all columns rounded        2.1e-4          3.6e-4         x by sqrt(2), as gate and up share it, and hidden rows
 *     every second quad exact    1.5e-4          2.5e-4         as it is
 *     exact                      below 3e-6      below 3e-6
 *
 * A group of few columns strays to 2.9e-4. The bounded activation magnifies errors where it saturates: 2.7e-4 with gates
 * and ups of 1 as RMS, 3.1e-4 with 3, 4.7e-4 with 10.
 *
 * Three or four launches: prepare x | hidden = activation(gate x, up x) | prepare hidden, rotated where down wants it |
 * y = down hidden. */
#ifndef COLI_CUDA_KERNELS_PREFILL_H
#define COLI_CUDA_KERNELS_PREFILL_H

#include "expert.h"

namespace coli {

/* One launch of kernels/prefill_product.cuh. Offsets are bytes in a block's shared memory, which begins with the E8
 * codebook where there is one. */
struct PrefillProduct {
    bool wgmma;     /* Hopper's matrix unit and copy engine; else mma and asynchronous copies */
    bool hidden;    /* gate and up; else down */
    bool codebook;  /* a matrix is E8 */
    bool exact;     /* what rounding takes from activations is multiplied too, of all columns */
    int warps;      /* that multiply, of a block */
    int sets;       /* strips that a warp multiplies with the same tokens: 1 or 2 (hidden: gate's and up's) */
    int token_tile; /* tokens of an item, at most */
    int items, blocks;
    int stages, slot_bytes, stage_bytes, ring_offset, barriers_offset, shared_bytes;
};

struct PrefillPlan {
    bool possible; /* false: shared memory is too small */
    int prepare_blocks;
    bool rotates;
    PrefillProduct hidden, down;
};

/* Whether all matrices have formats that these kernels take; of a lone product, `down` alone counts. */
bool prefill_supports(const GroupParams &params);
bool prefill_supports_down(const GroupParams &params);

/* Rows of experts may lie apart, but must be in the experts' order. */
PrefillPlan plan_prefill(const GpuTraits &gpu, const GroupParams &params);
PrefillPlan plan_prefill_down(const GpuTraits &gpu, const GroupParams &params);

/* Bytes of the prepared rows: `rows` of up to `columns` columns, of `experts` experts; rows between theirs count. 256-byte
 * aligned. */
size_t prefill_workspace_bytes(int rows, int columns, int experts);

/* As launch_expert_group. Writes params.hidden, and params.rotated where an expert's hidden rows are rotated. */
cudaError_t launch_prefill_group(const GroupParams &params, const PrefillPlan &plan, void *workspace, cudaStream_t stream);

/* As launch_expert_product of down, but that it rotates the hidden rows where the expert wants it. */
cudaError_t launch_prefill_down(const GroupParams &params, const PrefillPlan &plan, void *workspace, cudaStream_t stream);

/* Tells the current device, of compute capability 8.0 at least, what the kernels need of it, once, before any launch. */
cudaError_t prepare_prefill_kernels(const GpuTraits &gpu);

} // namespace coli

#endif
