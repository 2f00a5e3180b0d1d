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

/* In the order of the CPU: the stages within pieces first, and then those across (join_pieces). */
__global__ void __launch_bounds__(kRotationThreads) rotate_pieces(const RotateParams p) {
    __shared__ float buffer[kRotationPiece];
    const RotationPiece piece = rotation_piece(p.dim, blockIdx.x);
    const int first = piece.index * piece.size;
    const float scale = piece.size == piece.n ? 1.0f / sqrtf(static_cast<float>(piece.n)) : 1.0f;
    for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const size_t start = static_cast<size_t>(row) * p.dim + piece.offset + first;
        const auto load = [&](int, int i) {
            const float value = p.x[start + i];
            return coli_sign(p.tables->signs, piece.n, first + i) ? -value : value;
        };
        const auto store = [&](int, int i, float value) { p.y[start + i] = value * scale; };
        transform_rows(WholeBlock{}, 1, piece.size, buffer, 0, load, store);
        __syncthreads(); /* the buffer was read */
    }
}

/* A thread block joins the pieces of a whole rotation block. */
__global__ void __launch_bounds__(kRotationThreads) join_pieces(const RotateParams p) {
    const RotationPiece piece = rotation_piece(p.dim, blockIdx.x);
    if (piece.size == piece.n || piece.index > 0) return;
    const float scale = 1.0f / sqrtf(static_cast<float>(piece.n));
    for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
        float *y = p.y + static_cast<size_t>(row) * p.dim + piece.offset;
        const auto load = [&](int, int i) { return y[i]; };
        const auto store = [&](int, int i, float value) { y[i] = value * scale; };
        if (piece.n == 2 * piece.size)
            transform_pass<2>(WholeBlock{}, 1, piece.n, piece.size, load, store);
        else
            transform_pass<COLI_ROTATION_MAX_BLOCK / kRotationPiece>(WholeBlock{}, 1, piece.n, piece.size, load, store);
    }
}

} // namespace

cudaError_t launch_rotate(const RotateParams &params, const RotationPlan &plan, cudaStream_t stream) {
    rotate<<<dim3(plan.pieces, plan.rows), kRotationThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

cudaError_t launch_rotate_as_cpu(const RotateParams &params, const RotationPlan &plan, cudaStream_t stream) {
    const dim3 grid(plan.pieces, plan.rows);
    rotate_pieces<<<grid, kRotationThreads, 0, stream>>>(params);
    if (params.dim > kRotationPiece) join_pieces<<<grid, kRotationThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

} // namespace coli
