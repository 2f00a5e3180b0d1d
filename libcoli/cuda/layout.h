/* layout.h - how an encoded matrix lies in device memory, and the view of it that kernels read.
 *
 * A matrix [O, I] is cut into tiles of 16 rows x 256 columns. A strip is the tiles of 16 rows, from left to right; strips
 * follow each other:
 *
 *                  columns 0...255   256...511    512...
 *                 +--------------+--------------+--------+
 *     rows  0...15|    tile 0    |    tile 1    | tile 2 |  strip 0     tile = strip * tile_count(I) + column / 256
 *                 +--------------+--------------+--------+
 *     rows 16...31|    tile 3    |    tile 4    | tile 5 |  strip 1
 *                 +--------------+--------------+--------+
 *
 * All tiles of a matrix have the same size, a multiple of 16 bytes, so that one bulk copy fetches any run of a strip.
 *
 * A warp works on a tile as the tensor cores want it: lane = 4 g + t (g = 0..7, t = 0..3) has rows g and g + 8, and of each
 * of the eight sub-blocks b of 32 columns the unit t, which is the 8 columns 32 b + 8 t ... + 7:
 *
 *               sub-block b = 0         b = 1       ...       b = 7
 *              t=0   1   2   3        0   1   2   3         0   1   2   3
 *     row g    [8] [8] [8] [8]       [8] [8] [8] [8]  ...  [8] [8] [8] [8]
 *     row g+8  [8] [8] [8] [8]       [8] [8] [8] [8]  ...  [8] [8] [8] [8]
 *
 * What a lane has lies in 16-byte pieces: piece c of a lane starts at byte 512 c + 16 lane of the tile, so a warp loads
 * piece c of all lanes at once. The pieces of a lane, as four little-endian words each:
 *
 *   INT4, INT4_GROUPED          piece c = 0..3: { row g, row g+8 } of b = 2c, { row g, row g+8 } of b = 2c + 1.
 *                               A word: byte k = 0..3 has column k of the unit in its low nibble, column 4 + k in the
 *                               high one.
 *   MXFP4                       the same pieces. A word: nibble j = 0..7 has column j of the unit, as uploaded.
 *   INT2                        piece c = 0, 1: b = 4c ... 4c + 3. A word: byte k has, two bits each, columns k and 4 + k
 *                               of row g, columns k and 4 + k of row g+8.
 *   INT8, FP8_B128              piece b = 0..7: row g columns 0-3, columns 4-7, row g+8 columns 0-3, columns 4-7.
 *   F32                         piece 4b + j, j = 0..3: the same four places, four floats each.
 *   E8                          pieces 0 and 1: index words of b = 0..3 and b = 4..7; byte j of a word is the index
 *                               for row g + 8 (j & 1), columns 4 (j >> 1) ... + 3 of the unit. Piece 2: sign words
 *                               i = 0..3, for b = 2i and 2i + 1, see below.
 *
 * Behind the pieces come the scales that a tile has inside:
 *
 *   E8             d of row g | d of row g+8 << 16, fp16 bits, a word for each g
 *   MXFP4          one byte at 8 row + b
 *   INT4_GROUPED   if scales_in_tiles: a float at 16 k + row, k = 0 ... 256 / group size - 1 (0 alone for larger groups)
 *   FP8_B128       floats of columns 0..127 and 128..255, then 8 zero bytes
 *
 * INT8, INT4 and INT2, and INT4_GROUPED with other group sizes, have their scales as uploaded in a plane behind all tiles.
 *
 * Columns and rows that do not exist hold codes that decode to zero, and scales of zero. The bits of a row's last byte
 * beyond its columns, and all of a partial super-block, are as uploaded, so that a download gives back the very bytes.
 *
 * E8 signs. A sign word has the signs of four units: class p = 2 (b & 1) + (row is g + 8), sign v = 0..7 of a unit at bit
 * p + 8 (v & 3) + 4 (v < 4) of a pattern s. A unit's signs have even parity, so the XOR of the eight nibbles of s is zero
 * and one of them is free: it carries the 4-bit code of a sub-scale. Stored is x with s = x ^ rotl(x, 4), and the top
 * nibble of x is the code of sub-block 2 t + (i & 1) of row g + 8 (i >> 1). */
#ifndef COLI_CUDA_LAYOUT_H
#define COLI_CUDA_LAYOUT_H

#include "../formats/geometry.h"

