/* kernels/combine.h - the rows of experts summed up to those of tokens. */
#ifndef COLI_CUDA_KERNELS_COMBINE_H
#define COLI_CUDA_KERNELS_COMBINE_H

#include "../gpu.h"

namespace coli {

struct CombineParams {
    const float *rows; /* [count, D] */
    const int *row_tokens;
    const float *row_weights;
    float *y; /* [tokens, D] */
    int count, tokens, D;
};

/* y[t] = sum of weight * row over the rows of token t, in their order. */
cudaError_t launch_combine(const CombineParams &params, bool overlapping, cudaStream_t stream);

} // namespace coli

#endif
