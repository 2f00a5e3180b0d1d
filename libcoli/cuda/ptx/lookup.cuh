/* ptx/lookup.cuh - the E8 codebook in shared memory, as fp16 or as bytes, and its look-up.
 *
 * 32 threads that look up 32 different entries of one table meet in the same banks several times over. So there are copies,
 * entry by entry: 32 of the 4-byte entries, 16 of the 8-byte ones (which are read half-warp by half-warp). One dot product
 * of bytes computes the address: it picks a byte of the index word, multiplies it with the 128 bytes of an entry's copies
 * and adds the thread's base. */
#ifndef COLI_CUDA_PTX_LOOKUP_CUH
#define COLI_CUDA_PTX_LOOKUP_CUH

#include <cstdint>

#include "../gpu.h"
#include "../vendor.h"

namespace coli {

constexpr int kCodebookBytes = 256 * kCodebookStride;
constexpr int kCodebookCopies = kCodebookStride / 8;
constexpr int kByteCodebookCopies = kCodebookStride / 4;

#if defined(__CUDA_ARCH__)

struct Codebook {
    uint32_t address; /* in the shared window, of this thread's copy of entry 0 */
};

__device__ __forceinline__ Codebook codebook_of(const uint2 *copies, int lane) {
    return {static_cast<uint32_t>(__cvta_generic_to_shared(copies + lane % kCodebookCopies))};
}
/* Entry whose index is byte `byte` of `word`; not to be moved to where it is used. */
__device__ __forceinline__ uint2 codebook_entry(Codebook codebook, uint32_t word, int byte) {
    uint32_t address;
    uint2 entry;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(address) : "r"(word), "r"(128u << 8 * byte), "r"(codebook.address));
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(entry.x), "=r"(entry.y) : "r"(address));
    return entry;
}

struct ByteCodebook {
    uint32_t address;
};
__device__ __forceinline__ ByteCodebook codebook_of(const uint32_t *copies, int lane) {
    return {static_cast<uint32_t>(__cvta_generic_to_shared(copies + lane % kByteCodebookCopies))};
}
__device__ __forceinline__ uint32_t codebook_entry(ByteCodebook codebook, uint32_t word, int byte) {
    uint32_t address, entry;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(address) : "r"(word), "r"(128u << 8 * byte), "r"(codebook.address));
    asm("ld.shared.u32 %0, [%1];" : "=r"(entry) : "r"(address));
    return entry;
}

#else

struct Codebook {
    const uint2 *entries;
};

__device__ __forceinline__ Codebook codebook_of(const uint2 *copies, int lane) {
    return {copies + lane % kCodebookCopies};
}
__device__ __forceinline__ uint2 codebook_entry(Codebook codebook, uint32_t word, int byte) {
    return codebook.entries[kCodebookCopies * (word >> 8 * byte & 255u)];
}

struct ByteCodebook {
    const uint32_t *entries;
};
__device__ __forceinline__ ByteCodebook codebook_of(const uint32_t *copies, int lane) {
    return {copies + lane % kByteCodebookCopies};
}
__device__ __forceinline__ uint32_t codebook_entry(ByteCodebook codebook, uint32_t word, int byte) {
    return codebook.entries[kByteCodebookCopies * (word >> 8 * byte & 255u)];
}

#endif

} // namespace coli

#endif
