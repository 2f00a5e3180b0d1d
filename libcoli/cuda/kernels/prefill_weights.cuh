/* kernels/prefill_weights.cuh - half a tile of weights as prefill and batch products take it: fp16 operands that need a
 * factor only once a chunk of several sub-blocks, since products under way cannot be scaled.
 *
 *     look_up(b, h, tables, entries)      what operand() needs of tables, ahead of it
 *     operand(b, h, lane, entries, a)     as codes(b, h, tables, a); exact in fp16 too
 *     factor(b, r, unit)                  of the chunk that ends with sub-block b, row g + 8 r; times unit, in place of
 * kUnit kChunk                              sub-blocks of a chunk; kSubblocks: the whole tile */
#ifndef COLI_CUDA_KERNELS_PREFILL_WEIGHTS_CUH
#define COLI_CUDA_KERNELS_PREFILL_WEIGHTS_CUH

#include "tiles.cuh"

namespace coli {

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    return pair_bits(__hmul2(bits_pair(a), bits_pair(b)));
}

/* Both halves of half `i` of a pair. */
__device__ __forceinline__ uint32_t both(uint32_t pair, int i) {
    return pair_bits(__half2half2(i ? __high2half(bits_pair(pair)) : __low2half(bits_pair(pair))));
}

/* Formats whose scales cover sub-blocks enough. */
template <class Half> struct PlainOperand : Half {
    static constexpr int kChunk = Half::kSubblocksPerScale ? Half::kSubblocksPerScale : kSubblocks;

    struct Entries {};
    __device__ __forceinline__ void look_up(int, int, const KernelTables &, Entries &) const {}
    __device__ __forceinline__ void operand(int b, int h, int, const Entries &, uint32_t (&a)[4]) const {
        this->codes(b, h, KernelTables{}, a);
    }
    __device__ __forceinline__ float factor(int b, int r, float unit = Half::kUnit) const {
        float s[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        this->template scales<false>(b & ~1, 0, s);
        return unit * (s[b & 1][r] * this->half_scale(r));
    }
};

/* 2 code + 1 goes into the operand: codebook bytes go up to 66, and 66 * 31 is exact in fp16. */
struct E8Operand : E8Half {
    static constexpr int kChunk = kSubblocks;
    uint32_t later[kHalfSubblocks]; /* indices of the second half */
    uint32_t own[2];                /* 2 code + 1 of sub-blocks 2 t, 2 t + 1 of the tile, row g + 8 r */
    uint32_t multiples[2];          /* the same of the sub-block at work and its neighbour */

    /* All of the tile comes with its first half. */
    __device__ __forceinline__ void load(const uint8_t *tile, int half_, int lane, const TilePlace &place) {
        if (half_) {
            half = half_;
            for (int b = 0; b < kHalfSubblocks; b++) indices[b] = later[b];
            return;
        }
        E8Half::load(tile, half_, lane, place);
        const uint4 quads = lane_piece(tile, 1, lane);
        later[0] = quads.x, later[1] = quads.y, later[2] = quads.z, later[3] = quads.w;
#pragma unroll
        for (int r = 0; r < 2; r++) own[r] = fma_pairs(code_pair(r), 0x30003000u, 0xd7f0d7f0u); /* / 8 - 127 */
    }
    struct Entries {
        uint2 of[2];
    };
    __device__ __forceinline__ void look_up(int b, int h, const KernelTables &tables, Entries &entries) const {
#pragma unroll
        for (int r = 0; r < 2; r++) entries.of[r] = codebook_entry(tables.codebook, indices[b], r + 2 * h);
    }
    __device__ __forceinline__ void operand(int b, int h, int lane, const Entries &entries, uint32_t (&a)[4]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (b % 2 == 0 && h == 0) multiples[r] = __shfl_sync(kFullWarp, own[r], (lane & ~3) + 2 * half + b / 2);
            const uint32_t multiple = both(multiples[r], b % 2);
            a[r] = multiply_pairs(entries.of[r].x ^ pair_signs(b, r, h, 0), multiple);
            a[r + 2] = multiply_pairs(entries.of[r].y ^ pair_signs(b, r, h, 1), multiple);
        }
    }
    __device__ __forceinline__ float factor(int, int r, float unit = kUnit) const { return 8.0f * unit * half_scale(r); }
};

/* Powers of two relative to the half row's largest go into the operand. What they push below fp16's least value is less
 * than 2^-24 of the largest. */
struct Mxfp4Operand : Mxfp4Half {
    static constexpr int kChunk = kHalfSubblocks;
    uint32_t largest[2];

    __device__ __forceinline__ void load(const uint8_t *tile, int half, int lane, const TilePlace &place) {
        Mxfp4Half::load(tile, half, lane, place);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[r] = max(max(exponent(0, r), exponent(1, r)), max(exponent(2, r), exponent(3, r)));
        }
    }
    __device__ __forceinline__ uint32_t exponent(int b, int r) const { return exponents[r] >> 8 * b & 255u; }
    /* Codes lack 2^14; 2^15 is fp16's largest power. */
    __device__ __forceinline__ uint32_t power(int b, int r) const {
        const uint32_t distance = largest[r] - exponent(b, r), bits = (30u - distance) << 10;
        return distance < 30u ? bits | bits << 16 : 0u;
    }
    struct Entries {};
    __device__ __forceinline__ void look_up(int, int, const KernelTables &, Entries &) const {}
    __device__ __forceinline__ void operand(int b, int h, int, const Entries &, uint32_t (&a)[4]) const {
        codes(b, h, KernelTables{}, a);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = multiply_pairs(a[i], power(b, i % 2));
    }
    __device__ __forceinline__ float factor(int, int r) const { return 0.5f * coli_ue8m0_to_f32(largest[r]); }
};

/* Calls visit(T{}) with the operand type of a kind; nothing for the kinds that have none. */
template <class Visit> __device__ __forceinline__ void with_operand(TileKind kind, Visit visit) {
    switch (kind) {
    case TileKind::kE8:
        return visit(E8Operand{});
    case TileKind::kInt8:
        return visit(PlainOperand<Int8Half>{});
    case TileKind::kInt4:
        return visit(PlainOperand<Int4Half>{});
    case TileKind::kInt2:
        return visit(PlainOperand<Int2Half>{});
    case TileKind::kInt4Groups32:
        return visit(PlainOperand<Int4GroupedHalf<1>>{});
    case TileKind::kInt4Groups:
        return visit(PlainOperand<Int4GroupedHalf<2>>{});
    case TileKind::kMxfp4:
        return visit(Mxfp4Operand{});
    case TileKind::kFp8:
        return visit(PlainOperand<Fp8Half>{});
    default:
        return;
    }
}

} // namespace coli

#endif
