/* kernels/dot.cuh - products of weight rows with several activation rows.
 *
 * A thread block has kWarpsPerBlock weight rows, one a warp, and walks their columns in tiles of 256: it copies that tile
 * of every activation row to shared memory, then each thread decodes one lane of 8 weights and multiplies it with the same
 * 8 columns of all of them. A weight is decoded once however many activation rows there are. Sums are float32, in an order
 * that depends on the number of columns alone: a row gives the same bits alone or among others, and with any ROWS. */
#ifndef COLI_CUDA_KERNELS_DOT_CUH
#define COLI_CUDA_KERNELS_DOT_CUH

#include "../plan.h"
#include "lanes.cuh"

namespace coli {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kProductThreads = kWarp * kWarpsPerBlock;
constexpr int kTileColumns = kWarp * COLI_LANE;

/* Activation rows [rows, I] of which a pass takes up to ROWS. */
struct ActivationRows {
    const float *x;
    int I, rows;
};

/* Shared memory of a block; a warp's sums wait in it to be spread over the warp, one activation row a thread. */
template <int ROWS> struct ProductMemory {
    SharedTables tables;
    float4 tile[ROWS][kTileColumns / 4];
    float sums[2][kWarpsPerBlock][ROWS];
};

/* Rows and columns that do not exist become zeros. */
template <int ROWS> __device__ void load_tile(const ActivationRows &activations, int column, ProductMemory<ROWS> &memory) {
#pragma unroll 4 /* loads in flight; more would cost the products their registers */
    for (int i = threadIdx.x; i < ROWS * kTileColumns; i += kProductThreads) {
        const int r = i / kTileColumns, c = i % kTileColumns;
        const bool exists = r < activations.rows && column + c < activations.I;
        const float value = exists ? activations.x[static_cast<size_t>(r) * activations.I + column + c] : 0.0f;
        reinterpret_cast<float *>(memory.tile[r])[c] = value;
    }
}

template <class Lanes, int ROWS>
__device__ void accumulate(const WeightRow &weights, const ActivationRows &activations, ProductMemory<ROWS> &memory,
                           float sums[ROWS]) {
    const int within = threadIdx.x % kWarp;
    for (int tile = 0; tile < weights.I; tile += kTileColumns) {
        load_tile<ROWS>(activations, tile, memory);
        __syncthreads();
        const int column = tile + COLI_LANE * within;
        if (column < weights.I) {
            float w[COLI_LANE];
            Lanes::decode(weights, column / COLI_LANE, memory.tables, w);
            for (int j = 0; j < COLI_LANE; j++) w[j] = column + j < weights.I ? w[j] : 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 low = memory.tile[r][2 * within], high = memory.tile[r][2 * within + 1];
                float sum = sums[r];
                sum = fmaf(w[0], low.x, sum), sum = fmaf(w[1], low.y, sum);
                sum = fmaf(w[2], low.z, sum), sum = fmaf(w[3], low.w, sum);
                sum = fmaf(w[4], high.x, sum), sum = fmaf(w[5], high.y, sum);
                sum = fmaf(w[6], high.z, sum), sum = fmaf(w[7], high.w, sum);
                sums[r] = sum;
            }
        }
        __syncthreads();
    }
}

/* memory.sums[slot][warp][r] = sum_i w[row, i] x[r, i], for the warp to read until its next call. All threads of the block
 * take part, those whose row lies past the end with the last row. */
template <int ROWS>
__device__ void dot_rows(const MatrixView &matrix, int O, int I, int row, const ActivationRows &activations,
                         ProductMemory<ROWS> &memory, int slot) {
    const WeightRow weights{matrix, O, I, min(row, O - 1)};
    float sums[ROWS] = {};
    switch (matrix.format) {
    case COLI_F32:
        accumulate<F32Lanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_INT8:
        accumulate<Int8Lanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_INT4:
        accumulate<Int4Lanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_INT4_GROUPED:
        accumulate<Int4GroupedLanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_INT2:
        accumulate<Int2Lanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_MXFP4:
        accumulate<Mxfp4Lanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_FP8_B128:
        accumulate<Fp8Lanes, ROWS>(weights, activations, memory, sums);
        break;
    case COLI_E8:
        accumulate<E8Lanes, ROWS>(weights, activations, memory, sums);
        break;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int distance = kWarp / 2; distance; distance /= 2) {
            sums[r] += __shfl_xor_sync(kFullWarp, sums[r], distance);
        }
        if (threadIdx.x % kWarp == 0) memory.sums[slot][threadIdx.x / kWarp][r] = sums[r];
    }
    __syncwarp();
}

} // namespace coli

#endif
