/* kernels/tiles.cuh - half a tile (16 rows x 128 columns, layout.h) of any format, from its bytes to what products take.
 *
 * Formats differ here and nowhere else in the kernels. A struct below holds a lane's share of half a tile in registers:
 * rows g and g + 8 (lane = 4 g + t), of each of four sub-blocks b of 32 columns the 8 columns 32 b + 8 t ... It gives
 *
 *     load(tile, half, lane, place)   the lane's bytes, from shared memory
 *     codes(b, h, tables, a)          16 weights' codes without their scales, exact in fp16: a[r + 2 q] is the pair of
 *                                     columns 8 t + 4 h + q, + 2 of row g + 8 r, four lanes' a[] the A fragment of
 *                                     mma.m16n8k16 when its k index runs over the columns in that order
 *     scales<MMA>(b, lane, s)         s[i][r]: scale of sub-block b + i (b even), row g + 8 r
 *     half_scale(r)                   a factor of row g + 8 r that all of them lack
 *     kUnit                           a constant factor that everything lacks
 *
 * and formats whose weights are small integers times a scale
 *
 *     bytes(b, tables, a)             the same codes as signed bytes times a constant: a[r + 2 h] is the four columns
 *                                     8 t + 4 h ... of row g + 8 r, the A fragment of mma.m16n8k32
 *     kByteUnit                       in place of kUnit
 *     group_scale(k, r)               in place of scales, with bytes: of group k of kSubblocksPerScale sub-blocks
 *
 * A weight is code * scale * half scale * unit. kSubblocksPerScale tells how many sub-blocks share a scale, so that
 * products apply it once for all of them; 0 where there is none within the tile (a row scale is the caller's business). */
#ifndef COLI_CUDA_KERNELS_TILES_CUH
#define COLI_CUDA_KERNELS_TILES_CUH

#include "../plan.h"
#include "../ptx/bits.cuh"
#include "../ptx/lookup.cuh"
#include "../ptx/mma.cuh"
#include "halves.cuh"
#include "tables.cuh"

namespace coli {

constexpr unsigned kFullWarp = 0xffffffffu;

/* This warp's number; the shuffle tells the compiler that all its threads have the same. */
__device__ __forceinline__ int warp_of_block() {
    return __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);
}

/* Which tile of which matrix. */
struct TilePlace {
    const MatrixView &matrix;
    int row, column;   /* of its corner */
    int rows, columns; /* of the matrix */
};

constexpr int kHalfSubblocks = kSubblocks / 2;

/* Piece c of this lane. */
__device__ __forceinline__ uint4 lane_piece(const uint8_t *tile, int c, int lane) {
    return *reinterpret_cast<const uint4 *>(tile + 512 * c + 16 * lane);
}

/* How exact sums of bytes become floats: a conversion, or */
struct ConvertedSums {
    static constexpr int kStart = 0;
    static __device__ __forceinline__ float value(int sum) { return static_cast<float>(sum); }
};
/* for sums of less than 2^22, counting on from the bits of 0.75, in the mantissa of a float whose step is 2^-24. That takes
 * a subtraction, of which a GPU does twice as many; and with sums of less than 1 no scale of a format overflows a product
 * whose result is finite. A format that wants this says `using ByteSums = MantissaSums`. */
struct MantissaSums {
    static constexpr int kStart = 0x3f400000;
    static constexpr float kUnit = 0x1p24f;
    static __device__ __forceinline__ float value(int sum) { return coli_bits_to_f32(static_cast<uint32_t>(sum)) - 0.75f; }
};

/* Formats without scales inside the tile. */
struct NoTileScales {
    static constexpr int kSubblocksPerScale = 0;
    static constexpr float kUnit = 1.0f;
    template <bool MMA> __device__ __forceinline__ void scales(int, int, float (&)[2][2]) const {}
    __device__ __forceinline__ float half_scale(int) const { return 1.0f; }
};

struct E8Half {
    static constexpr int kSubblocksPerScale = 1;
    static constexpr float kByteUnit = 0x1p-6f;
    static constexpr float kUnit = 0x1p-6f; /* weight = byte d (0.5 + code) 0.25 (formats/e8.h), scale = 16 code + 8 */
    uint32_t indices[kHalfSubblocks], patterns[4], superscales;
    int half;

