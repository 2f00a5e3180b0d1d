/* tables.h - what kernels look up, one copy in the memory of each device. */
#ifndef COLI_CUDA_TABLES_H
#define COLI_CUDA_TABLES_H

#include "../formats/e8.h"
#include "../formats/signs.h"

namespace coli {

constexpr int kCodebookLengths = 64; /* different squared lengths that entries of the published codebook have */

/* Entries of one length together: among them the one with the largest product is best under every scale
 * (formats/e8_encode.h). */
struct LengthOrder {
    uint8_t entries[256];
    uint16_t first[kCodebookLengths + 1]; /* where those of a length begin; and the end */
};

/* The published codebook as the encoder searches it, whatever coli_cuda_e8_set_grid has set. */
struct EncoderCodebook {
    uint8_t bytes[256][4];
    LengthOrder order;
};

struct DeviceTables {
    uint32_t codebook[COLI_E8_CODEBOOK_BYTES / 4]; /* E8: 4 doubled magnitudes an entry */
    float fp8[256];                                /* e4m3 bytes to floats */
    uint8_t signs[COLI_SIGN_TABLE_BYTES];          /* of all rotation blocks */
    EncoderCodebook encoder;
};

} // namespace coli

#endif
