#include "combine.h"

#include <algorithm>

#include "../plan.h"
#include "../ptx/dependent.cuh"
#include "launch.h"

namespace coli {

namespace {

constexpr int kCombineThreads = 256;

/* A block has kCombineThreads columns of a token. All its threads look through the rows together: few are this token's. */
__global__ void __launch_bounds__(kCombineThreads) combine(const CombineParams p) {
    __shared__ int token_of[kCombineThreads];
    dependency_trigger();
    dependency_wait();
    const int column = blockIdx.x * kCombineThreads + threadIdx.x;
    for (int token = blockIdx.y; token < p.tokens; token += gridDim.y) {
        float sum = 0.0f;
        for (int first = 0; first < p.count; first += kCombineThreads) {
            const int here = min(kCombineThreads, p.count - first);
            __syncthreads(); /* the last ones were read */
            if (static_cast<int>(threadIdx.x) < here) token_of[threadIdx.x] = p.row_tokens[first + threadIdx.x];
            __syncthreads();
            for (int i = 0; i < here; i++) {
                if (token_of[i] != token || column >= p.D) continue;
                const float row = p.rows[static_cast<size_t>(first + i) * p.D + column];
                sum = __fadd_rn(sum, __fmul_rn(p.row_weights[first + i], row)); /* rounded twice, as any host can */
            }
        }
        if (column < p.D) p.y[static_cast<size_t>(token) * p.D + column] = sum;
    }
}

} // namespace

cudaError_t launch_combine(const CombineParams &params, bool overlapping, cudaStream_t stream) {
    /* blocks go on to further tokens */
    const dim3 grid(coli_ceil_div(params.D, kCombineThreads), std::min(params.tokens, kMaxGrid));
    return launch(combine, grid, kCombineThreads, 0, overlapping, stream, params);
}

} // namespace coli
