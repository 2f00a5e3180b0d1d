#include "matmul.h"

#include "dot.cuh"
#include "rows.h"

namespace coli {

namespace {

template <int ROWS> __global__ void __launch_bounds__(kProductThreads, 1) matmul(const MatmulParams p) {
    __shared__ ProductMemory<ROWS> memory;
    load_tables(memory.tables, *p.tables);
    const int warp = threadIdx.x / kWarp, r = threadIdx.x % kWarp, o = blockIdx.x * kWarpsPerBlock + warp;
    for (size_t first = static_cast<size_t>(blockIdx.y) * ROWS; first < static_cast<size_t>(p.S);
         first += static_cast<size_t>(gridDim.y) * ROWS) {
        const int rows = min(ROWS, static_cast<int>(p.S - first));
        dot_rows<ROWS>(p.w, p.O, p.I, o, {p.x + first * p.I, p.I, rows}, memory, 0);
        if (r < rows && o < p.O) p.y[(first + r) * p.O + o] = memory.sums[0][warp][r];
    }
}

} // namespace

cudaError_t launch_matmul(const MatmulParams &params, const ProductPlan &plan, cudaStream_t stream) {
    with_rows(plan.rows_per_pass, [&](auto rows) {
        matmul<decltype(rows)::value><<<dim3(plan.row_blocks, plan.passes), kProductThreads, 0, stream>>>(params);
    });
    return cudaGetLastError();
}

} // namespace coli
