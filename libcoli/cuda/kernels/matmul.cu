#include "matmul.h"

#include "../plan.h"
#include "dot.cuh"
#include "rows.h"

namespace coli {

namespace {

template <int ROWS> __global__ void __launch_bounds__(kWarp *kWarpsPerBlock) matmul(const MatmulParams p) {
    __shared__ SharedTables tables;
    load_tables(tables, *p.tables);
    const int o = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp;
    if (o >= p.O) return;
    for (size_t first = static_cast<size_t>(blockIdx.y) * ROWS; first < static_cast<size_t>(p.S);
         first += static_cast<size_t>(gridDim.y) * ROWS) {
        const int rows = min(ROWS, static_cast<int>(p.S - first));
        float sums[ROWS];
        dot_row<ROWS>(p.w, p.O, p.I, o, ActivationRows(p.x + first * p.I, p.I, rows), tables, sums);
        if (threadIdx.x % kWarp) continue;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r < rows) p.y[(first + r) * p.O + o] = sums[r];
        }
    }
}

} // namespace

cudaError_t launch_matmul(const MatmulParams &params, cudaStream_t stream) {
    const ProductPlan plan = plan_product(params.O, params.S);
    with_rows(plan.rows_per_pass, [&](auto rows) {
        matmul<decltype(rows)::value><<<dim3(plan.row_blocks, plan.passes), kWarp * kWarpsPerBlock, 0, stream>>>(params);
    });
    return cudaGetLastError();
}

} // namespace coli
