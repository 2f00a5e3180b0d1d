/* kernels/lanes.cuh - one lane (8 consecutive columns) of any format, from device memory to 8 floats.
 *
 * Formats differ here and nowhere else in the kernels. A lane is decoded exactly: code times scale in float32. Columns past
 * the end of the row give whatever lies in the padding; dot.cuh masks them. */
#ifndef COLI_CUDA_KERNELS_LANES_CUH
#define COLI_CUDA_KERNELS_LANES_CUH

#include "../layout.h"
#include "../ptx/load.cuh"
#include "../tables.h"

namespace coli {

/* Tables in shared memory: their indices differ from thread to thread, which constant memory would serialise. */
struct SharedTables {
    uint32_t codebook[256];
    float fp8[256];
};

/* Called by all threads of the block. No barrier follows: a product has one before it decodes, when its first tile is in.
 */
__device__ inline void load_tables(SharedTables &shared, const DeviceTables &tables) {
    for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) {
        shared.codebook[i] = tables.codebook[i];
        shared.fp8[i] = tables.fp8[i];
    }
}

/* One row of a matrix [O, I]. */
struct WeightRow {
    const MatrixView &matrix;
    int O, I, row;

    __device__ const uint8_t *bytes() const { return matrix.weights + row * row_pitch(matrix.format, I); }
    __device__ float scale(size_t index) const { return static_cast<const float *>(matrix.scales)[index]; }
};

__device__ __forceinline__ void scale_lane(float w[COLI_LANE], float scale) {
    for (int j = 0; j < COLI_LANE; j++) w[j] *= scale;
}

struct F32Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &, float w[COLI_LANE]) {
        const float4 low = load_once_f32x4(r.bytes() + 32 * static_cast<size_t>(lane));
        const float4 high = load_once_f32x4(r.bytes() + 32 * static_cast<size_t>(lane) + 16);
        w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
        w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
    }
};

struct Int8Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &, float w[COLI_LANE]) {
        const uint2 words = load_once_u64(r.bytes() + 8 * static_cast<size_t>(lane));
        coli_int8_lane(words.x, words.y, w);
        scale_lane(w, r.scale(r.row));
    }
};

struct Int4Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &, float w[COLI_LANE]) {
        coli_int4_lane(load_once_u32(r.bytes() + 4 * static_cast<size_t>(lane)), w);
        scale_lane(w, r.scale(r.row));
    }
};

struct Int4GroupedLanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &, float w[COLI_LANE]) {
        const int group_size = r.matrix.group_size, groups = coli_ceil_div(r.I, group_size), column = COLI_LANE * lane;
        const size_t first = static_cast<size_t>(r.row) * groups;
        coli_int4_lane(load_once_u32(r.bytes() + 4 * static_cast<size_t>(lane)), w);
        if (group_size % COLI_LANE == 0) {
            scale_lane(w, r.scale(first + column / group_size));
            return;
        }
        for (int j = 0; j < COLI_LANE; j++) { /* a lane may span groups, and its padding lies past the last one */
            const int group = (column + j) / group_size;
            w[j] *= r.scale(first + (group < groups ? group : groups - 1));
        }
    }
};

struct Int2Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &, float w[COLI_LANE]) {
        coli_int2_lane(load_once_u16(r.bytes() + 2 * static_cast<size_t>(lane)), w);
        scale_lane(w, r.scale(r.row));
    }
};

struct Mxfp4Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &, float w[COLI_LANE]) {
        const uint8_t *scales = static_cast<const uint8_t *>(r.matrix.scales);
        const size_t first = static_cast<size_t>(r.row) * coli_ceil_div(r.I, COLI_MXFP4_GROUP);
        coli_mxfp4_lane(load_once_u32(r.bytes() + 4 * static_cast<size_t>(lane)), w);
        scale_lane(w, coli_ue8m0_to_f32(scales[first + lane / (COLI_MXFP4_GROUP / COLI_LANE)]));
    }
};

struct Fp8Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &tables,
                                                  float w[COLI_LANE]) {
        const size_t first = static_cast<size_t>(r.row / COLI_FP8_BLOCK) * coli_ceil_div(r.I, COLI_FP8_BLOCK);
        const uint2 words = load_once_u64(r.bytes() + 8 * static_cast<size_t>(lane));
        coli_fp8_lane(words.x, words.y, tables.fp8, w);
        scale_lane(w, r.scale(first + lane / (COLI_FP8_BLOCK / COLI_LANE)));
    }
};

struct E8Lanes {
    static __device__ __forceinline__ void decode(const WeightRow &r, int lane, const SharedTables &tables,
                                                  float w[COLI_LANE]) {
        constexpr int lanes_per_block = COLI_E8_BLOCK / COLI_LANE, lanes_per_word = COLI_E8_SUBBLOCK / COLI_LANE;
        const int blocks = coli_e8_blocks(r.I);
        const size_t block = static_cast<size_t>(r.row) * blocks + lane / lanes_per_block;
        const int within = lane % lanes_per_block;
        const uint8_t *planes = r.matrix.weights;

        const uint32_t pair = load_once_u16(planes + block * COLI_E8_INDICES + 2 * within);
        const uint32_t word = load_once_u32(planes + e8_words_offset(r.O, blocks) +
                                            (block * COLI_E8_SUBBLOCKS + within / lanes_per_word) * 4);
        const uint32_t d = load_once_u16(planes + e8_superscales_offset(r.O, blocks) + block * 2);

        const uint8_t *entries = reinterpret_cast<const uint8_t *>(tables.codebook);
        coli_e8_lane(entries + 4 * (pair & 255u), entries + 4 * (pair >> 8), coli_e8_signs(word, within % lanes_per_word),
                     coli_e8_subscale(d, word), w);
    }
};

} // namespace coli

#endif