    __device__ __forceinline__ void load(const uint8_t *tile, int half_, int lane, const TilePlace &) {
        load_indices(tile, half_, lane);
        const uint4 signs = lane_piece(tile, 2, lane);
        patterns[0] = signs.x, patterns[1] = signs.y, patterns[2] = signs.z, patterns[3] = signs.w;
        superscales = *reinterpret_cast<const uint32_t *>(tile + 1536 + 4 * (lane / 4));
    }
    /* All that is the half's own: enough where the other one was loaded before. */
    __device__ __forceinline__ void load_indices(const uint8_t *tile, int half_, int lane) {
        const uint4 quads = lane_piece(tile, half_, lane);
        indices[0] = quads.x, indices[1] = quads.y, indices[2] = quads.z, indices[3] = quads.w;
        half = half_;
    }

    /* The signs of sub-block b, row g + 8 r, columns 4 h ... + 3 of the unit, in the sign bits of the four bytes. */
    __device__ __forceinline__ uint32_t signs(int b, int r, int h) const {
        const uint32_t pattern = half ? patterns[2 + b / 2] : patterns[b / 2];
        const uint32_t all = pattern ^ rotl(pattern, 4);
        const int shift = 3 - 2 * (b & 1) - r + 4 * h;
        return h ? shift_left_alu(all, shift) : all << shift;
    }

    /* Those of columns 4 h + q and + 2, in the sign bits of a pair. */
    __device__ __forceinline__ uint32_t pair_signs(int b, int r, int h, int q) const {
        const uint32_t pattern = half ? patterns[2 + b / 2] : patterns[b / 2];
        return (pattern ^ rotl(pattern, 4)) << (11 - 2 * (b & 1) - r - 8 * q + 4 * h) & 0x80008000u;
    }

    /* Codes are signed codebook bytes. */
    template <class Tables>
    __device__ __forceinline__ void codes(int b, int h, const Tables &tables, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint2 pairs = codebook_pairs(tables, indices[b], r + 2 * h);
            a[r] = pairs.x ^ pair_signs(b, r, h, 0);
            a[r + 2] = pairs.y ^ pair_signs(b, r, h, 1);
        }
    }

    /* For a codebook of 1 ... 66. A byte is negated by complement and + 1, one multiplication for all four of a mask; that
     * carries nowhere, as no byte is 0. */
    __device__ __forceinline__ void bytes(int b, const ByteTables &tables, uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t entry = codebook_entry(tables.codebook, indices[b], i);
            const uint32_t negative = prmt(signs(b, i % 2, i / 2), 0u, 0xba98);
            a[i] = (entry ^ negative) + negative * 0xfefefeffu;
        }
    }
    /* s[i][r] = 16 code + 8 as integers. */
    __device__ __forceinline__ void integer_scales(int b, int lane, int (&s)[2][2]) const {
        const uint32_t select = lane % 4 == 2 * half + b / 2 ? (lane & 4 ? 0x00000100u : 1u) : 0u;
        int c[4] = {8, 8, 8, 8};
        mma_m16n8k16_u8s8(c, code_bytes(0), code_bytes(1), select);
        s[0][0] = c[0], s[1][0] = c[1], s[0][1] = c[2], s[1][1] = c[3];
    }
    /* 16 times the codes of sub-blocks 2 t and 2 t + 1, row g + 8 r. */
    __device__ __forceinline__ uint32_t code_bytes(int r) const {
        return prmt(patterns[2 * r], patterns[2 * r + 1], 0x0073) & 0x0000f0f0u;
    }

    /* 16 code + 8. The codes of sub-blocks 2 t and 2 t + 1 are in lane t; all four lanes of a row need all of them. The
     * matrix unit hands them round: the codes, as 1024 + 16 code, times a matrix that selects sub-blocks b and b + 1. */
    template <bool MMA> __device__ __forceinline__ void scales(int b, int lane, float (&s)[2][2]) const {
        if (MMA) {
            const uint32_t one = lane & 4 ? 0x3c000000u : 0x3c00u, select = lane % 4 == 2 * half + b / 2 ? one : 0u;
            float c[4] = {-1016.0f, -1016.0f, -1016.0f, -1016.0f};
            mma_m16n8k8(c, code_pair(0), code_pair(1), select);
            s[0][0] = c[0], s[1][0] = c[1], s[0][1] = c[2], s[1][1] = c[3];
        } else {
            const int source = (lane & ~3) + 2 * half + b / 2;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                for (int r = 0; r < 2; r++) {
                    const uint32_t word = __shfl_sync(kFullWarp, patterns[i + 2 * r], source);
                    s[i][r] = static_cast<float>(16u * (word >> 28) + 8u);
                }
            }
        }
    }
    __device__ __forceinline__ uint32_t code_pair(int r) const {
        const uint32_t bytes = prmt(patterns[2 * r], patterns[2 * r + 1], 0x0703);
        return (bytes & 0x00f000f0u) | k1024;
    }

    __device__ __forceinline__ float half_scale(int r) const {
        return r ? pair_floats(superscales).y : pair_floats(superscales).x;
    }
};

