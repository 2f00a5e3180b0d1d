/* kernels/dot.cuh - products of one weight row with several activation rows, by one warp.
 *
 * The warp walks the row in steps of 32 lanes; each thread decodes one lane of 8 weights and multiplies it with the same 8
 * columns of every activation row, so a weight is decoded once however many rows there are. Sums are float32 in an order
 * that depends on the number of columns alone: a row gives the same bits alone or among others, and with any ROWS. */
#ifndef COLI_CUDA_KERNELS_DOT_CUH
#define COLI_CUDA_KERNELS_DOT_CUH

#include "lanes.cuh"

namespace coli {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

/* Activation rows [rows, I]; `vector` when every lane of 8 may be read as two float4. */
struct ActivationRows {
    const float *x;
    int I, rows;
    bool vector;

    __device__ ActivationRows(const float *first, int I, int rows)
        : x(first), I(I), rows(rows), vector(I % 4 == 0 && reinterpret_cast<uintptr_t>(first) % 16 == 0) {}

    /* Columns column ... column + 7 of a row, of which `count` exist. */
    __device__ void lane(int row, int column, int count, float a[COLI_LANE]) const {
        const float *p = x + static_cast<size_t>(row) * I + column;
        if (vector && count == COLI_LANE) {
            const float4 low = reinterpret_cast<const float4 *>(p)[0], high = reinterpret_cast<const float4 *>(p)[1];
            a[0] = low.x, a[1] = low.y, a[2] = low.z, a[3] = low.w;
            a[4] = high.x, a[5] = high.y, a[6] = high.z, a[7] = high.w;
            return;
        }
        for (int j = 0; j < COLI_LANE; j++) a[j] = j < count ? p[j] : 0.0f;
    }
};

template <class Lanes, int ROWS>
__device__ void accumulate(const WeightRow &weights, const ActivationRows &activations, const SharedTables &tables,
                           float sums[ROWS]) {
    const int lanes = coli_ceil_div(weights.I, COLI_LANE);
    for (int lane = threadIdx.x % kWarp; lane < lanes; lane += kWarp) {
        float w[COLI_LANE], a[COLI_LANE];
        Lanes::decode(weights, lane, tables, w);
        const int column = COLI_LANE * lane, left = weights.I - column, count = left < COLI_LANE ? left : COLI_LANE;
        for (int j = 0; j < COLI_LANE; j++) w[j] = j < count ? w[j] : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= activations.rows) break;
            activations.lane(r, column, count, a);
#pragma unroll
            for (int j = 0; j < COLI_LANE; j++) sums[r] = fmaf(w[j], a[j], sums[r]);
        }
    }
}

/* sums[r] = sum_i w[row, i] x[r, i] for the rows that exist, in every thread of the warp. */
template <int ROWS>
__device__ void dot_row(const MatrixView &matrix, int O, int I, int row, const ActivationRows &activations,
                        const SharedTables &tables, float sums[ROWS]) {
    const WeightRow weights{matrix, O, I, row};
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
    switch (matrix.format) {
    case COLI_F32:
        accumulate<F32Lanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_INT8:
        accumulate<Int8Lanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_INT4:
        accumulate<Int4Lanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_INT4_GROUPED:
        accumulate<Int4GroupedLanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_INT2:
        accumulate<Int2Lanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_MXFP4:
        accumulate<Mxfp4Lanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_FP8_B128:
        accumulate<Fp8Lanes, ROWS>(weights, activations, tables, sums);
        break;
    case COLI_E8:
        accumulate<E8Lanes, ROWS>(weights, activations, tables, sums);
        break;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int distance = kWarp / 2; distance; distance /= 2) {
            sums[r] += __shfl_xor_sync(kFullWarp, sums[r], distance);
        }
    }
}

} // namespace coli

#endif
