/* kernels/prefill_tokens.cuh - activation rows as prefill products take them: "tokens", fp16, in device memory.
 *
 * They lie as shared memory is to have them (ptx/wgmma.cuh), so that plain copies fetch them. An expert's tokens are blocks
 * of 64 values each one after another; a block is its rows of 128 bytes, whose eight pieces of 16 bytes have places
 * piece ^ (row % 8):
 *
 *                    128 bytes
 *                 +---+---+- ... -+
 *     token  0    | 0 | 1 |       |     block 0
 *     token  1    | 1 | 0 |       |
 *       ...             ...
 *     (padded to 8 rows)
 *     token  0    | 0 | 1 |       |     block 1
 *       ...
 *
 * Any run of tokens from a multiple of 8 on is one piece of memory in every block. Columns go up to a whole tile of
 * weights; those beyond the row are zero. A tile has four blocks of 64 columns each, then blocks of what rounding took from
 * them (Losses): four of them, or two with the losses of the columns with h = 0 below, of 128 columns each.
 *
 * The order of columns is that in which Half::codes (tiles.cuh) gives weights: of a sub-block of 32 columns, piece 2 h + q
 * has the pairs of columns 8 t + 4 h + q, + 2 for t = 0..3. Pieces 2 h and 2 h + 1 are what one product takes, a step. */
#ifndef COLI_CUDA_KERNELS_PREFILL_TOKENS_CUH
#define COLI_CUDA_KERNELS_PREFILL_TOKENS_CUH

#include "activations.cuh"
#include "prefill_kernels.h"
#include "tile_product.cuh"

namespace coli {

constexpr int kTokenBytes = 128;
constexpr int kTokenColumns = 64;
constexpr int kTokenGroup = 8; /* rows that places go round in */
constexpr int kTileValueBlocks = kTileColumns / kTokenColumns;

/* Which steps have losses, EXACT all of them, and where they are, counted in steps as the values are. */
template <bool EXACT> struct Losses {
    static __device__ constexpr bool of(int step) { return EXACT || step % 2 == 0; }
    static __device__ constexpr int step(int values) { return kTileSteps + (EXACT ? values : values / 2); }
};
COLI_FN constexpr int token_blocks_of_tile(bool exact) {
    return exact ? 2 * kTileValueBlocks : kTileValueBlocks + kTileValueBlocks / 2;
}

COLI_FN size_t token_row_bytes(int columns, bool exact) {
    return static_cast<size_t>(tile_count(columns)) * token_blocks_of_tile(exact) * kTokenBytes;
}

/* Bytes of a stage's tokens. */
COLI_FN int token_stage_bytes(const PrefillProduct &plan) {
    return plan.token_tile * token_blocks_of_tile(plan.exact) * kTokenBytes;
}

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

__device__ __forceinline__ ExpertTokens expert_tokens(const Tokens &tokens, int first, int rows, int columns, bool exact) {
    return {tokens.halves + first * token_row_bytes(columns, exact), tokens.factors + first, pad_tokens(rows)};
}

/*------   Preparing a row   ------*/

constexpr int kPrepareThreads = 256;
constexpr int kTileQuads = kTileColumns / 4;

/* What rounding took away; of infinities 0, as their difference would be NaN. */
__device__ __forceinline__ float lost(float value, float rounded) {
    return value == rounded ? 0.0f : value - rounded;
}
__device__ __forceinline__ uint32_t lost_pair(float first, float second, uint32_t rounded) {
    const float2 kept = pair_floats(rounded);
    return round_pair(lost(first, kept.x), lost(second, kept.y));
}

/* Where a thread writes its quads of a token: one of the 64 quads of every tile that it takes part in. */
template <bool EXACT> class QuadWriter {
  public:
    __device__ __forceinline__ QuadWriter(const ExpertTokens &tokens, int token)
        : tile_pitch_(static_cast<size_t>(token_blocks_of_tile(EXACT)) * tokens.padded * kTokenBytes),
          odd_(threadIdx.x / 2 % 2) {
        const int quad = threadIdx.x % kTileQuads, step = quad / 8 * 2 + quad % 2;
        values_ = place(tokens, token, step);
        losses_ = Losses<EXACT>::of(step) ? place(tokens, token, Losses<EXACT>::step(step)) : nullptr;
    }
    /* The quad of a tile, already scaled; all threads of a warp at once. */
    __device__ __forceinline__ void store(int tile, float4 v) const {
        const uint2 values = {round_pair(v.x, v.z), round_pair(v.y, v.w)};
        store(values_, tile, values);
        store(losses_, tile, {lost_pair(v.x, v.z, values.x), lost_pair(v.y, v.w, values.y)});
    }

  private:
    /* Of units 2 k and 2 k + 1, the first one's lane writes eight bytes of a step's first piece, the other one's of its
     * second piece. */
    __device__ __forceinline__ uint8_t *place(const ExpertTokens &tokens, int token, int step) const {
        const int piece = (2 * (step % 4) + odd_) ^ token % kTokenGroup;
        return tokens.row(step / 4, token) + kPieceBytes * piece + 8 * (threadIdx.x / 4 % 2);
    }
    __device__ __forceinline__ void store(uint8_t *where, int tile, uint2 pairs) const {
        const uint32_t received = __shfl_xor_sync(kFullWarp, odd_ ? pairs.x : pairs.y, 2);
        if (!where) return;
        *reinterpret_cast<uint2 *>(where + tile * tile_pitch_) =
            odd_ ? make_uint2(received, pairs.y) : make_uint2(pairs.x, received);
    }

    uint8_t *values_, *losses_;
    size_t tile_pitch_;
    int odd_;
};

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
    for (int i = 0; i < kPrepareThreads / kWarp; i++) largest = fmaxf(largest, of_warps[i]);
    return largest;
}

/* All kPrepareThreads of a block turn a row, in global or shared memory, into token `token`. Each thread reads HELD quads
 * once, into registers, and those of longer rows again. `of_warps` as above, and a barrier before the next row. */
template <int HELD, bool EXACT>
__device__ inline void prepare_token(const float *row, int columns, const ExpertTokens &tokens, int token,
                                     float *of_warps) {
    constexpr int kTilesAtOnce = kPrepareThreads / kTileQuads;
    const int tiles = tile_count(columns), first = threadIdx.x / kTileQuads, column = 4 * (threadIdx.x % kTileQuads);
    const auto load = [&](int tile) { return load_quad(row, kTileColumns * tile + column, columns); };
    float4 held[HELD];
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int tile = first + kTilesAtOnce * j;
        held[j] = tile < tiles ? load(tile) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < HELD; j++) largest = fmaxf(largest, largest_of(held[j]));
    for (int tile = first + kTilesAtOnce * HELD; tile < tiles; tile += kTilesAtOnce)
        largest = fmaxf(largest, largest_of(load(tile)));
    largest = largest_of_block(largest, of_warps);

    const int exponent = max(static_cast<int>(coli_f32_to_bits(largest) >> 23) - 127, -100);
    const float factor = power_of_two(13 - exponent);
    if (threadIdx.x == 0) tokens.factors[token] = power_of_two(exponent - 13);
    const QuadWriter<EXACT> writer(tokens, token);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int tile = first + kTilesAtOnce * j;
        if (tile < tiles) writer.store(tile, scaled(held[j], factor));
    }
    for (int tile = first + kTilesAtOnce * HELD; tile < tiles; tile += kTilesAtOnce)
        writer.store(tile, scaled(load(tile), factor));
}

} // namespace coli

#endif