/* Words of nibbles: word 2 b + r for sub-block b, row g + 8 r. */
struct NibbleHalf {
    uint32_t words[2 * kHalfSubblocks];

    __device__ __forceinline__ void load_words(const uint8_t *tile, int half, int lane) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint4 piece = lane_piece(tile, 2 * half + c, lane);
            words[4 * c] = piece.x, words[4 * c + 1] = piece.y, words[4 * c + 2] = piece.z, words[4 * c + 3] = piece.w;
        }
    }
};

struct Int4Codes : NibbleHalf {
    static constexpr float kByteUnit = 0x1p-4f;

    template <class Tables> __device__ __forceinline__ void codes(int b, int h, const Tables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t stored = words[2 * b + r] >> 4 * h & 0x0f0f0f0fu; /* code + 8 */
            const uint2 pairs = offset_pairs(stored);
            a[r] = add_pairs(pairs.x, 0xe408e408u); /* -1032 */
            a[r + 2] = add_pairs(pairs.y, 0xe408e408u);
        }
    }
    /* In the high half of a byte, a nibble with its top bit flipped is 16 times the code. */
    __device__ __forceinline__ void bytes(int b, const ByteTables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            a[r] = (words[2 * b + r] << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
            a[r + 2] = (words[2 * b + r] & 0xf0f0f0f0u) ^ 0x80808080u;
        }
    }
};

struct Int4Half : Int4Codes, NoTileScales {
    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        load_words(tile, half, lane);
    }
};

/* A scale for every SPAN sub-blocks, or for a multiple of SPAN: then some of them are equal. */
template <int SPAN> struct Int4GroupedHalf : Int4Codes {
    static constexpr int kSubblocksPerScale = SPAN;
    static constexpr float kUnit = 1.0f;
    float group_scales[kHalfSubblocks / SPAN][2];

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &place) {
        load_words(tile, half, lane);
#pragma unroll
        for (int k = 0; k < kHalfSubblocks / SPAN; k++) {
            const int group = (kHalfSubblocks * half + SPAN * k) * kSubblockColumns / place.matrix.group_size;
            const float *of_group = reinterpret_cast<const float *>(tile + 2048) + kStripRows * group;
            for (int r = 0; r < 2; r++) group_scales[k][r] = of_group[lane / 4 + 8 * r];
        }
    }
    template <bool MMA> __device__ __forceinline__ void scales(int b, int, float (&s)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int r = 0; r < 2; r++) s[i][r] = group_scales[(b + i) / SPAN][r];
        }
    }
    __device__ __forceinline__ float group_scale(int k, int r) const { return group_scales[k][r]; }
    __device__ __forceinline__ float half_scale(int) const { return 1.0f; }
};

