/* kernels/limbs.cuh - activation rows as integers of three signed bytes, for formats whose weights are bytes.
 *
 * A slice of a row is multiplied with a power of two that brings its largest magnitude to about 2^22 ... 2^23, and rounded
 * to integers, which are cut into three signed bytes: x = factor (x_0 + 2^8 x_1 + 2^16 x_2). Products of bytes are summed
 * exactly, as int32; the error is that of the rounding, half a step of 2^-22 of the slice's largest value at most, whatever
 * the order and company of the sums.
 *
 * In shared memory a limb of a row is a plane of bytes: plane 3 s + l is limb l of activation row s. */
#ifndef COLI_CUDA_KERNELS_LIMBS_CUH
#define COLI_CUDA_KERNELS_LIMBS_CUH

#include <type_traits>

#include "activations.cuh"

namespace coli {

constexpr int kLimbs = LimbPlanes::kPlanes;
/* Three signed bytes reach 127 (2^16 + 2^8 + 1), a little less than 2^23. */
constexpr float kLimbMargin = 1.0078125f;

/* One warp cuts a slice of a row; it becomes slice `place` of the chunk's row s. */
__device__ __forceinline__ void cut_slice(const SliceValues &values, int s, int place, const SplitRows &split, int lane) {
    const float largest = largest_of(values);
    const bool infinite = largest > 3.4028235e38f; /* then the infinities alone count */
    const int exponent = max(static_cast<int>(coli_f32_to_bits(largest * kLimbMargin) >> 23) - 127, -100);
    const float factor = power_of_two(22 - exponent);
    if (lane == 0) {
        const bool finite = largest <= 3.4028235e38f;
        split.factors[place * kMaxPassRows + s] = finite ? power_of_two(exponent - 22) : largest; /* infinity or NaN */
    }

    uint8_t *plane = split.parts + static_cast<size_t>(kLimbs * s) * split.pitch + kSliceColumns * place;
#pragma unroll
    for (int j = 0; j < kSliceQuads; j++) {
        const float v[4] = {values.quads[j].x, values.quads[j].y, values.quads[j].z, values.quads[j].w};
        uint32_t integers[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float scaled = infinite ? (fabsf(v[i]) == largest ? copysignf(1.0f, v[i]) : 0.0f) : v[i] * factor;
            /* carries of 128 make the lower two limbs signed */
            integers[i] = (static_cast<uint32_t>(__float2int_rn(scaled)) + 0x00008080u) ^ 0x00008080u;
        }
        const uint32_t low = prmt(integers[0], integers[1], 0x5140), high = prmt(integers[2], integers[3], 0x5140);
        const uint32_t top = prmt(integers[0], integers[1], 0x0062), top_high = prmt(integers[2], integers[3], 0x0062);
        const uint32_t limbs[kLimbs] = {prmt(low, high, 0x5410), prmt(low, high, 0x7632), prmt(top, top_high, 0x5410)};
#pragma unroll
        for (int l = 0; l < kLimbs; l++)
            *reinterpret_cast<uint32_t *>(plane + l * split.pitch + 4 * (kWarp * j + lane)) = limbs[l];
    }
}

/* Where the limbs of ROWS activation rows stand among the 8 columns of an mma. Few rows share one; from 8 rows on a tile of
 * columns is one limb of 8 rows, and the limbs of a row meet in one lane. */
template <int ROWS> struct LimbColumns {
    static constexpr int kTiles = ROWS <= 2 ? 1 : ROWS <= 4 ? 2 : kLimbs * ((ROWS + 7) / 8);
    static constexpr int kValues = ROWS == 1 ? 1 : ROWS <= 8 ? 2 : 4; /* activation rows of which a lane has the sums */

    /* The plane that column `column` of tile n shows; any one where nobody looks. */
    static __device__ __forceinline__ int plane(int n, int column, int rows) {
        if (ROWS <= 2) return kLimbs * min(column & 1, rows - 1) + min(column >> 1, kLimbs - 1);
        if (ROWS <= 4) return kLimbs * min(column & 3, rows - 1) + (n ? 2 : column >> 2);
        return kLimbs * min(8 * (n / kLimbs) + column, rows - 1) + n % kLimbs;
    }
    /* The activation row of value k of this lane; ROWS where it has none. */
    static __device__ __forceinline__ int row(int k, int lane) {
        const int t = lane % 4;
        if (ROWS <= 2) return t == 0 ? k : ROWS;
        if (ROWS <= 4) return t < 2 ? 2 * t + k : ROWS;
        return 8 * (k / 2) + 2 * t + k % 2;
    }
    /* Value k from this lane's sums of the columns, sums[n][i] being column 2 t + i of tile n. Called by whole warps. */
    static __device__ __forceinline__ float join(const float (&sums)[kTiles][2], int k, int lane) {
        const int base = lane & ~3, i = k % 2;
        float limbs[kLimbs];
        if (ROWS <= 2) {
            limbs[0] = sums[0][i];
            limbs[1] = __shfl_sync(kFullWarp, sums[0][i], base + 1);
            limbs[2] = __shfl_sync(kFullWarp, sums[0][i], base + 2);
        } else if (ROWS <= 4) {
            limbs[0] = sums[0][i];
            limbs[1] = __shfl_sync(kFullWarp, sums[0][i], base + 2 + lane % 2);
            limbs[2] = sums[kTiles - 1][i];
        } else {
#pragma unroll
            for (int l = 0; l < kLimbs; l++) limbs[l] = sums[kLimbs * (k / 2) + l][i];
        }
        return fmaf(65536.0f, limbs[2], fmaf(256.0f, limbs[1], limbs[0]));
    }
};

/* Whether the scales of sub-blocks are integers too. */
template <class Half, class = void> struct HasIntegerScales : std::false_type {};
template <class Half> struct HasIntegerScales<Half, std::void_t<decltype(&Half::integer_scales)>> : std::true_type {};

/* How its sums become floats. */
template <class Half, class = void> struct ByteSumsOf {
    using Type = ConvertedSums;
};
template <class Half> struct ByteSumsOf<Half, std::void_t<typename Half::ByteSums>> {
    using Type = typename Half::ByteSums;
};

/* Where this lane finds the columns that it shows to an mma, for all tiles of columns. */
template <int ROWS> struct LimbFragments {
    const uint8_t *parts;
    int first[LimbColumns<ROWS>::kTiles];

    __device__ LimbFragments(const SplitRows &x, int rows, int lane) : parts(x.parts) {
#pragma unroll
        for (int n = 0; n < LimbColumns<ROWS>::kTiles; n++)
            first[n] = keep(LimbColumns<ROWS>::plane(n, lane / 4, rows) * x.pitch + 8 * (lane % 4));
    }
    /* B fragment of the sub-block that starts at `column` of the chunk. */
    __device__ __forceinline__ uint2 at(int n, int column) const {
        return *reinterpret_cast<const uint2 *>(parts + first[n] + column);
    }
};

/* Integer sums of a stretch of sub-blocks: [tile][columns][accumulators of an mma]. */
template <int AT_ONCE, int TILES> using IntegerSums = int[AT_ONCE][TILES][4];

template <class ByteSums, int AT_ONCE, int TILES>
__device__ __forceinline__ void start_sums(IntegerSums<AT_ONCE, TILES> &c) {
#pragma unroll
    for (int m = 0; m < AT_ONCE; m++) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = ByteSums::kStart;
        }
    }
}

