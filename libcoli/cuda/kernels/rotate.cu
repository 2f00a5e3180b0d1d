#include "rotate.h"

#include "rotate.cuh"

namespace coli {

namespace {

__global__ void __launch_bounds__(kRotationThreads) rotate(const RotateParams p) {
    __shared__ float buffer[kRotationPiece];
    const RotationPiece piece = rotation_piece(p.dim, blockIdx.x);
    for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const size_t start = static_cast<size_t>(row) * p.dim;
        rotate_piece(p.x + start, p.y + start, piece, p.inverse, p.tables->signs, buffer);
        __syncthreads(); /* the buffer was read */
    }
}

} // namespace

cudaError_t launch_rotate(const RotateParams &params, const RotationPlan &plan, cudaStream_t stream) {
    rotate<<<dim3(plan.pieces, plan.rows), kRotationThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

} // namespace coli