struct Mxfp4Half : NibbleHalf {
    static constexpr int kSubblocksPerScale = 1;
    static constexpr float kUnit = 0x1p14f;
    static constexpr float kByteUnit = 0x1p-2f * MantissaSums::kUnit;
    using ByteSums = MantissaSums;
    uint32_t exponents[2]; /* of rows g and g + 8, a byte for each sub-block */

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        load_words(tile, half, lane);
#pragma unroll
        for (int r = 0; r < 2; r++)
            exponents[r] = *reinterpret_cast<const uint32_t *>(tile + 2048 + 8 * (lane / 4 + 8 * r) + 4 * half);
    }
    /* e2m1 placed in the lowest exponent bits of fp16 is the value times 2^-14, subnormals included. */
    template <class Tables> __device__ __forceinline__ void codes(int b, int h, const Tables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const uint32_t word = q ? words[2 * b + r] : words[2 * b + r] << 4;
                const uint32_t pair = prmt(word, word, h ? 0x3020 : 0x1000); /* in the high nibbles of halves */
                a[r + 2 * q] = (pair & 0x80008000u) | (pair >> 3 & 0x0e000e00u);
            }
        }
    }
    /* Four times the value. A nibble selects its magnitude out of eight bytes, and where its sign is set, the sign bit of
     * that byte: zero. With all signs flipped the same look-up gives the negative ones alone, halved, as their own top bit
     * has to be clear too. Where one of the two is not zero the other one is: their sum carries nowhere. */
    __device__ __forceinline__ void bytes(int b, const ByteTables &, uint32_t (&a)[4]) const {
        const uint32_t first_positive = register_constant(0x06040200u), first_negative = register_constant(0x7d7e7f00u);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t word = words[2 * b + r], flipped = word ^ 0x88888888u;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t positive = prmt(first_positive, 0x18100c08u, word >> 16 * h);
                const uint32_t half_negative = prmt(first_negative, 0x74787a7cu, flipped >> 16 * h);
                a[r + 2 * h] = 2 * half_negative + positive;
            }
        }
    }
    __device__ __forceinline__ float group_scale(int b, int r) const {
        return coli_ue8m0_to_f32(exponents[r] >> 8 * b & 255u);
    }
    template <bool MMA> __device__ __forceinline__ void scales(int b, int, float (&s)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int r = 0; r < 2; r++) s[i][r] = group_scale(b + i, r);
        }
    }
    __device__ __forceinline__ float half_scale(int) const { return 1.0f; }
};

struct Int2Half : NoTileScales {
    uint32_t words[kHalfSubblocks];

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        const uint4 piece = lane_piece(tile, half, lane);
        words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
    }
    template <class Tables> __device__ __forceinline__ void codes(int b, int h, const Tables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t stored = words[b] >> 2 * (2 * r + h) & 0x03030303u; /* code + 2 */
            const uint2 pairs = offset_pairs(stored);
            a[r] = add_pairs(pairs.x, 0xe402e402u); /* -1026 */
            a[r + 2] = add_pairs(pairs.y, 0xe402e402u);
        }
    }
    /* In the top two bits of a byte, a code with its top bit flipped is 64 times itself. */
    static constexpr float kByteUnit = 0x1p-6f;
    __device__ __forceinline__ void bytes(int b, const ByteTables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = (words[b] << (6 - 2 * (2 * (i % 2) + i / 2)) & 0xc0c0c0c0u) ^ 0x80808080u;
    }
};

/* Bytes, as int8 and fp8 have them: row g columns 0 ... 3 and 4 ... 7 of the unit, row g + 8 the same. */
struct ByteHalf {
    uint4 words[kHalfSubblocks];

    __device__ __forceinline__ void load_words(const uint8_t *tile, int half, int lane) {
#pragma unroll
        for (int b = 0; b < kHalfSubblocks; b++) words[b] = lane_piece(tile, kHalfSubblocks * half + b, lane);
    }
    __device__ __forceinline__ uint32_t quad(int b, int r, int h) const {
        const uint4 &w = words[b];
        return r ? (h ? w.w : w.z) : (h ? w.y : w.x);
    }
};

struct Int8Half : ByteHalf, NoTileScales {
    static constexpr float kByteUnit = 1.0f;

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        load_words(tile, half, lane);
    }
    template <class Tables> __device__ __forceinline__ void codes(int b, int h, const Tables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint2 pairs = offset_pairs(quad(b, r, h) ^ 0x80808080u); /* code + 128 */
            a[r] = add_pairs(pairs.x, 0xe480e480u);                        /* -1152 */
            a[r + 2] = add_pairs(pairs.y, 0xe480e480u);
        }
    }
    __device__ __forceinline__ void bytes(int b, const ByteTables &, uint32_t (&a)[4]) const {
        a[0] = words[b].x, a[1] = words[b].z, a[2] = words[b].y, a[3] = words[b].w;
    }
};

/* The published e4m3 alone; under another table see Fp8TableHalf. */
struct Fp8Half : ByteHalf {
    static constexpr int kSubblocksPerScale = 4;
    static constexpr float kUnit = 0x1p8f;
    float block_scale;

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        load_words(tile, half, lane);
        block_scale = *reinterpret_cast<const float *>(tile + 4096 + 4 * half);
    }
    /* e4m3's magnitude shifted to fp16's lower exponent bits is the value times 2^-8, subnormals included. Its NaN (0x7f)
     * would pass as 480: one step up it reaches the top exponent bit, which no number does. */
    template <class Tables> __device__ __forceinline__ void codes(int b, int h, const Tables &, uint32_t (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            for (int q = 0; q < 2; q++) {
                const uint32_t bytes = prmt(quad(b, r, h), 0u, q ? 0x3414 : 0x2404); /* each in a high byte */
                const uint32_t magnitude = bytes >> 1 & 0x3f803f80u;
                a[r + 2 * q] = (bytes & 0x80008000u) | magnitude | ((magnitude + 0x00800080u) & 0x40004000u);
            }
        }
    }
    template <bool MMA> __device__ __forceinline__ void scales(int, int, float (&s)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int r = 0; r < 2; r++) s[i][r] = block_scale;
        }
    }
    __device__ __forceinline__ float half_scale(int) const { return 1.0f; }
};

