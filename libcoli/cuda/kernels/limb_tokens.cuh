/* kernels/limb_tokens.cuh - activation rows as limbs (limbs.cuh) for Hopper's matrix unit: halves in device memory that lie
 * as shared memory is to have them (ptx/wgmma.cuh), so that plain copies fetch them.
 *
 * A pass is the rows of an expert, padded to 8 or 16, and has 4 columns a row: column 32 k + 8 l + i is limb l of row 8 k +
 * i, so that the limbs of a row meet in one lane. For each tile of weights it has four blocks of 64 values of all its
 * columns, and behind them for each row the factor of the slice, a float:
 *
 *                       128 bytes
 *                    +---+---+- ... -+
 *     column   0     | 0 | 1 |       |     block 0
 *     column   1     | 1 | 0 |       |
 *       ...               ...
 *     column  31     |               |     (63 with 16 rows)
 *     column   0     | 0 | 1 |       |     block 1
 *       ...
 *     factors of rows 0 ... 7 or 15
 *     column   0     | 0 | 1 |       |     block 0 of the next tile
 *       ...
 *
 * The eight pieces of 16 bytes of a column have places piece ^ (column % 8). The order of values is that of tokens
 * (prefill_tokens.cuh). */
#ifndef COLI_CUDA_KERNELS_LIMB_TOKENS_CUH
#define COLI_CUDA_KERNELS_LIMB_TOKENS_CUH

#include "batch_kernels.h"
#include "limbs.cuh"

namespace coli {

constexpr int kLimbBlockColumns = 64; /* weight columns of a block */
constexpr int kLimbColumnBytes = 2 * kLimbBlockColumns;
constexpr int kTileBlocks = kTileColumns / kLimbBlockColumns;
constexpr int kRowGroup = 8;

/* Bytes of the blocks of a tile, and with the factors. */
COLI_FN int pass_blocks_bytes(int rows) {
    return kLimbs * rows * kTileBlocks * kLimbColumnBytes;
}
COLI_FN int pass_stage_bytes(int rows) {
    return pass_blocks_bytes(rows) + rows * static_cast<int>(sizeof(float));
}
COLI_FN size_t pass_bytes(int rows, int columns) {
    return static_cast<size_t>(tile_count(columns)) * pass_stage_bytes(rows);
}
COLI_FN int slice_count(int columns) {
    return coli_ceil_div(columns, kSliceColumns);
}

/* The pass of expert e, whose rows have `columns` columns. */
__device__ __forceinline__ uint8_t *limb_pass(const Limbs &limbs, int e, int columns) {
    return limbs.memory + e * pass_bytes(limbs.pass_rows, columns);
}

/* One warp cuts a slice of row s of a pass. Of neighbours of units, the first one's lane writes eight bytes of a step's
 * first piece, the other one's of its second piece. */
__device__ __forceinline__ void cut_slice(const SliceValues &values, uint8_t *pass, int rows, int s, int slice, int tiles,
                                          int lane) {
    const LimbScale scale(largest_of(values));
    const int first_tile = kSliceTiles * slice, odd = lane / 2 % 2; /* the unit */
    if (lane < min(kSliceTiles, tiles - first_tile))
        reinterpret_cast<float *>(pass + static_cast<size_t>(first_tile + lane) * pass_stage_bytes(rows) +
                                  pass_blocks_bytes(rows))[s] = scale.inverse();
    uint8_t *column = pass + (kLimbs * kRowGroup * (s / kRowGroup) + s % kRowGroup) * kLimbColumnBytes;
#pragma unroll
    for (int j = 0; j < kSliceQuads; j++) {
        const float v[4] = {values.quads[j].x, values.quads[j].y, values.quads[j].z, values.quads[j].w};
        uint32_t bytes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) bytes[i] = limbs_to_bytes(scale.unsigned_limbs(v[i]));
        const int quad = kWarp * j + lane, tile = first_tile + quad / (kTileColumns / 4);
        const int step = quad % (kTileColumns / 4) / 8 * 2 + quad % 2;
        const int piece = (2 * (step % 4) + odd) ^ s % kRowGroup;
        uint8_t *place = column + static_cast<size_t>(tile) * pass_stage_bytes(rows) +
                         step / 4 * (kLimbs * rows * kLimbColumnBytes) + kPieceBytes * piece + 8 * (lane / 4 % 2);
#pragma unroll
        for (int l = 0; l < kLimbs; l++) {
            uint32_t pairs[2]; /* of values 0 and 2, 1 and 3; a limb in the mantissa of 1024 is 1056 more than itself */
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const uint32_t both = prmt(bytes[q], bytes[q + 2], 0x0400u + 0x0101u * l) & 0x00ff00ffu;
                pairs[q] = add_pairs(both | k1024, 0xe420e420u);
            }
            const uint32_t received = __shfl_xor_sync(kFullWarp, odd ? pairs[0] : pairs[1], 2);
            if (tile < tiles)
                *reinterpret_cast<uint2 *>(place + l * kRowGroup * kLimbColumnBytes) =
                    odd ? make_uint2(received, pairs[1]) : make_uint2(pairs[0], received);
        }
    }
}

} // namespace coli

#endif
