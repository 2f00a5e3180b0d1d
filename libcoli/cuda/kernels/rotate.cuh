/* kernels/rotate.cuh - a thread block rotates one piece of a row, or several whole rows.
 *
 * A rotation block of n <= 8192 is one piece: it is transformed in shared memory. A larger one is m = n / 8192 pieces,
 * since H_n = H_m (x) H_8192: piece k is the transform of sum_j +-x[8192 j + i] with the signs of row k of H_m, which its
 * thread block adds up while it loads. Every piece reads the whole block, therefore x and y must not overlap. */
#ifndef COLI_CUDA_KERNELS_ROTATE_CUH
#define COLI_CUDA_KERNELS_ROTATE_CUH

#include "../../formats/signs.h"
#include "../plan.h"
#include "../ptx/bits.cuh"

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

/* All threads of a block, as a team that transforms. */
struct WholeBlock {
    int count = blockDim.x;
    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

/* Stages of the transform whose strides are stride, 2 stride ... RADIX / 2 stride, on elements 0 ... size - 1 of `rows`
 * rows. A thread reads and writes the same RADIX elements at a time, so load and store may be of one place. */
template <int RADIX, class Team, class Load, class Store>
__device__ __forceinline__ void transform_pass(const Team &team, int rows, int size, int stride, Load load, Store store) {
    const int items = size / RADIX, shift = 31 - __clz(items); /* of a row, a power of two */
    for (int i = threadIdx.x; i < rows * items; i += team.count) {
        const int row = i >> shift, item = i & (items - 1);
        const int first = (item & ~(stride - 1)) * RADIX + (item & (stride - 1));
        float v[RADIX];
#pragma unroll
        for (int j = 0; j < RADIX; j++) v[j] = load(row, first + j * stride);
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
        for (int j = 0; j < RADIX; j++) store(row, first + j * stride, v[j]);
    }
}

/* Transforms `rows` rows of `size` elements, load(row, element) being where they come from, store(row, element, value)
 * where they go, buffer[row * pitch + element] where they are meanwhile. By all threads of the team, and a barrier must
 * follow. */
template <class Team, class Load, class Store>
__device__ __forceinline__ void transform_rows(const Team &team, int rows, int size, float *buffer, int pitch, Load load,
                                               Store store) {
    const auto load_buffer = [&](int row, int i) { return buffer[row * pitch + i]; };
    const auto store_buffer = [&](int row, int i, float value) { buffer[row * pitch + i] = value; };
    /* the first pass leaves passes of 8 */
    const int odd_stages = (31 - __clz(size)) % 3;
    int stride = 1 << odd_stages;
    if (size < 8) {
        if (size == 1) return transform_pass<1>(team, rows, size, 1, load, store);
        return size == 2 ? transform_pass<2>(team, rows, size, 1, load, store)
                         : transform_pass<4>(team, rows, size, 1, load, store);
    }
    if (odd_stages == 0) {
        stride = 8;
        if (size == 8) return transform_pass<8>(team, rows, size, 1, load, store);
        transform_pass<8>(team, rows, size, 1, load, store_buffer);
    } else if (odd_stages == 1) {
        transform_pass<2>(team, rows, size, 1, load, store_buffer);
    } else {
        transform_pass<4>(team, rows, size, 1, load, store_buffer);
    }
    for (; 8 * stride < size; stride *= 8) {
        team.sync();
        transform_pass<8>(team, rows, size, stride, load_buffer, store_buffer);
    }
    team.sync();
    transform_pass<8>(team, rows, size, stride, load_buffer, store);
}

/* One piece of a row, by a whole block; `buffer` holds piece.size floats of shared memory. The next call may follow after a
 * barrier. */
__device__ inline void rotate_piece(const float *x, float *y, const RotationPiece &piece, bool inverse,
                                    const uint8_t *signs, float *buffer) {
    const int parts = piece.n / piece.size;
    const float scale = 1.0f / sqrtf(static_cast<float>(piece.n));
    const auto load_signed = [&](int, int i) {
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
    const auto store_scaled = [&](int, int i, float value) {
        const int element = piece.index * piece.size + i;
        value *= scale;
        y[piece.offset + element] = inverse && coli_sign(signs, piece.n, element) ? -value : value;
    };
    transform_rows(WholeBlock{}, 1, piece.size, buffer, 0, load_signed, store_scaled);
}

/* Copies the table of signs as far as rotations of `dim` columns look into it, at most dim / 4 + 1 bytes. */
template <class Team> __device__ inline void load_signs(const Team &team, int dim, const uint8_t *table, uint8_t *signs) {
    const int bytes = dim / 4 + 1;
    /* kept: the compiler would count the rounds ahead, long before, where registers are short */
    for (int i = keep(threadIdx.x); i < bytes; i += team.count) signs[i] = table[i];
}

/* Whole rows in shared memory, of blocks of at most kRotationPiece elements, in place; a barrier before and after. */
template <class Team>
__device__ inline void rotate_rows(const Team &team, float *rows, int count, int dim, const uint8_t *signs) {
    for (int offset = 0; offset < dim;) {
        const int n = coli_rotation_block(dim - offset);
        const float scale = 1.0f / sqrtf(static_cast<float>(n));
        float *block = rows + offset;
        transform_rows(
            team, count, n, block, dim,
            [&](int row, int i) {
                const float value = block[row * dim + i];
                return coli_sign(signs, n, i) ? -value : value;
            },
            [&](int row, int i, float value) { block[row * dim + i] = value * scale; });
        offset += n;
    }
}

/* A whole row, by a whole block, into `buffer` of kRotationPiece floats in shared memory if it fits there and else to
 * `rotated`; returns where it is. */
__device__ __forceinline__ const float *rotate_row(const float *x, float *rotated, int dim, const uint8_t *signs,
                                                   float *buffer) {
    const bool fits = dim <= kRotationPiece;
    float *y = fits ? buffer : rotated;
    for (int offset = 0, index = 0; offset < dim; index++) {
        const RotationPiece piece = rotation_piece(dim, index);
        rotate_piece(x, y, piece, false, signs, fits ? buffer + piece.offset : buffer);
        __syncthreads();
        if (piece.index + 1 == piece.n / piece.size) offset = piece.offset + piece.n;
    }
    return y;
}

} // namespace coli

#endif
