/* kernels/batch_kernels.h - the kernel behind batch.h, compiled for sm_90a alone. */
#ifndef COLI_CUDA_KERNELS_BATCH_KERNELS_H
#define COLI_CUDA_KERNELS_BATCH_KERNELS_H

#include "batch.h"

namespace coli {

/* The limbs of all experts of a launch (limb_tokens.cuh). */
struct Limbs {
    uint8_t *memory;
    int pass_rows; /* of each expert, those that pad it included: 8 or 16 */
};

constexpr int kBatchWarps = 16;    /* that multiply, at most, in warpgroups of four */
constexpr int kBatchFillWarps = 4; /* that fill stages: one alone would start its copies too slowly */

using BatchKernel = void (*)(GroupParams, BatchProduct, Limbs);

BatchKernel batch_kernel(const BatchProduct &plan);

} // namespace coli

#endif
