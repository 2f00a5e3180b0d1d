/* kernels/expert.h - a group of experts, y = down(activation(gate x, up x)), in two or three launches. */
#ifndef COLI_CUDA_KERNELS_EXPERT_H
#define COLI_CUDA_KERNELS_EXPERT_H

#include "../gpu.h"
#include "../layout.h"
#include "../plan.h"
#include "../tables.h"
#include "coli/coli_cuda.h"

namespace coli {

struct Activation {
    enum Kind { kSilu, kSitu } kind = kSilu;
    float b1 = 0, b2 = 0; /* bounds of kSitu: b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2) */
};

struct ExpertEntry {
    MatrixView gate, up, down;
    int first_row, rows; /* of x, y and the hidden rows */
    bool rotate_hidden;  /* down is E8, stored rotated */
};

/* Passed by value as kernel parameter, so that a launch needs no copy and a CUDA graph keeps it. */
struct GroupParams {
    int D, H; /* gate and up [H, D], down [D, H] */
    int count, max_rows;
    bool pinned; /* results are not to depend on the number of rows, however many there are */
    bool exact;  /* the prefill kernels are not to round activations */
    Activation activation;
    const float *x; /* [rows, D] */
    float *y;       /* [rows, D] */
    float *hidden;  /* [rows, H]; of a plain product its activations, which stay as they are */
    float *rotated; /* [rows, H], not overlapping hidden */
    void *prepared; /* what the batch and prefill kernels make of activations */
    const DeviceTables *tables;
    ExpertEntry experts[COLI_CUDA_MAX_EXPERTS];
};

/* hidden = activation(gate x, up x); then rotated = rotation of the hidden rows, where an expert wants it and the down
 * product does not do it itself; then y = down of either. */
cudaError_t launch_expert_group(const GroupParams &params, const GroupPlan &plan, cudaStream_t stream);

/* One product of it, as the plan says: hidden = activation(gate x, up x), or y = down of hidden. */
cudaError_t launch_expert_product(const GroupParams &params, const ProductPlan &plan, cudaStream_t stream);

/* Tells the current device what the kernels need of it, once, before any launch. */
cudaError_t prepare_expert_kernels(const GpuTraits &gpu);

} // namespace coli

#endif
