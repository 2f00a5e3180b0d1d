#include "layout.h"

#include "../plan.h"

namespace coli {

namespace {

/* Where super-block `block`, counted over the whole matrix, lies in the planes. */
struct E8Place {
    uint8_t *indices;
    uint32_t *words;
    uint16_t *superscale;
};

__device__ E8Place place_of(uint8_t *planes, int O, int blocks_per_row, size_t block) {
    return {planes + block * COLI_E8_INDICES,
            reinterpret_cast<uint32_t *>(planes + e8_words_offset(O, blocks_per_row)) + block * COLI_E8_SUBBLOCKS,
            reinterpret_cast<uint16_t *>(planes + e8_superscales_offset(O, blocks_per_row)) + block};
}

__global__ void pack_e8(const uint8_t *blocks, uint8_t *planes, int O, int blocks_per_row, size_t first, size_t count) {
    const size_t i = static_cast<size_t>(blockIdx.x) * kPackThreads + threadIdx.x;
    if (i >= count) return;
    const uint8_t *source = blocks + i * COLI_E8_BLOCK_BYTES;
    const E8Place target = place_of(planes, O, blocks_per_row, first + i);
    for (int j = 0; j < COLI_E8_INDICES; j++) target.indices[j] = source[j];
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) target.words[b] = coli_load_u32(source + COLI_E8_WORDS_OFFSET + 4 * b);
    *target.superscale = static_cast<uint16_t>(coli_load_u16(source + COLI_E8_SCALE_OFFSET));
}

__global__ void unpack_e8(uint8_t *planes, uint8_t *blocks, int O, int blocks_per_row, size_t first, size_t count) {
    const size_t i = static_cast<size_t>(blockIdx.x) * kPackThreads + threadIdx.x;
    if (i >= count) return;
    const E8Place source = place_of(planes, O, blocks_per_row, first + i);
    uint8_t *target = blocks + i * COLI_E8_BLOCK_BYTES;
    for (int j = 0; j < COLI_E8_INDICES; j++) target[j] = source.indices[j];
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        for (int k = 0; k < 4; k++)
            target[COLI_E8_WORDS_OFFSET + 4 * b + k] = static_cast<uint8_t>(source.words[b] >> 8 * k);
    }
    target[COLI_E8_SCALE_OFFSET] = static_cast<uint8_t>(*source.superscale);
    target[COLI_E8_SCALE_OFFSET + 1] = static_cast<uint8_t>(*source.superscale >> 8);
}

unsigned grid_for(size_t count) {
    return static_cast<unsigned>((count + kPackThreads - 1) / kPackThreads);
}

} // namespace

cudaError_t launch_pack_e8(const uint8_t *blocks, uint8_t *planes, int O, int I, int first, int rows, cudaStream_t stream) {
    const size_t per_row = coli_e8_blocks(I), count = rows * per_row;
    pack_e8<<<grid_for(count), kPackThreads, 0, stream>>>(blocks, planes, O, coli_e8_blocks(I), first * per_row, count);
    return cudaGetLastError();
}

cudaError_t launch_unpack_e8(const uint8_t *planes, uint8_t *blocks, int O, int I, int first, int rows,
                             cudaStream_t stream) {
    const size_t per_row = coli_e8_blocks(I), count = rows * per_row;
    unpack_e8<<<grid_for(count), kPackThreads, 0, stream>>>(const_cast<uint8_t *>(planes), blocks, O, coli_e8_blocks(I),
                                                            first * per_row, count);
    return cudaGetLastError();
}

} // namespace coli
