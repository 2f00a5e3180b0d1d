/* kernels/outputs.cuh - from totals of products to results: row scales, and what joins gate and up. */
#ifndef COLI_CUDA_KERNELS_OUTPUTS_CUH
#define COLI_CUDA_KERNELS_OUTPUTS_CUH

#include "expert.h"

namespace coli {

__device__ __forceinline__ float row_scale(const MatrixView &matrix, int row) {
    return matrix.row_scales ? static_cast<const float *>(matrix.scales)[row] : 1.0f;
}

__device__ __forceinline__ float activate(const Activation &activation, float gate, float up) {
    const float sigmoid = 1.0f / (1.0f + expf(-gate));
    if (activation.kind == Activation::kSilu) return gate * sigmoid * up;
    const float b1 = activation.b1, b2 = activation.b2;
    return b1 * tanhf(gate / b1) * sigmoid * (b2 * tanhf(up / b2));
}

} // namespace coli

#endif
