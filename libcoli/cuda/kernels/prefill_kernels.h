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

constexpr int kPrefillWarps = 8;       /* that multiply, at most; two warpgroups */
constexpr int kPrefillWgmmaWarps = 12; /* of a block, those that fill stages among them */
/* Token tiles at most: there are no registers for more totals. */
constexpr int kMaxTokenTile = 96;
constexpr int kMaxMmaTokenTile = 32;

using PrefillKernel = void (*)(GroupParams, PrefillProduct, Tokens);

PrefillKernel prefill_wgmma_kernel(bool exact);

} // namespace coli

#endif
