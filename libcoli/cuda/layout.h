/* layout.h - how an encoded matrix lies in device memory, and the view of it that kernels read.
 *
 * A tensor is one allocation: the weights, then its scales, each starting at a multiple of 256 bytes.
 *
 * Weights of every format but E8 are rows as uploaded, each padded to a multiple of 32 bytes, so that a lane of 8 columns
 * is one aligned load. E8 blocks of 98 bytes have no alignment at all; they are split into three planes
 *
 *     indices [O][blocks][64] bytes | words [O][blocks][8] uint32 | super-scales [O][blocks] fp16
 *
 * of together the same size. pack and unpack (kernels/layout.cu) are exact inverses. */
#ifndef COLI_CUDA_LAYOUT_H
#define COLI_CUDA_LAYOUT_H

#include "../formats/geometry.h"

namespace coli {

constexpr size_t kPlaneAlignment = 256;
constexpr size_t kRowAlignment = 32;

COLI_FN size_t align_up(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Bytes from one row to the next, for every format but E8. */
COLI_FN size_t row_pitch(int format, int columns) {
    return align_up(coli_geometry_row_bytes(format, columns), kRowAlignment);
}

/* Offsets of E8's second and third plane. */
COLI_FN size_t e8_words_offset(int rows, int blocks) {
    return align_up((size_t)rows * blocks * COLI_E8_INDICES, kPlaneAlignment);
}
COLI_FN size_t e8_superscales_offset(int rows, int blocks) {
    return e8_words_offset(rows, blocks) + align_up((size_t)rows * blocks * COLI_E8_SUBBLOCKS * 4, kPlaneAlignment);
}

/* Device bytes of the weights. */
COLI_FN size_t weights_extent(int format, int rows, int columns) {
    if (format != COLI_E8) return align_up((size_t)rows * row_pitch(format, columns), kPlaneAlignment);
    int blocks = coli_e8_blocks(columns);
    return e8_superscales_offset(rows, blocks) + align_up((size_t)rows * blocks * 2, kPlaneAlignment);
}

/* What a kernel needs of a matrix besides its shape. */
struct MatrixView {
    const uint8_t *weights;
    const void *scales; /* floats; ue8m0 bytes for MXFP4; unused for F32 and E8 */
    int format;
    int group_size; /* of COLI_INT4_GROUPED */
};

} // namespace coli

#endif
