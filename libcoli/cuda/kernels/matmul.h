/* kernels/matmul.h - y [S, O] = x [S, I] w^T. */
#ifndef COLI_CUDA_KERNELS_MATMUL_H
#define COLI_CUDA_KERNELS_MATMUL_H

#include "../gpu.h"
#include "../layout.h"
#include "../plan.h"
#include "../tables.h"

namespace coli {

struct MatmulParams {
    MatrixView w;
    int O, I, S;
    const float *x;
    float *y;
    const DeviceTables *tables;
};

cudaError_t launch_matmul(const MatmulParams &params, const ProductPlan &plan, cudaStream_t stream);

} // namespace coli

#endif