/* sums of tiles first ... += scale(m, r) * c, and c starts anew. */
template <class ByteSums, int AT_ONCE, int TILES, int USED, class Scale>
__device__ __forceinline__ void flush_sums(IntegerSums<AT_ONCE, TILES> &c, int first, Scale scale,
                                           float (&sums)[2][2][TILES][2]) {
#pragma unroll
    for (int m = 0; m < AT_ONCE; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int i = 0; i < USED; i++) {
                    float &total = sums[first + m][r][n][i];
                    total = fmaf(scale(m, r), ByteSums::value(c[m][n][2 * r + i]), total);
                }
            }
        }
    }
    start_sums<ByteSums, AT_ONCE, TILES>(c);
}

/* multiply_bytes for AT_ONCE of the two tiles, from `first` on. */
template <class Half, int ROWS, bool ROLLED, int AT_ONCE>
__device__ __forceinline__ void multiply_some_bytes(const TileSlots &slots, const TilePlace &place, int first,
                                                    const LimbFragments<ROWS> &x, int column, const ByteTables &tables,
                                                    int lane, float (&sums)[2][2][LimbColumns<ROWS>::kTiles][2]) {
    constexpr int kTiles = LimbColumns<ROWS>::kTiles, kUsed = ROWS == 1 ? 1 : 2, kSpan = Half::kSubblocksPerScale;
    constexpr bool kIntegerScales = HasIntegerScales<Half>::value;
    [[maybe_unused]] constexpr int kHalvesUnrolled = ROLLED ? 1 : 2;
    using ByteSums = typename ByteSumsOf<Half>::Type;
    IntegerSums<AT_ONCE, kTiles> total;
    start_sums<ByteSums, AT_ONCE, kTiles>(total);
    float super_scales[AT_ONCE][2];
    Half halves[AT_ONCE];
#pragma unroll kHalvesUnrolled
    for (int half = 0; half < 2; half++) {
        if (half) compiler_fence();
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++) {
            const uint8_t *tile = slots.first + (first + m) * slots.distance;
            if constexpr (kIntegerScales && !ROLLED) {
                if (half) {
                    halves[m].load_indices(tile, half, lane);
                    continue;
                }
            }
            halves[m].load(tile, half, lane, tile_below(place, first + m));
        }
        int scales[AT_ONCE][2][2];
#pragma unroll
        for (int b = 0; b < kHalfSubblocks; b++) {
            uint2 fragments[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; n++)
                fragments[n] = x.at(n, column + kSubblockColumns * (kHalfSubblocks * half + b));
#pragma unroll
            for (int m = 0; m < AT_ONCE; m++) {
                uint32_t a[4];
                halves[m].bytes(b, tables, a);
                if constexpr (kIntegerScales) {
                    if (b % 2 == 0) halves[m].integer_scales(b, lane, scales[m]);
#pragma unroll
                    for (int n = 0; n < kTiles; n++) {
                        int c[4] = {};
                        mma_m16n8k32_s8(c, a, fragments[n].x, fragments[n].y);
#pragma unroll
                        for (int r = 0; r < 2; r++) {
#pragma unroll
                            for (int i = 0; i < kUsed; i++) total[m][n][2 * r + i] += scales[m][b % 2][r] * c[2 * r + i];
                        }
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < kTiles; n++) mma_m16n8k32_s8(total[m][n], a, fragments[n].x, fragments[n].y);
                }
            }
            if constexpr (!kIntegerScales && kSpan > 0) {
                if ((b + 1) % kSpan) continue;
                flush_sums<ByteSums, AT_ONCE, kTiles, kUsed>(
                    total, first, [&](int m, int r) { return halves[m].group_scale(b / kSpan, r); }, sums);
            }
        }
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++) {
            for (int r = 0; r < 2; r++) super_scales[m][r] = halves[m].half_scale(r);
        }
    }
    if constexpr (kIntegerScales || kSpan == 0)
        flush_sums<ByteSums, AT_ONCE, kTiles, kUsed>(total, first, [&](int m, int r) { return super_scales[m][r]; }, sums);
}

/* sums[m][r][n][i] += tile m, row g + 8 r, times column 2 t + i of tile n of the limbs, over 256 columns. Sums stay
 * integers as long as their scale is one, and E8's sub-scales are integers themselves. The two tiles share what they load
 * of activations, but where registers run out. ROLLED code is slower and takes fewer registers. */
template <class Half, int ROWS, bool ROLLED>
__device__ __forceinline__ void multiply_bytes(const TileSlots &slots, const TilePlace &place, const LimbFragments<ROWS> &x,
                                               int column, const ByteTables &tables, int lane,
                                               float (&sums)[2][2][LimbColumns<ROWS>::kTiles][2]) {
    constexpr int kAtOnce = ROWS < 8 || (ROWS == 8 && !ROLLED) ? 2 : 1;
#pragma unroll
    for (int first = 0; first < 2; first += kAtOnce)
        multiply_some_bytes<Half, ROWS, ROLLED, kAtOnce>(slots, place, first, x, column, tables, lane, sums);
}

} // namespace coli

#endif
