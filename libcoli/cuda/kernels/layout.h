/* kernels/layout.h - uploaded rows to tiles (pack) and back (unpack), exact inverses; see ../layout.h. */
#ifndef COLI_CUDA_KERNELS_LAYOUT_H
#define COLI_CUDA_KERNELS_LAYOUT_H

#include "../gpu.h"
#include "../layout.h"

namespace coli {

/* A rectangle of tiles, fewer than 2^31 together. */
struct TileRange {
    int first_strip, strips, first_tile, tiles;
};

/* The scales of a rectangle, as a rectangle of the uploaded ones. */
struct ScaleRange {
    int first_row, rows, first_column, columns;
};

/* Uploaded bytes of a rectangle, its rows one after another. `weights` and `scales` are aligned to 16 bytes. */
struct StagedRows {
    uint8_t *weights;
    size_t row_bytes;
    uint8_t *scales; /* unused unless scales_in_tiles */
    ScaleRange scale_range;
};

struct LayoutParams {
    uint8_t *tiles; /* of the whole matrix */
    int format, group_size, O, I;
    TileRange range;
    StagedRows staged;
};

/* Pack needs all scales that the tiles share in; unpack writes those of `scale_range` whose first tile is in the range. */
cudaError_t launch_pack(const LayoutParams &params, cudaStream_t stream);
cudaError_t launch_unpack(const LayoutParams &params, cudaStream_t stream);

} // namespace coli

#endif
