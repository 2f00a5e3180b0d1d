/* tables.h - what kernels look up, one copy in the memory of each device. */
#ifndef COLI_CUDA_TABLES_H
#define COLI_CUDA_TABLES_H

#include "../formats/e8.h"
#include "../formats/signs.h"

namespace coli {

struct DeviceTables {
    uint32_t codebook[COLI_E8_CODEBOOK_BYTES / 4]; /* E8: 4 doubled magnitudes an entry */
    float fp8[256];                                /* e4m3 bytes to floats */
    uint8_t signs[COLI_SIGN_TABLE_BYTES];          /* of all rotation blocks */
};

} // namespace coli

#endif
