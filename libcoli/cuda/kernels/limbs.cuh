/* kernels/limbs.cuh - activation rows as integers of four signed limbs of 6 bits, for formats whose weights are integers.
 *
 * A slice of a row is multiplied with a power of two that brings its largest magnitude to about 2^22 ... 2^23, and rounded
 * to integers, which are cut into four limbs of -32 ... 31: x = factor (x_0 + 2^6 x_1 + 2^12 x_2 + 2^18 x_3). The error is
 * that of the rounding, half a step of 2^-22 of the slice's largest value at most.
 *
 * Sums of a limb over the 256 columns of a tile, E8's sub-scales included, are integers of less than 2^24: an E8 weight is
 * at most 66 * 31. So they are exact in int32 as well as in float, and a result is the same bits whether the matrix unit
 * multiplied bytes (here) or halves (limb_tokens.cuh), in whatever order and company.
 *
 * In shared memory a limb of a row is a plane of bytes: first limb 0 of all rows of the pass, then limb 1, and so on. */
#ifndef COLI_CUDA_KERNELS_LIMBS_CUH
#define COLI_CUDA_KERNELS_LIMBS_CUH

#include <type_traits>

#include "activations.cuh"

namespace coli {

constexpr int kLimbs = LimbPlanes::kPlanes;
/* Bits of a limb, and what makes it unsigned. */
constexpr int kLimbBits = 6, kLimbOffset = 1 << (kLimbBits - 1);
/* Four such limbs reach 31 (2^18 + 2^12 + 2^6 + 1), a little less than 2^23. */
constexpr float kLimbMargin = 1.017578125f;

/* How a slice becomes integers; the same for all lanes of a warp. */
struct LimbScale {
    float largest, factor;
    bool infinite; /* then the infinities alone count */

    __device__ __forceinline__ explicit LimbScale(float largest_) : largest(largest_), infinite(largest > 3.4028235e38f) {
        factor = power_of_two(22 - exponent());
    }
    /* What products are to be multiplied with: infinity or NaN, if a value is. */
    __device__ __forceinline__ float inverse() const {
        return largest <= 3.4028235e38f ? power_of_two(exponent() - 22) : largest;
    }
    /* The integer of a value, with all its limbs made unsigned. */
    __device__ __forceinline__ uint32_t unsigned_limbs(float v) const {
        constexpr uint32_t kOffsets =
            kLimbOffset * (1u + (1u << kLimbBits) + (1u << 2 * kLimbBits) + (1u << 3 * kLimbBits));
        const float scaled = infinite ? (fabsf(v) == largest ? copysignf(1.0f, v) : 0.0f) : v * factor;
        return static_cast<uint32_t>(__float2int_rn(scaled)) + kOffsets;
    }

  private:
    __device__ __forceinline__ int exponent() const {
        return max(static_cast<int>(coli_f32_to_bits(largest * kLimbMargin) >> 23) - 127, -100);
    }
};

/* The unsigned limbs of a value, a byte each, the lowest one in the lowest byte. */
__device__ __forceinline__ uint32_t limbs_to_bytes(uint32_t limbs) {
    const uint32_t halves = limbs + (limbs & 0x00fff000u) * 15u; /* twelve bits each */
    return halves + (halves & 0x0fc00fc0u) * 3u;
}
/* -32 in each byte. */
__device__ __forceinline__ uint32_t signed_bytes(uint32_t limbs) {
    return (limbs + 0x60606060u) ^ 0x80808080u;
}

/* One warp cuts a slice of a row; it becomes slice `place` of the chunk's row s. */
__device__ __forceinline__ void cut_slice(const SliceValues &values, int s, int place, const SplitRows &split, int lane) {
    const LimbScale scale(largest_of(values));
    if (lane == 0) split.factors[place * kMaxPassRows + s] = scale.inverse();

    uint8_t *plane = split.parts + static_cast<size_t>(s) * split.pitch + kSliceColumns * place;
#pragma unroll
    for (int j = 0; j < kSliceQuads; j++) {
        const float v[4] = {values.quads[j].x, values.quads[j].y, values.quads[j].z, values.quads[j].w};
        uint32_t bytes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) bytes[i] = signed_bytes(limbs_to_bytes(scale.unsigned_limbs(v[i])));
        const uint32_t low = prmt(bytes[0], bytes[1], 0x5140), low_2 = prmt(bytes[2], bytes[3], 0x5140);
        const uint32_t high = prmt(bytes[0], bytes[1], 0x7362), high_2 = prmt(bytes[2], bytes[3], 0x7362);
        const uint32_t limbs[kLimbs] = {prmt(low, low_2, 0x5410), prmt(low, low_2, 0x7632), prmt(high, high_2, 0x5410),
                                        prmt(high, high_2, 0x7632)};
#pragma unroll
        for (int l = 0; l < kLimbs; l++)
            *reinterpret_cast<uint32_t *>(plane + l * split.rows * split.pitch + 4 * (kWarp * j + lane)) = limbs[l];
    }
}

