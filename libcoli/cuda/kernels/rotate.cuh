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

/* Stages of the transform whose strides are stride, 2 stride ... RADIX / 2 stride, on elements 0 ... size - 1. A thread
 * reads and writes the same RADIX elements at a time, so load and store may be of one place. */
template <int RADIX, class Load, class Store>
__device__ __forceinline__ void transform_pass(int size, int stride, Load load, Store store) {
    for (int i = threadIdx.x; i < size / RADIX; i += blockDim.x) {
        const int first = (i & ~(stride - 1)) * RADIX + (i & (stride - 1));
        float v[RADIX];
#pragma unroll
        for (int j = 0; j < RADIX; j++) v[j] = load(first + j * stride);
#pragma unroll
        for (int distance = 1; distance < RADIX; distance *= 2) {
#pragma unroll
            for (int j = 0; j < RADIX; j++) {
                if (j & distance) continue;
                const float a = v[j], b = v[j | distance];
                v[j] = a + b;
                v[j | distance] = a - b;
            }
        }
#pragma unroll
        for (int j = 0; j < RADIX; j++) store(first + j * stride, v[j]);
    }
}

/* The radix by which passes of 8 remain. */
template <class Load, class Store> __device__ void first_pass(int size, Load load, Store store) {
    switch ((31 - __clz(size)) % 3) {
    case 1:
        return transform_pass<2>(size, 1, load, store);
    case 2:
        return transform_pass<4>(size, 1, load, store);
    default:
        return size == 1 ? transform_pass<1>(1, 1, load, store) : transform_pass<8>(size, 1, load, store);
    }
}

/* All stages of the transform of `size` elements, from those that load_first gives to those that store_last takes. Called
 * by all threads of the block; `buffer` holds `size` floats of shared memory. */
template <class Load, class Store>
__device__ __forceinline__ void transform(int size, Load load_first, Store store_last, float *buffer) {
    const int odd_stages = (31 - __clz(size)) % 3;
    const auto load = [&](int i) { return buffer[i]; };
    const auto store = [&](int i, float value) { buffer[i] = value; };

    int stride = odd_stages ? 1 << odd_stages : 8;
    if (stride >= size) return first_pass(size, load_first, store_last);
    first_pass(size, load_first, store);
    for (; 8 * stride < size; stride *= 8) {
        __syncthreads();
        transform_pass<8>(size, stride, load, store);
    }
    __syncthreads();
    transform_pass<8>(size, stride, load, store_last);
}

/* Called by all threads of the block; `buffer` holds piece.size floats of shared memory. The next call may follow after a
 * barrier, and if y is in shared memory a barrier must come before it is read. */
__device__ inline void rotate_piece(const float *x, float *y, const RotationPiece &piece, bool inverse,
                                    const uint8_t *signs, float *buffer) {
    const int parts = piece.n / piece.size;
    const float scale = 1.0f / sqrtf(static_cast<float>(piece.n));
    const auto load_signed = [&](int i) {
        float sum = 0.0f;
        for (int j = 0; j < parts; j++) {
            const int element = j * piece.size + i;
            const uint32_t random = inverse ? 0u : coli_sign(signs, piece.n, element);
            const uint32_t negative = random ^ (__popc(j & piece.index) & 1u);
            const float value = x[piece.offset + element];
            sum += negative ? -value : value;
        }
        return sum;
    };
    const auto store_scaled = [&](int i, float value) {
        const int element = piece.index * piece.size + i;
        value *= scale;
        y[piece.offset + element] = inverse && coli_sign(signs, piece.n, element) ? -value : value;
    };
    transform(piece.size, load_signed, store_scaled, buffer);
}

/* A whole row of blocks of at most kRotationPiece elements, into shared memory. */
__device__ inline void rotate_row(const float *x, float *y, int dim, const uint8_t *signs) {
    for (int offset = 0; offset < dim;) {
        const int n = coli_rotation_block(dim - offset);
        rotate_piece(x, y, {offset, n, n, 0}, false, signs, y + offset);
        offset += n;
    }
}

} // namespace coli

#endif
