/* kernels/prefill_kernels.h - the two kernels behind prefill.h. That for Hopper's matrix unit is compiled for sm_90a alone.
 */
#ifndef COLI_CUDA_KERNELS_PREFILL_KERNELS_H
#define COLI_CUDA_KERNELS_PREFILL_KERNELS_H

#include "prefill.h"

namespace coli {

/* The tokens of all experts of a launch (prefill_tokens.cuh). */
struct Tokens {
    uint8_t *halves;
    float *factors; /* what products of a token are to be multiplied with */
};

constexpr int kPrefillWarps = 8; /* that multiply; with wgmma two warpgroups, and a third one that fills stages */
/* With wgmma and small token tiles a warpgroup more, which hides more of each other's latencies. */
constexpr int kPrefillManyWarps = 12;
constexpr int kPrefillFillWarps = 4;
/* Token tiles at most: there are no registers for more totals. */
constexpr int kMaxTokenTile = 96;
constexpr int kMaxMmaTokenTile = 32, kMaxManyWarpsTokenTile = 32;

using PrefillKernel = void (*)(GroupParams, PrefillProduct, Tokens);

PrefillKernel prefill_wgmma_kernel(bool exact, int warps);

} // namespace coli

#endif
