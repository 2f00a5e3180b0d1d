/* kernels/tile_product.cuh - a tile of weights, decoded into registers, times many columns of activations: tokens, or limbs
 * of rows, as they lie in shared memory (prefill_tokens.cuh, limb_tokens.cuh).
 *
 * A tile is kTileSteps products of 16 columns each; those of step 2 b + h take Half::codes(b, h) (tiles.cuh). Weights of a
 * few steps are decoded together, so that waits for look-ups overlap, and their products are under way together. */
#ifndef COLI_CUDA_KERNELS_TILE_PRODUCT_CUH
#define COLI_CUDA_KERNELS_TILE_PRODUCT_CUH

#include "prefill_weights.cuh"

namespace coli {

constexpr int kTileSteps = kTileColumns / 16;

/* Where a warp is: its tile, and the columns that it is multiplied with. */
struct TileInputs {
    const uint8_t *weights, *columns;
    const MatrixView &matrix;
    const KernelTables &tables;
    int lane;
};

/* totals += tile times N columns. Losses come right behind the values, for which the weights are there. */
template <class Unit, class Losses, class Operand, int N>
__device__ __forceinline__ void multiply_tile(const TileInputs &in, float (&totals)[N / 8][4]) {
    constexpr int kChunkSteps = 2 * Operand::kChunk, kHalfSteps = kTileSteps / 2;
    constexpr int kSteps = kChunkSteps < Unit::kMaxGroupSteps ? kChunkSteps : Unit::kMaxGroupSteps;
    const TilePlace place{in.matrix, 0, 0, 0, 0};
    const Unit unit(in.columns, in.lane);
    Operand weights;
    float chunk[N / 8][4] = {};
    typename Operand::Entries entries[kSteps]; /* of the next group */
    uint32_t a[Unit::kBuffers][kSteps][4];     /* of groups that are multiplied, and of the one that is decoded */
    const auto look_up = [&](int first) {
        if (first % kHalfSteps == 0) weights.load(in.weights, first / kHalfSteps, in.lane, place);
#pragma unroll
        for (int i = 0; i < kSteps; i++)
            weights.look_up((first + i) / 2 % kHalfSubblocks, (first + i) % 2, in.tables, entries[i]);
    };
    const auto decode = [&](int first) {
#pragma unroll
        for (int i = 0; i < kSteps; i++) {
            const int step = first + i;
            weights.operand(step / 2 % kHalfSubblocks, step % 2, in.lane, entries[i],
                            a[first / kSteps % Unit::kBuffers][i]);
        }
    };
    look_up(0);
    decode(0);
#pragma unroll
    for (int first = 0; first < kTileSteps; first += kSteps) {
        const int next = first + kSteps, last_subblock = (next - 1) / 2 % kHalfSubblocks;
        const bool chunk_ends = next % kChunkSteps == 0;
        float factors[2] = {};
        if (chunk_ends) factors[0] = weights.factor(last_subblock, 0), factors[1] = weights.factor(last_subblock, 1);
        if (next < kTileSteps) look_up(next); /* comes while products are started */
        unit.begin();
#pragma unroll
        for (int i = 0; i < kSteps; i++) {
            const int step = first + i;
            const uint32_t (&operand)[4] = a[first / kSteps % Unit::kBuffers][i];
            unit.multiply(chunk, operand, step, step % kChunkSteps != 0);
            if (!Losses::of(step)) continue;
            unit.next();
            unit.multiply(chunk, operand, Losses::step(step), true);
        }
        unit.end();
        if (next < kTileSteps) {
            unit.template wait<Unit::kBuffers - 1>();
            decode(next);
        }
        if (!chunk_ends) continue;
        unit.template wait<0>();
        unit.settle(chunk);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) totals[j][i] = fmaf(factors[i / 2], chunk[j][i], totals[j][i]);
        }
    }
}

} // namespace coli

#endif
