/* kernels/rotate.h - rotation of rows: random signs, Walsh-Hadamard transform, 1 / sqrt(n), block by block. */
#ifndef COLI_CUDA_KERNELS_ROTATE_H
#define COLI_CUDA_KERNELS_ROTATE_H

#include "../gpu.h"
#include "../plan.h"
#include "../tables.h"

namespace coli {

struct RotateParams {
    const float *x; /* [rows, dim] */
    float *y;       /* [rows, dim], not overlapping x */
    int rows, dim;
    bool inverse;
    const DeviceTables *tables;
};

cudaError_t launch_rotate(const RotateParams &params, const RotationPlan &plan, cudaStream_t stream);
/* The same bits as coli_rotate_rows, in blocks of more than kRotationPiece too; zeros may have another sign. `inverse` is
 * not looked at. */
cudaError_t launch_rotate_as_cpu(const RotateParams &params, const RotationPlan &plan, cudaStream_t stream);

} // namespace coli

#endif
