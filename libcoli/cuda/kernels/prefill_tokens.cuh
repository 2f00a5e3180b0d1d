/* kernels/prefill_tokens.cuh - activation rows as prefill products take them: "tokens", fp16, in device memory.
 *
 * They lie as shared memory is to have them (ptx/wgmma.cuh), so that plain copies fetch them. An expert's tokens are blocks
 * of 64 columns one after another; a block is its rows of 128 bytes, whose eight pieces of 16 bytes have places
 * piece ^ (row % 8):
 *
 *                    128 bytes
 *                 +---+---+- ... -+
 *     token  0    | 0 | 1 |       |     columns 0...63
 *     token  1    | 1 | 0 |       |
 *       ...             ...
 *     (padded to 8 rows)
 *     token  0    | 0 | 1 |       |     columns 64...127
 *       ...
 *
 * Any run of tokens from a multiple of 8 on is one piece of memory in every block. Columns go up to a whole tile of
 * weights; those beyond the row are zero.
 *
 * The order of columns is that in which Half::codes (tiles.cuh) gives weights: of a sub-block of 32 columns, piece 2 h + q
 * has the pairs of columns 8 t + 4 h + 2 q, + 1 for t = 0..3. */
#ifndef COLI_CUDA_KERNELS_PREFILL_TOKENS_CUH
#define COLI_CUDA_KERNELS_PREFILL_TOKENS_CUH

#include "activations.cuh"
#include "prefill_kernels.h"

namespace coli {

constexpr int kTokenBytes = 128;
constexpr int kTokenColumns = 64;
constexpr int kTokenGroup = 8; /* rows that places go round in */
constexpr int kTileTokenBlocks = kTileColumns / kTokenColumns;

COLI_FN int pad_tokens(int rows) {
    return coli_ceil_div(rows, kTokenGroup) * kTokenGroup;
}

/* The place of expert e's first token among those of all. `row` is its first row, counted from the first expert's: experts
 * begin at multiples of 8 whatever their rows, and nobody has to add up. */
COLI_FN int first_token(int row, int e) {
    return pad_tokens(row) + kTokenGroup * e;
}

/* An expert's tokens. */
struct ExpertTokens {
    uint8_t *halves;
    float *factors;
    int padded;

    __device__ __forceinline__ uint8_t *row(int block, int token) const {
        return halves + (static_cast<size_t>(block) * padded + token) * kTokenBytes;
    }
};

__device__ __forceinline__ ExpertTokens expert_tokens(const Tokens &tokens, int first, int rows, int columns) {
    const size_t row_bytes = static_cast<size_t>(tile_count(columns)) * kTileColumns * 2;
    return {tokens.halves + first * row_bytes, tokens.factors + first, pad_tokens(rows)};
}

/* Columns `column` and the next, scaled; zero where there is none. */
__device__ __forceinline__ uint32_t token_pair(const float *row, int column, int columns, float factor) {
    const float *p = row + column;
    if (column + 2 <= columns && reinterpret_cast<uintptr_t>(p) % 8 == 0) {
        const float2 pair = *reinterpret_cast<const float2 *>(p);
        return round_pair(pair.x * factor, pair.y * factor);
    }
    return round_pair(column < columns ? p[0] * factor : 0.0f, column + 1 < columns ? p[1] * factor : 0.0f);
}

/* All threads of the block turn a row into token `token`. `warps_largest` has a float for each warp. */
__device__ inline void prepare_token(const float *row, int columns, const ExpertTokens &tokens, int token,
                                     float *warps_largest) {
    float largest = 0.0f;
    for (int column = 4 * threadIdx.x; column < columns; column += 4 * blockDim.x) {
        const float4 v = load_quad(row, column, columns);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
    for (int distance = kWarp / 2; distance; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, distance));
    if (threadIdx.x % kWarp == 0) warps_largest[threadIdx.x / kWarp] = largest;
    __syncthreads();
    for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; i++) largest = fmaxf(largest, warps_largest[i]);
    __syncthreads(); /* the next row may follow */

    const int exponent = max(static_cast<int>(coli_f32_to_bits(largest) >> 23) - 127, -100);
    const float factor = power_of_two(13 - exponent);
    if (threadIdx.x == 0) tokens.factors[token] = power_of_two(exponent - 13);
    for (int i = threadIdx.x; i < tile_count(columns) * kTileColumns / COLI_LANE; i += blockDim.x) {
        const int subblock = i / 4, h = i / 2 % 2, q = i % 2, first = kSubblockColumns * subblock + 4 * h + 2 * q;
        const uint4 piece = {token_pair(row, first, columns, factor), token_pair(row, first + 8, columns, factor),
                             token_pair(row, first + 16, columns, factor), token_pair(row, first + 24, columns, factor)};
        const int place = i % 8 ^ token % kTokenGroup;
        *reinterpret_cast<uint4 *>(tokens.row(i / 8, token) + kPieceBytes * place) = piece;
    }
}

} // namespace coli

#endif
