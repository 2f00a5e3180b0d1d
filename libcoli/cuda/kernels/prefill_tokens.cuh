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

/* Four columns of a token, quad i of its row, already scaled; lanes are neighbours in i. Lanes of units 2 k and 2 k + 1
 * exchange pairs, so that each writes eight bytes of one piece. */
__device__ __forceinline__ void store_quad(const ExpertTokens &tokens, int token, int i, float4 v) {
    const int subblock = i / 8, unit = i / 2 % 4, h = i % 2, odd = unit % 2;
    const uint32_t first = round_pair(v.x, v.y), second = round_pair(v.z, v.w);
    const uint32_t received = __shfl_xor_sync(kFullWarp, odd ? first : second, 2);
    const int piece = 4 * (subblock % 2) + 2 * h + odd, place = piece ^ token % kTokenGroup;
    *reinterpret_cast<uint2 *>(tokens.row(subblock / 2, token) + kPieceBytes * place + 8 * (unit / 2)) =
        odd ? make_uint2(received, second) : make_uint2(first, received);
}

__device__ __forceinline__ float largest_of(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
__device__ __forceinline__ float4 scaled(float4 v, float factor) {
    return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
}

/* The largest value of any thread of the block. `of_warps` has a float for each warp; a barrier must come before it is used
 * again. */
__device__ __forceinline__ float largest_of_block(float largest, float *of_warps) {
    for (int distance = kWarp / 2; distance; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, distance));
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = largest;
    __syncthreads();
    for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; i++) largest = fmaxf(largest, of_warps[i]);
    return largest;
}

/* All threads of the block turn a row, in global or shared memory, into token `token`. Each thread reads HELD quads once,
 * into registers, and those of longer rows again. `of_warps` as above, and a barrier before the next row. */
template <int HELD>
__device__ inline void prepare_token(const float *row, int columns, const ExpertTokens &tokens, int token,
                                     float *of_warps) {
    const int quads = tile_count(columns) * kTileColumns / 4, rest = threadIdx.x + HELD * blockDim.x;
    float4 held[HELD];
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        held[j] = i < quads ? load_quad(row, 4 * i, columns) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < HELD; j++) largest = fmaxf(largest, largest_of(held[j]));
    for (int i = rest; i < quads; i += blockDim.x) largest = fmaxf(largest, largest_of(load_quad(row, 4 * i, columns)));
    largest = largest_of_block(largest, of_warps);

    const int exponent = max(static_cast<int>(coli_f32_to_bits(largest) >> 23) - 127, -100);
    const float factor = power_of_two(13 - exponent);
    if (threadIdx.x == 0) tokens.factors[token] = power_of_two(exponent - 13);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < quads) store_quad(tokens, token, i, scaled(held[j], factor)); /* for a warp as a whole */
    }
    for (int i = rest; i < quads; i += blockDim.x)
        store_quad(tokens, token, i, scaled(load_quad(row, 4 * i, columns), factor));
}

} // namespace coli

#endif