/* A sum from those of its two lower, or of its two upper limbs; and from those two. */
__device__ __forceinline__ float join_limbs(float low, float high) {
    return fmaf(static_cast<float>(1 << kLimbBits), high, low);
}
__device__ __forceinline__ float join_halves(float low, float high) {
    return fmaf(static_cast<float>(1 << 2 * kLimbBits), high, low);
}

/* Where the limbs of ROWS activation rows stand among the 8 columns of an mma. Few rows share one; from 8 rows on a tile of
 * columns is one limb of 8 rows, and the limbs of a row meet in one lane. */
template <int ROWS> struct LimbColumns {
    static constexpr int kTiles = ROWS <= 2 ? 1 : ROWS <= 4 ? 2 : kLimbs * ((ROWS + 7) / 8);
    static constexpr int kValues = ROWS == 1 ? 1 : ROWS <= 8 ? 2 : 4; /* activation rows of which a lane has the sums */

    /* The plane that column `column` of tile n shows; any one where nobody looks. */
    static __device__ __forceinline__ int plane(int n, int column, int rows) {
        if (ROWS <= 2) return rows * (column >> 1) + min(column & 1, rows - 1);
        if (ROWS <= 4) return rows * (2 * n + (column >> 2)) + min(column & 3, rows - 1);
        return rows * (n % kLimbs) + min(8 * (n / kLimbs) + column, rows - 1);
    }
    /* The activation row of value k of this lane; ROWS where it has none. */
    static __device__ __forceinline__ int row(int k, int lane) {
        const int t = lane % 4;
        if (ROWS <= 2) return t == 0 ? k : ROWS;
        if (ROWS <= 4) return t < 2 ? 2 * t + k : ROWS;
        return 8 * (k / 2) + 2 * t + k % 2;
    }
    /* Value k from this lane's sums of the columns, sums[n][i] being column 2 t + i of tile n. Called by whole warps. */
    static __device__ __forceinline__ float join(const float (&sums)[kTiles][2], int k) {
        const int first = ROWS <= 4 ? 0 : kLimbs * (k / 2), i = k % 2;
        if (ROWS <= 2) { /* lane t has limb t */
            const float half = join_limbs(sums[0][i], __shfl_xor_sync(kFullWarp, sums[0][i], 1));
            return join_halves(half, __shfl_xor_sync(kFullWarp, half, 2));
        }
        if (ROWS <= 4) { /* lanes t and t + 2 have the limbs of a half */
            float halves[2];
#pragma unroll
            for (int n = 0; n < 2; n++)
                halves[n] = join_limbs(sums[n % kTiles][i], __shfl_xor_sync(kFullWarp, sums[n % kTiles][i], 2));
            return join_halves(halves[0], halves[1]);
        }
        const auto limb = [&](int l) { return sums[(first + l) % kTiles][i]; };
        return join_halves(join_limbs(limb(0), limb(1)), join_limbs(limb(2), limb(3)));
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
    constexpr int kAtOnce = ROWS < 8 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < 2; first += kAtOnce)
        multiply_some_bytes<Half, ROWS, ROLLED, kAtOnce>(slots, place, first, x, column, tables, lane, sums);
}

} // namespace coli

#endif
