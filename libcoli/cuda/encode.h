/* encode.h - E8 matrices from float32 in host memory: rows in chunks to the device, their blocks back. */
#ifndef COLI_CUDA_ENCODE_H
#define COLI_CUDA_ENCODE_H

#include "context.h"

namespace coli {

/* A matrix to encode, checked but for weights that are not finite. */
struct EncodeCall {
    int quality; /* COLI_E8_SEARCH or COLI_E8_REFERENCE */
    bool rotate;
    const float *importance; /* [columns] or NULL */
    const float *w;          /* [rows, columns] */
    int rows, columns;
    uint8_t *blocks;
};

/* Rows of more columns do not fit a slot of the staging. */
constexpr int kMostEncodedColumns = static_cast<int>(Staging::kSlotBytes / sizeof(float));

/* Waits. The caller holds the device. */
bool run_encode(Context &context, const EncodeCall &call);

/* The published codebook in the order in which the kernels search it. */
void fill_encoder_codebook(EncoderCodebook *codebook);

} // namespace coli

#endif
