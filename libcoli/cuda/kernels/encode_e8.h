/* kernels/encode_e8.h - E8 from float32: the very bytes that libcoli's encoder chooses (core/encode_e8.c). */
#ifndef COLI_CUDA_KERNELS_ENCODE_E8_H
#define COLI_CUDA_KERNELS_ENCODE_E8_H

#include "../gpu.h"
#include "../tables.h"

namespace coli {

struct EncodeParams {
    const float *w; /* [rows, columns], rotated already where they are to be */
    int rows, columns;
    const float *importance; /* [columns], 0 or more, for the search; or NULL */
    const EncoderCodebook *codebook;
    uint8_t *blocks; /* [rows, super-blocks of a row, COLI_E8_BLOCK_BYTES] */
    int *not_finite; /* becomes 1 when a weight is NaN or infinite; pinned memory */
};

/* The reference rule. Fewer than 2^31 super-blocks. */
cudaError_t launch_encode_reference(const EncodeParams &params, cudaStream_t stream);
/* Replaces blocks that hold the reference rule's choice by what the search finds, where that is better. */
cudaError_t launch_encode_search(const EncodeParams &params, cudaStream_t stream);

} // namespace coli

#endif
