/* kernels/activations.cuh - activation rows as products take them: float32 split into two fp16 parts.
 *
 * A slice is kSliceColumns columns. Every value of a slice is multiplied with the power of two that brings the largest one
 * of that row to 2^13 ... 2^14, and split into the nearest fp16 and what is left of it, again as fp16: together 22 bits,
 * and never less than 2^-37 of the slice's largest. Codes are exact in fp16, so two products on the matrix unit give
 * float32's accuracy.
 *
 * In shared memory the parts are rows of halves: row 2 s the high, row 2 s + 1 the low parts of activation row s, with 64
 * bytes between rows, so that four rows' 64 bytes meet in no bank. Of four columns the order is 0, 2, 1, 3: columns that
 * are a pair are those whose bytes in a word are two apart, which takes an AND to unpack (halves.cuh). */
#ifndef COLI_CUDA_KERNELS_ACTIVATIONS_CUH
#define COLI_CUDA_KERNELS_ACTIVATIONS_CUH

#include "../plan.h"
#include "halves.cuh"
#include "tiles.cuh"

namespace coli {

/* Float rows, in global or shared memory, contiguous: row s starts at data + s * stride. */
struct FloatRows {
    const float *data;
    size_t stride;
    int columns;
};

/* A chunk: some slices of all rows of a pass, in planes of parts. */
struct SplitRows {
    uint8_t *parts; /* [planes of all rows][pitch] bytes */
    float *factors; /* [slices][kMaxPassRows]: what products of a slice are to be multiplied with */
    int pitch;
    int rows; /* of the pass */
};

/* The parts of rows `first` ... . */
template <class Planes> __device__ __forceinline__ SplitRows rows_from(const SplitRows &split, int first) {
    return {split.parts + static_cast<size_t>(Planes::kRowStep * first) * split.pitch, split.factors + first, split.pitch,
            split.rows};
}

__device__ __forceinline__ float4 load_quad(const float *row, int column, int columns) {
    const float *p = row + column;
    if (column + 4 <= columns && reinterpret_cast<uintptr_t>(p) % 16 == 0) return *reinterpret_cast<const float4 *>(p);
    return {column < columns ? p[0] : 0.0f, column + 1 < columns ? p[1] : 0.0f, column + 2 < columns ? p[2] : 0.0f,
            column + 3 < columns ? p[3] : 0.0f};
}

__device__ __forceinline__ uint32_t magnitude_bits(float v) {
    return coli_f32_to_bits(v) & 0x7fffffffu;
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return coli_bits_to_f32(static_cast<uint32_t>(127 + exponent) << 23);
}

constexpr int kSliceQuads = kSliceColumns / (4 * kWarp);

/* A slice of a row, spread over a warp: quad j of a lane is columns 4 (32 j + lane) ... of the slice. */
struct SliceValues {
    float4 quads[kSliceQuads];
};

__device__ __forceinline__ void load_slice(const FloatRows &x, int row, int slice, int lane, SliceValues &values) {
    const float *p = x.data + row * x.stride;
    const int column = slice * kSliceColumns + 4 * lane;
    if ((slice + 1) * kSliceColumns <= x.columns && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
#pragma unroll
        for (int j = 0; j < kSliceQuads; j++)
            values.quads[j] = *reinterpret_cast<const float4 *>(p + column + 4 * kWarp * j);
    } else {
#pragma unroll
        for (int j = 0; j < kSliceQuads; j++) values.quads[j] = load_quad(p, column + 4 * kWarp * j, x.columns);
    }
}

/* The largest magnitude of a slice, NaN where there is one, to all lanes. */
__device__ __forceinline__ float largest_of(const SliceValues &values) {
    uint32_t largest = 0; /* magnitudes order as their bits do, NaN above all */
#pragma unroll
    for (int j = 0; j < kSliceQuads; j++) {
        const float4 &v = values.quads[j];
        const uint32_t low = max(magnitude_bits(v.x), magnitude_bits(v.y));
        const uint32_t high = max(magnitude_bits(v.z), magnitude_bits(v.w));
        largest = max(largest, max(low, high));
    }
    for (int distance = kWarp / 2; distance; distance /= 2)
        largest = max(largest, __shfl_xor_sync(kFullWarp, largest, distance));
    return coli_bits_to_f32(largest);
}

/* One warp splits a slice of a row; it becomes slice `place` of the chunk's row s. */
__device__ __forceinline__ void split_slice(const SliceValues &values, int s, int place, const SplitRows &split, int lane) {
    const float largest = largest_of(values);
    const int exponent = max(static_cast<int>(coli_f32_to_bits(largest) >> 23) - 127, -100);
    const float factor = power_of_two(13 - exponent);
    const bool infinite = !(largest <= 3.4028235e38f);
    if (lane == 0) split.factors[place * kMaxPassRows + s] = power_of_two(exponent - 13);

    uint8_t *high_row = split.parts + static_cast<size_t>(2 * s) * split.pitch + 2 * kSliceColumns * place;
#pragma unroll
    for (int j = 0; j < kSliceQuads; j++) {
        const float4 &quad = values.quads[j];
        const float4 v = {quad.x * factor, quad.y * factor, quad.z * factor, quad.w * factor};
        const uint2 high = {round_pair(v.x, v.z), round_pair(v.y, v.w)};
        const float2 first = pair_floats(high.x), second = pair_floats(high.y);
        uint2 low = {round_pair(v.x - first.x, v.z - first.y), round_pair(v.y - second.x, v.w - second.y)};
        if (infinite) low = {0u, 0u}; /* infinity less infinity would be NaN */
        const int offset = 8 * (kWarp * j + lane);
        *reinterpret_cast<uint2 *>(high_row + offset) = high;
        *reinterpret_cast<uint2 *>(high_row + split.pitch + offset) = low;
    }
}

} // namespace coli

#endif