namespace coli {

constexpr size_t kPlaneAlignment = 256;

constexpr int kStripRows = 16;
constexpr int kTileColumns = 256;
constexpr int kTileLanes = 32;
constexpr int kPieceBytes = 16;
constexpr int kSubblockColumns = 32;
constexpr int kSubblocks = kTileColumns / kSubblockColumns;

COLI_FN size_t align_up(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Strips of a matrix, and tiles of a strip. */
COLI_FN int tile_strips(int O) {
    return coli_ceil_div(O, kStripRows);
}
COLI_FN int tile_count(int I) {
    return coli_ceil_div(I, kTileColumns);
}

/* Bytes of the weights in a tile: the pieces of all lanes. */
COLI_FN size_t tile_pieces_bytes(int format) {
    if (format == COLI_E8) return 3 * kTileLanes * kPieceBytes;
    return kStripRows * coli_geometry_row_bytes(format, kTileColumns);
}

/* Whether the uploaded scales lie inside the tiles rather than in a plane of their own. */
COLI_FN bool scales_in_tiles(int format, int group_size) {
    if (format == COLI_MXFP4 || format == COLI_FP8_B128) return true;
    return format == COLI_INT4_GROUPED && group_size > 0 && group_size % kSubblockColumns == 0 &&
           (kTileColumns % group_size == 0 || group_size % kTileColumns == 0);
}

/* Groups of columns that have a scale in a tile; the scales of an INT4_GROUPED tile are [groups][16] floats. */
COLI_FN int tile_scale_groups(int format, int group_size) {
    const int columns = coli_geometry_scale_columns(format, kTileColumns, group_size);
    return columns < kTileColumns ? kTileColumns / columns : 1;
}

/* Bytes of the scales in a tile. */
COLI_FN size_t tile_scales_bytes(int format, int group_size) {
    if (format == COLI_E8) return kStripRows * 2;
    if (format == COLI_FP8_B128) return kPieceBytes;
    if (!scales_in_tiles(format, group_size)) return 0;
    return kStripRows * tile_scale_groups(format, group_size) * coli_geometry_scale_bytes_each(format);
}

COLI_FN size_t tile_bytes(int format, int group_size) {
    return tile_pieces_bytes(format) + tile_scales_bytes(format, group_size);
}

/* Device bytes of all tiles; a plane of scales would follow. */
COLI_FN size_t weights_extent(int format, int group_size, int O, int I) {
    return align_up((size_t)tile_strips(O) * tile_count(I) * tile_bytes(format, group_size), kPlaneAlignment);
}

/* How kernels decode a matrix: its format, told apart further where the decode differs. */
enum class TileKind {
    kF32,
    kInt8,
    kInt4,
    kInt2,
    kInt4Groups32,  /* INT4_GROUPED with scales in the tiles, for each sub-block */
    kInt4Groups,    /* ... for 64 columns or more */
    kInt4AnyGroups, /* INT4_GROUPED with a plane of scales */
    kMxfp4,
    kFp8,      /* under the published e4m3 table */
    kFp8Table, /* under another one */
    kE8,       /* under a codebook of 1 ... 66, as the published one */
    kE8AnyCodebook,
};

/* `e4m3`: the published fp8 table is in use; `small_codebook`: E8 codebook bytes are 1 ... 66. */
COLI_FN TileKind tile_kind(int format, int group_size, bool e4m3, bool small_codebook) {
    switch (format) {
    case COLI_INT8:
        return TileKind::kInt8;
    case COLI_INT4:
        return TileKind::kInt4;
    case COLI_INT2:
        return TileKind::kInt2;
    case COLI_INT4_GROUPED:
        if (!scales_in_tiles(format, group_size)) return TileKind::kInt4AnyGroups;
        return group_size == kSubblockColumns ? TileKind::kInt4Groups32 : TileKind::kInt4Groups;
    case COLI_MXFP4:
        return TileKind::kMxfp4;
    case COLI_FP8_B128:
        return e4m3 ? TileKind::kFp8 : TileKind::kFp8Table;
    case COLI_E8:
        return small_codebook ? TileKind::kE8 : TileKind::kE8AnyCodebook;
    default:
        return TileKind::kF32;
    }
}

/* What a kernel needs of a matrix besides its shape. */
struct MatrixView {
    const uint8_t *weights; /* the tiles */
    const void *scales;     /* a plane of floats; NULL where scales_in_tiles, and for F32 and E8 */
    TileKind kind;
    int group_size; /* of COLI_INT4_GROUPED */
    int tile_bytes;
    bool row_scales; /* `scales` has one for each row */
};

/* Whether weights are signed bytes times scales, and are multiplied as such. */
COLI_FN bool multiplies_bytes(const MatrixView &matrix) {
    switch (matrix.kind) {
    case TileKind::kE8:
    case TileKind::kInt8:
    case TileKind::kInt4:
    case TileKind::kInt4Groups32:
    case TileKind::kInt4Groups:
    case TileKind::kInt2:
    case TileKind::kMxfp4:
        return true;
    default:
        return false;
    }
}

} // namespace coli

#endif
