/* kernels/tables.cuh - look-up tables as a thread sees them. */
#ifndef COLI_CUDA_KERNELS_TABLES_CUH
#define COLI_CUDA_KERNELS_TABLES_CUH

#include "../ptx/bits.cuh"
#include "../ptx/lookup.cuh"
#include "../tables.h"
#include "halves.cuh"

namespace coli {

/* The codebook is in shared memory, where a matrix is E8; the fp8 table in global memory. */
struct KernelTables {
    Codebook codebook;
};
struct ByteTables {
    ByteCodebook codebook;
    const float *fp8;
};

/* Entry whose index is byte `byte` of `word`, as two pairs of fp16: of values 0 and 2, 1 and 3. A byte OR-ed into the
 * mantissa of 1024, whose step is 1, is 1024 more than the byte. */
__device__ __forceinline__ uint2 codebook_pairs(const ByteTables &tables, uint32_t word, int byte) {
    const uint2 pairs = offset_pairs(codebook_entry(tables.codebook, word, byte));
    return {add_pairs(pairs.x, 0xe400e400u), add_pairs(pairs.y, 0xe400e400u)};
}

/* An entry's copies, 16 bytes at a time; neighbours start at different banks. */
__device__ __forceinline__ void spread_entry(void *copies, int entry, uint4 quad) {
    constexpr int kQuads = kCodebookStride / 16;
    uint4 *quads = static_cast<uint4 *>(copies) + kQuads * entry;
#pragma unroll
    for (int j = 0; j < kQuads; j++) quads[(j + entry) % kQuads] = quad;
}

/* Called by all threads of a block; a barrier must follow. Codebook bytes up to 255 are exact in fp16. */
__device__ inline void spread_codebook(uint2 *copies, const DeviceTables &tables) {
    for (int entry = threadIdx.x; entry < 256; entry += blockDim.x) {
        const uint2 offset = offset_pairs(tables.codebook[entry]);
        const uint2 pairs = {add_pairs(offset.x, 0xe400e400u), add_pairs(offset.y, 0xe400e400u)};
        spread_entry(copies, entry, {pairs.x, pairs.y, pairs.x, pairs.y});
    }
}

/* The bytes themselves, by the first `threads` threads of a block; a barrier must follow. */
__device__ inline void spread_codebook(uint32_t *copies, const DeviceTables &tables, int threads) {
    for (int entry = threadIdx.x; entry < 256; entry += threads) {
        const uint32_t bytes = tables.codebook[entry];
        spread_entry(copies, entry, {bytes, bytes, bytes, bytes});
    }
}

} // namespace coli

#endif
