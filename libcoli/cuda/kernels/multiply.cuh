/* kernels/multiply.cuh - two tiles of weights, one above the other, times activation rows.
 *
 * Activation rows are the 8 columns of an mma four at a time: columns 2 t and 2 t + 1 are the high and the low part of row
 * t, and their sums meet in the lane that adds them. Sums of sub-blocks are float32, scaled where the format says so. */
#ifndef COLI_CUDA_KERNELS_MULTIPLY_CUH
#define COLI_CUDA_KERNELS_MULTIPLY_CUH

#include <type_traits>

#include "activations.cuh"
#include "tiles.cuh"

namespace coli {

/* Whether a format gives codes and scales, or weights. */
template <class Half, class = void> struct HasCodes : std::false_type {};
template <class Half> struct HasCodes<Half, std::void_t<decltype(Half::kSubblocksPerScale)>> : std::true_type {};

/* Where this lane finds the columns that it shows to an mma: part lane / 4 % 2 of row lane / 8 of each four rows. Rows that
 * do not exist repeat the last one; nobody stores what they give. */
template <int ROW_TILES> struct HalfFragments {
    const uint8_t *parts;
    int first[ROW_TILES], pitch, rows;

    __device__ HalfFragments(const SplitRows &x, int rows_, int lane) : parts(x.parts), pitch(x.pitch), rows(rows_) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
            first[n] = keep((2 * min(4 * n + lane / 8, rows - 1) + lane / 4 % 2) * pitch + 16 * (lane % 4));
    }
    /* B fragments of both k steps of the sub-block that starts at `column` of the chunk. */
    __device__ __forceinline__ uint4 at(int n, int column) const {
        return *reinterpret_cast<const uint4 *>(parts + first[n] + 2 * column);
    }
};

/* sums[m][r][n] += tile m, row g + 8 r, times activation row 4 n + t, over the 256 columns from `column` of the chunk. */
template <class Half, int ROW_TILES>
__device__ __forceinline__ void multiply_codes(const TileSlots &slots, const TilePlace &place,
                                               const HalfFragments<ROW_TILES> &x, int column, const ByteTables &tables,
                                               int lane, float (&sums)[2][2][ROW_TILES]) {
    constexpr int kSpan = Half::kSubblocksPerScale ? Half::kSubblocksPerScale : kHalfSubblocks;
    float scaled[2][2][ROW_TILES] = {}, c[2][ROW_TILES][4] = {}, scales[2][2][2], last_scale[2][2];
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        Half halves[2];
        load_halves(halves, slots, half, lane, place);
#pragma unroll
        for (int b = 0; b < kHalfSubblocks; b++) {
            uint4 fragments[ROW_TILES];
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++)
                fragments[n] = x.at(n, column + kSubblockColumns * (kHalfSubblocks * half + b));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                if (b % 2 == 0) halves[m].template scales<true>(b, lane, scales[m]);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint32_t a[4];
                    halves[m].codes(b, h, tables, a);
#pragma unroll
                    for (int n = 0; n < ROW_TILES; n++)
                        mma_m16n8k16(c[m][n], a, h ? fragments[n].z : fragments[n].x, h ? fragments[n].w : fragments[n].y);
                }
                if ((b + 1) % kSpan) continue;
#pragma unroll
                for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float sum = c[m][n][2 * r] + c[m][n][2 * r + 1];
                        const float scale = Half::kSubblocksPerScale ? scales[m][b % 2][r] : 1.0f;
                        scaled[m][r][n] = fmaf(scale, sum, scaled[m][r][n]);
                        c[m][n][2 * r] = c[m][n][2 * r + 1] = 0.0f;
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            for (int r = 0; r < 2; r++) last_scale[m][r] = halves[m].half_scale(r);
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        for (int r = 0; r < 2; r++) {
            for (int n = 0; n < ROW_TILES; n++) sums[m][r][n] = fmaf(last_scale[m][r], scaled[m][r][n], sums[m][r][n]);
        }
    }
}

