/* kernels/rotate.cuh - one thread block rotates one piece of a row.
 *
 * A rotation block of n <= 8192 is one piece: it is transformed in shared memory. A larger one is m = n / 8192 pieces,
 * since H_n = H_m (x) H_8192: piece k is the transform of sum_j +-x[8192 j + i] with the signs of row k of H_m, which its
 * thread block adds up while it loads. Every piece reads the whole block, therefore x and y must not overlap. */
#ifndef COLI_CUDA_KERNELS_ROTATE_CUH
#define COLI_CUDA_KERNELS_ROTATE_CUH

#include "../../formats/signs.h"
#include "../plan.h"

namespace coli {

/* A piece of a row: elements offset + index * size ... of a rotation block of n that starts at offset. */
struct RotationPiece {
    int offset, n, size, index;
};

__device__ inline RotationPiece rotation_piece(int dim, int piece) {
    int offset = 0;
    for (;;) {
        const int n = coli_rotation_block(dim - offset), size = n < kRotationPiece ? n : kRotationPiece, pieces = n / size;
        if (piece < pieces) return {offset, n, size, piece};
        piece -= pieces;
        offset += n;
    }
}

/* Called by all threads of the block; `buffer` holds kRotationPiece floats of shared memory. The next call may follow at
 * once: a thread fills the elements that it has read itself. */
__device__ inline void rotate_piece(const float *x, float *y, const RotationPiece &piece, bool inverse,
                                    const uint8_t *signs, float *buffer) {
    const int parts = piece.n / piece.size;
    for (int i = threadIdx.x; i < piece.size; i += blockDim.x) {
        float sum = 0.0f;
        for (int j = 0; j < parts; j++) {
            const int element = j * piece.size + i;
            const uint32_t random = inverse ? 0u : coli_sign(signs, piece.n, element);
            const uint32_t negative = random ^ (__popc(j & piece.index) & 1u);
            const float value = x[piece.offset + element];
            sum += negative ? -value : value;
        }
        buffer[i] = sum;
    }
    for (int stride = 1; stride < piece.size; stride *= 2) {
        __syncthreads();
        for (int pair = threadIdx.x; pair < piece.size / 2; pair += blockDim.x) {
            const int i = 2 * pair - (pair & (stride - 1));
            const float a = buffer[i], b = buffer[i + stride];
            buffer[i] = a + b;
            buffer[i + stride] = a - b;
        }
    }
    __syncthreads();
    const float scale = 1.0f / sqrtf(static_cast<float>(piece.n));
    for (int i = threadIdx.x; i < piece.size; i += blockDim.x) {
        const int element = piece.index * piece.size + i;
        const float value = buffer[i] * scale;
        y[piece.offset + element] = inverse && coli_sign(signs, piece.n, element) ? -value : value;
    }
}

} // namespace coli

#endif
