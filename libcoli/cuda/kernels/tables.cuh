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
    const float *fp8;
};
struct ByteTables {
    ByteCodebook codebook;
    const float *fp8;
};

/* Entry whose index is byte `byte` of `word`, as two pairs of fp16. */
__device__ __forceinline__ uint2 codebook_pairs(const KernelTables &tables, uint32_t word, int byte) {
    return codebook_entry(tables.codebook, word, byte);
}
/* A byte OR-ed into the mantissa of 1024, whose step is 1, is 1024 more than the byte. */
__device__ __forceinline__ uint2 codebook_pairs(const ByteTables &tables, uint32_t word, int byte) {
    const uint32_t bytes = codebook_entry(tables.codebook, word, byte);
    return {add_pairs(prmt(bytes, k1024, 0x7170), 0xe400e400u), add_pairs(prmt(bytes, k1024, 0x7372), 0xe400e400u)};
}

/* Called by all threads of a block; a barrier must follow. Codebook bytes up to 255 are exact in fp16. */
__device__ inline void spread_codebook(uint2 *copies, const DeviceTables &tables) {
    for (int i = threadIdx.x; i < 256 * kCodebookCopies; i += blockDim.x) {
        const uint32_t bytes = tables.codebook[i / kCodebookCopies];
        const float first = static_cast<float>(bytes & 255u), second = static_cast<float>(bytes >> 8 & 255u);
        const float third = static_cast<float>(bytes >> 16 & 255u), fourth = static_cast<float>(bytes >> 24);
        copies[i] = {round_pair(first, second), round_pair(third, fourth)};
    }
}

/* The bytes themselves, by the first `threads` threads of a block; a barrier must follow. */
__device__ inline void spread_codebook(uint32_t *copies, const DeviceTables &tables, int threads) {
    constexpr int kQuads = kCodebookStride / 16;
    for (int entry = threadIdx.x; entry < 256; entry += threads) {
        const uint32_t bytes = tables.codebook[entry];
        uint4 *quads = reinterpret_cast<uint4 *>(copies) + kQuads * entry;
#pragma unroll
        for (int j = 0; j < kQuads; j++) /* neighbours start at different banks */
            quads[(j + entry) % kQuads] = {bytes, bytes, bytes, bytes};
    }
}

} // namespace coli

#endif