/* The 8 weights of a lane's unit as floats. */
template <class Half>
__device__ __forceinline__ void unit_weights(const Half &halves, int b, int r, const ByteTables &tables, int lane,
                                             float (&w)[COLI_LANE]) {
    if constexpr (HasCodes<Half>::value) {
        float scales[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        halves.template scales<false>(b & ~1, lane, scales);
        const float scale = scales[b & 1][r] * halves.half_scale(r);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t a[4];
            halves.codes(b, h, tables, a);
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const float2 codes = pair_floats(a[r + 2 * q]);
                w[4 * h + q] = codes.x * scale;
                w[4 * h + q + 2] = codes.y * scale;
            }
        }
    } else {
        halves.weights(b, r, tables, w);
    }
}

/* 8 activations of row s: the two parts together are the value, to 22 bits. */
template <int ROW_TILES>
__device__ __forceinline__ void unit_activations(const HalfFragments<ROW_TILES> &x, int column, int s, int lane,
                                                 float (&v)[COLI_LANE]) {
    const uint8_t *high_row = x.parts + 2 * s * x.pitch + 2 * column + 16 * (lane % 4);
    const uint4 high = *reinterpret_cast<const uint4 *>(high_row),
                low = *reinterpret_cast<const uint4 *>(high_row + x.pitch);
    const uint32_t highs[4] = {high.x, high.y, high.z, high.w}, lows[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 first = pair_floats(highs[j]), second = pair_floats(lows[j]);
        const int column = 4 * (j / 2) + j % 2;
        v[column] = first.x + second.x;
        v[column + 2] = first.y + second.y;
    }
}

/* dots[r][s] += row g + 8 r of a tile times activation row 4 n + s, this lane's columns alone. */
template <class Half, int ROW_TILES>
__device__ __forceinline__ void dot_units(const Half &half, const HalfFragments<ROW_TILES> &x, int column, int n,
                                          const ByteTables &tables, int lane, float (&dots)[2][4]) {
#pragma unroll
    for (int b = 0; b < kHalfSubblocks; b++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float w[COLI_LANE];
            unit_weights(half, b, r, tables, lane, w);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                float v[COLI_LANE];
                unit_activations(x, column + kSubblockColumns * b, min(4 * n + s, x.rows - 1), lane, v);
#pragma unroll
                for (int j = 0; j < COLI_LANE; j++) dots[r][s] = fmaf(w[j], v[j], dots[r][s]);
            }
        }
    }
}

/* The sums of multiply_codes without tensor cores. A lane multiplies the columns of its own units with four activation rows
 * at a time; then the four lanes of a weight row add up. */
template <class Half, int ROW_TILES>
__device__ __forceinline__ void multiply_weights(const TileSlots &slots, const TilePlace &place,
                                                 const HalfFragments<ROW_TILES> &x, int column, const ByteTables &tables,
                                                 int lane, float (&sums)[2][2][ROW_TILES]) {
#pragma unroll 1
    for (int i = 0; i < 2 * ROW_TILES; i++) { /* loops that stay loops: this path is for few cases, and it is long */
        const int m = i % 2, n = i / 2;
        float dots[2][4] = {};
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            Half half;
            half.load(slots.first + m * slots.distance, h, lane, tile_below(place, m));
            dot_units(half, x, column + kTileColumns / 2 * h, n, tables, lane, dots);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float mine = 0.0f;
#pragma unroll
            for (int s = 0; s < 4; s++) {
                float dot = dots[r][s];
                dot += __shfl_xor_sync(kFullWarp, dot, 1);
                dot += __shfl_xor_sync(kFullWarp, dot, 2);
                if (s == lane % 4) mine = dot;
            }
#pragma unroll
            for (int k = 0; k < 2 * ROW_TILES; k++) sums[k % 2][r][k / 2] += k == i ? mine : 0.0f;
        }
    }
}

template <class Half, class Path, int ROW_TILES>
__device__ __forceinline__ void multiply_tiles(const TileSlots &slots, const TilePlace &place,
                                               const HalfFragments<ROW_TILES> &x, int column, const ByteTables &tables,
                                               int lane, float (&sums)[2][2][ROW_TILES]) {
    if constexpr (Path::kTensorCores && HasCodes<Half>::value)
        multiply_codes<Half, ROW_TILES>(slots, place, x, column, tables, lane, sums);
    else
        multiply_weights<Half, ROW_TILES>(slots, place, x, column, tables, lane, sums);
}

} // namespace coli

#endif