/* Formats whose weights are no fp16 code times a scale of a sub-block give them as floats, all scales applied:
 *
 *     weights(b, r, tables, w)     8 weights of sub-block b, row g + 8 r */

struct F32Half {
    static constexpr float kUnit = 1.0f;
    const uint8_t *pieces;

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        pieces = tile + 8192 * half + 16 * lane;
    }
    template <class Tables>
    __device__ __forceinline__ void weights(int b, int r, const Tables &, float (&w)[COLI_LANE]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 quad = *reinterpret_cast<const float4 *>(pieces + 512 * (4 * b + 2 * r + h));
            w[4 * h] = quad.x, w[4 * h + 1] = quad.y, w[4 * h + 2] = quad.z, w[4 * h + 3] = quad.w;
        }
    }
};

/* fp8 under a table that the host published. */
struct Fp8TableHalf : ByteHalf {
    static constexpr float kUnit = 1.0f;
    float block_scale;

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &) {
        load_words(tile, half, lane);
        block_scale = *reinterpret_cast<const float *>(tile + 4096 + 4 * half);
    }
    template <class Tables>
    __device__ __forceinline__ void weights(int b, int r, const Tables &tables, float (&w)[COLI_LANE]) const {
#pragma unroll
        for (int j = 0; j < COLI_LANE; j++) w[j] = tables.fp8[quad(b, r, j / 4) >> 8 * (j % 4) & 255u] * block_scale;
    }
};

/* Groups that are no whole number of sub-blocks: every weight finds its scale in the plane. */
struct Int4AnyGroupHalf {
    static constexpr float kUnit = 1.0f;
    const uint8_t *pieces; /* read when they are wanted: registers are short here */
    const float *plane;
    int group_size, groups, first_row, first_column;

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &place) {
        pieces = tile + 1024 * half + 16 * lane;
        plane = static_cast<const float *>(place.matrix.scales);
        group_size = place.matrix.group_size;
        groups = coli_ceil_div(place.columns, group_size);
        first_row = place.row + lane / 4;
        first_column = place.column + kTileColumns / 2 * half + COLI_LANE * (lane % 4);
        rows = place.rows;
    }
    /* Rows and columns that do not exist take the scale of the last one: their codes are zero. */
    template <class Tables>
    __device__ __forceinline__ void weights(int b, int r, const Tables &, float (&w)[COLI_LANE]) const {
        const size_t first = static_cast<size_t>(min(first_row + 8 * r, rows - 1)) * groups;
        const uint32_t word = *reinterpret_cast<const uint32_t *>(pieces + 512 * (b / 2) + 8 * (b % 2) + 4 * r);
        const int column = keep(first_column + kSubblockColumns * b); /* eight loads at a time, not all of the half */
#pragma unroll
        for (int j = 0; j < COLI_LANE; j++) {
            const int code = static_cast<int>(word >> 4 * (2 * (j % 4) + j / 4) & 15u) - 8;
            w[j] = static_cast<float>(code) * plane[first + min((column + j) / group_size, groups - 1)];
        }
    }

  private:
    int rows;
};

/* Two tiles in shared memory, the second one `distance` bytes behind the first. */
struct TileSlots {
    const uint8_t *first;
    int distance;
};

__device__ __forceinline__ TilePlace tile_below(const TilePlace &place, int strips) {
    return {place.matrix, place.row + kStripRows * strips, place.column, place.rows, place.columns};
}

/* Half of both; `place` is that of the first one. */
template <class Half>
__device__ __forceinline__ void load_halves(Half (&halves)[2], const TileSlots &slots, int half, int lane,
                                            const TilePlace &place) {
#pragma unroll
    for (int m = 0; m < 2; m++) halves[m].load(slots.first + m * slots.distance, half, lane, tile_below(place, m));
}

} // namespace coli

#endif
