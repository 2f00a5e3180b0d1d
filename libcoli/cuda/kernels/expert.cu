#include "expert.h"

#include "dot.cuh"
#include "rotate.cuh"
#include "rows.h"

namespace coli {

namespace {

/* Grids are (weight rows, passes over an expert's activation rows, experts); a block beyond its expert's rows has nothing
 * to do. */

__device__ float activate(const Activation &activation, float gate, float up) {
    const float sigmoid = 1.0f / (1.0f + expf(-gate));
    if (activation.kind == Activation::kSilu) return gate * sigmoid * up;
    const float b1 = activation.b1, b2 = activation.b2;
    return b1 * tanhf(gate / b1) * sigmoid * (b2 * tanhf(up / b2));
}

template <int ROWS>
__global__ void __launch_bounds__(kProductThreads, 1) expert_hidden(const __grid_constant__ GroupParams p) {
    __shared__ ProductMemory<ROWS> memory;
    const ExpertEntry &expert = p.experts[blockIdx.z];
    if (static_cast<int>(blockIdx.y) * ROWS >= expert.rows) return;
    load_tables(memory.tables, *p.tables);
    const int warp = threadIdx.x / kWarp, r = threadIdx.x % kWarp, h = blockIdx.x * kWarpsPerBlock + warp;
    for (size_t first = static_cast<size_t>(blockIdx.y) * ROWS; first < static_cast<size_t>(expert.rows);
         first += static_cast<size_t>(gridDim.y) * ROWS) {
        const int rows = min(ROWS, static_cast<int>(expert.rows - first));
        const size_t row = expert.first_row + first;
#pragma unroll 1 /* the code of the products once, not twice */
        for (int is_up = 0; is_up < 2; is_up++) {
            const MatrixView &matrix = is_up ? expert.up : expert.gate;
            dot_rows<ROWS>(matrix, p.H, p.D, h, {p.x + row * p.D, p.D, rows}, memory, is_up);
        }
        if (r < rows && h < p.H) {
            const float gate = memory.sums[0][warp][r], up = memory.sums[1][warp][r];
            p.hidden[(row + r) * p.H + h] = activate(p.activation, gate, up);
        }
    }
}

__global__ void __launch_bounds__(kRotationThreads) expert_rotate(const __grid_constant__ GroupParams p) {
    __shared__ float buffer[kRotationPiece];
    const ExpertEntry &expert = p.experts[blockIdx.z];
    if (!expert.rotate_hidden) return;
    const RotationPiece piece = rotation_piece(p.H, blockIdx.x);
    for (int r = blockIdx.y; r < expert.rows; r += gridDim.y) {
        const size_t start = (static_cast<size_t>(expert.first_row) + r) * p.H;
        rotate_piece(p.hidden + start, p.rotated + start, piece, false, p.tables->signs, buffer);
    }
}

template <int ROWS>
__global__ void __launch_bounds__(kProductThreads, 1) expert_down(const __grid_constant__ GroupParams p) {
    __shared__ ProductMemory<ROWS> memory;
    const ExpertEntry &expert = p.experts[blockIdx.z];
    if (static_cast<int>(blockIdx.y) * ROWS >= expert.rows) return;
    load_tables(memory.tables, *p.tables);
    const int warp = threadIdx.x / kWarp, r = threadIdx.x % kWarp, d = blockIdx.x * kWarpsPerBlock + warp;
    const float *hidden = expert.rotate_hidden ? p.rotated : p.hidden;
    for (size_t first = static_cast<size_t>(blockIdx.y) * ROWS; first < static_cast<size_t>(expert.rows);
         first += static_cast<size_t>(gridDim.y) * ROWS) {
        const int rows = min(ROWS, static_cast<int>(expert.rows - first));
        const size_t row = expert.first_row + first;
        dot_rows<ROWS>(expert.down, p.D, p.H, d, {hidden + row * p.H, p.H, rows}, memory, 0);
        if (r < rows && d < p.D) p.y[(row + r) * p.D + d] = memory.sums[0][warp][r];
    }
}

cudaError_t launch_hidden(const GroupParams &params, const ProductPlan &plan, cudaStream_t stream) {
    const dim3 grid(plan.row_blocks, plan.passes, params.count);
    with_rows(plan.rows_per_pass,
              [&](auto rows) { expert_hidden<decltype(rows)::value><<<grid, kProductThreads, 0, stream>>>(params); });
    return cudaGetLastError();
}

cudaError_t launch_rotation(const GroupParams &params, const RotationPlan &plan, cudaStream_t stream) {
    if (plan.rows == 0) return cudaSuccess;
    expert_rotate<<<dim3(plan.pieces, plan.rows, params.count), kRotationThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

cudaError_t launch_down(const GroupParams &params, const ProductPlan &plan, cudaStream_t stream) {
    const dim3 grid(plan.row_blocks, plan.passes, params.count);
    with_rows(plan.rows_per_pass,
              [&](auto rows) { expert_down<decltype(rows)::value><<<grid, kProductThreads, 0, stream>>>(params); });
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_expert_group(const GroupParams &params, const GroupPlan &plan, cudaStream_t stream) {
    cudaError_t result = launch_hidden(params, plan.hidden, stream);
    if (result == cudaSuccess) result = launch_rotation(params, plan.rotation, stream);
    if (result == cudaSuccess) result = launch_down(params, plan.down, stream);
    return result;
}

} // namespace coli
