#include "layout.h"

#include <type_traits>

namespace coli {

namespace {

constexpr int kPackThreads = 128; /* of a block; a warp has a tile */
constexpr unsigned kAllLanes = 0xffffffffu;

/*------   Uploaded rows   ------*/

/* Bytes of an uploaded row from a tile's first column on. Where there are none, `pad` is read and nothing is written. */
struct RawRow {
    uint8_t *bytes;
    size_t count; /* 0 for a row that does not exist */
    uint32_t pad; /* the same byte four times */

    __device__ bool holds(size_t offset, size_t size) const {
        return offset + size <= count && reinterpret_cast<uintptr_t>(bytes + offset) % size == 0;
    }

    __device__ uint32_t load16(size_t offset) const {
        if (holds(offset, 2)) return *reinterpret_cast<const uint16_t *>(bytes + offset);
        const uint32_t low = offset < count ? bytes[offset] : pad & 255u;
        const uint32_t high = offset + 1 < count ? bytes[offset + 1] : pad & 255u;
        return low | high << 8;
    }
    __device__ uint32_t load32(size_t offset) const {
        if (offset >= count) return pad;
        if (holds(offset, 4)) return *reinterpret_cast<const uint32_t *>(bytes + offset);
        return load16(offset) | load16(offset + 2) << 16;
    }
    __device__ void store16(size_t offset, uint32_t half) const {
        if (holds(offset, 2)) {
            *reinterpret_cast<uint16_t *>(bytes + offset) = static_cast<uint16_t>(half);
            return;
        }
        if (offset < count) bytes[offset] = static_cast<uint8_t>(half);
        if (offset + 1 < count) bytes[offset + 1] = static_cast<uint8_t>(half >> 8);
    }
    __device__ void store32(size_t offset, uint32_t word) const {
        if (holds(offset, 4)) {
            *reinterpret_cast<uint32_t *>(bytes + offset) = word;
            return;
        }
        store16(offset, word);
        store16(offset + 2, word >> 16);
    }
};

/* Rows g and g + 8 of a tile, and which of the four units of a sub-block is the lane's. */
struct LaneRows {
    RawRow row[2];
    int t;
    bool zipped; /* whether nibbles do not stay in their order */
};

/*------   Words of a piece   ------*/

/* Exchanges the bits of `mask` with those `shift` above them. Its own inverse. */
__device__ __forceinline__ uint32_t exchange(uint32_t word, uint32_t mask, int shift) {
    const uint32_t different = (word ^ word >> shift) & mask;
    return word ^ different ^ different << shift;
}

/* Codes of BITS bits in even places to the low half of a word, those in odd places to the high half; and back. */
template <int BITS> __device__ __forceinline__ uint32_t unzip(uint32_t word) {
    if (BITS <= 2) word = exchange(word, 0x0c0c0c0cu, 2);
    if (BITS <= 4) word = exchange(word, 0x00f000f0u, 4);
    return exchange(word, 0x0000ff00u, 8);
}
template <int BITS> __device__ __forceinline__ uint32_t zip(uint32_t word) {
    word = exchange(word, 0x0000ff00u, 8);
    if (BITS <= 4) word = exchange(word, 0x00f000f0u, 4);
    if (BITS <= 2) word = exchange(word, 0x0c0c0c0cu, 2);
    return word;
}

/* Which uploaded bytes are word k of a lane's piece c: one struct for each way of arranging them, read by both directions.
 * A unit is 4 bytes of INT4, INT4_GROUPED, MXFP4; */
struct NibbleUnits {
    static constexpr int kPieces = 4;
    static __device__ size_t offset(int c, int k, int t) { return 16 * (2 * c + (k >> 1)) + 4 * t; }
    static __device__ uint32_t load(const LaneRows &rows, int c, int k) {
        const uint32_t word = rows.row[k & 1].load32(offset(c, k, rows.t));
        return rows.zipped ? zip<4>(word) : word;
    }
    static __device__ void store(const LaneRows &rows, int c, int k, uint32_t word) {
        rows.row[k & 1].store32(offset(c, k, rows.t), rows.zipped ? unzip<4>(word) : word);
    }
};

/* Codes of both rows to the places that layout.h gives them, and back: two bits of INT2, bytes of E8. */
template <int BITS> __device__ __forceinline__ uint32_t arrange(uint32_t word) {
    return BITS == 2 ? zip<2>(zip<2>(word)) : unzip<8>(word);
}
template <int BITS> __device__ __forceinline__ uint32_t restore(uint32_t word) {
    return BITS == 2 ? unzip<2>(unzip<2>(word)) : zip<8>(word);
}

/* 2 bytes of INT2 and of E8's indices, so that a word has those of both rows; BITS is the size of a code; */
template <int BITS> struct HalfWordUnits {
    static constexpr int kPieces = 2;
    static __device__ size_t offset(int c, int k, int t) { return 8 * (4 * c + k) + 2 * t; }
    static __device__ uint32_t load(const LaneRows &rows, int c, int k) {
        const size_t at = offset(c, k, rows.t);
        return arrange<BITS>(rows.row[0].load16(at) | rows.row[1].load16(at) << 16);
    }
    static __device__ void store(const LaneRows &rows, int c, int k, uint32_t word) {
        const size_t at = offset(c, k, rows.t);
        word = restore<BITS>(word);
        rows.row[0].store16(at, word);
        rows.row[1].store16(at, word >> 16);
    }
};

/* 8 bytes of INT8 and FP8; */
struct ByteUnits {
    static constexpr int kPieces = 8;
    static __device__ size_t offset(int c, int k, int t) { return 32 * c + 8 * t + 4 * (k & 1); }
    static __device__ uint32_t load(const LaneRows &rows, int c, int k) {
        return rows.row[k >> 1].load32(offset(c, k, rows.t));
    }
    static __device__ void store(const LaneRows &rows, int c, int k, uint32_t word) {
        rows.row[k >> 1].store32(offset(c, k, rows.t), word);
    }
};

/* 32 bytes of F32. */
struct FloatUnits {
    static constexpr int kPieces = 32;
    static __device__ size_t offset(int c, int k, int t) { return 128 * (c >> 2) + 32 * t + 16 * (c & 1) + 4 * k; }
    static __device__ uint32_t load(const LaneRows &rows, int c, int k) {
        return rows.row[c >> 1 & 1].load32(offset(c, k, rows.t));
    }
    static __device__ void store(const LaneRows &rows, int c, int k, uint32_t word) {
        rows.row[c >> 1 & 1].store32(offset(c, k, rows.t), word);
    }
};

/*------   Pieces of a lane   ------*/

__device__ __forceinline__ uint4 *piece_at(uint8_t *tile, int c, int lane) {
    return reinterpret_cast<uint4 *>(tile + kPieceBytes * (kTileLanes * c + lane));
}

template <class Units> __device__ __forceinline__ void pack_pieces(const LaneRows &rows, uint8_t *tile, int lane) {
#pragma unroll 4
    for (int c = 0; c < Units::kPieces; c++) {
        *piece_at(tile, c, lane) =
            make_uint4(Units::load(rows, c, 0), Units::load(rows, c, 1), Units::load(rows, c, 2), Units::load(rows, c, 3));
    }
}
template <class Units> __device__ __forceinline__ void unpack_pieces(const LaneRows &rows, uint8_t *tile, int lane) {
#pragma unroll 4
    for (int c = 0; c < Units::kPieces; c++) {
        const uint4 piece = *piece_at(tile, c, lane);
        Units::store(rows, c, 0, piece.x);
        Units::store(rows, c, 1, piece.y);
        Units::store(rows, c, 2, piece.z);
        Units::store(rows, c, 3, piece.w);
    }
}

/*------   E8   ------*/

/* Sign v = 0..7 of a unit from bit v to bit 8 (v & 3) + 4 (v < 4), which is class 0 of a sign word; and back. */
__device__ __forceinline__ uint32_t spread_signs(uint32_t signs) {
    const uint32_t low = (signs & 15u) * 0x00204081u & 0x01010101u, high = (signs >> 4) * 0x00204081u & 0x01010101u;
    return low << 4 | high;
}
__device__ __forceinline__ uint32_t collect_signs(uint32_t x) {
    const uint32_t low = (x >> 4 & 0x01010101u) * 0x01020408u >> 24, high = (x & 0x01010101u) * 0x01020408u >> 24;
    return (low & 15u) | (high & 15u) << 4;
}

/* x with s = x ^ rotl(x, 4) and `code` as its top nibble, for an s whose nibbles have the XOR 0; and s from x. */
__device__ __forceinline__ uint32_t hide_code(uint32_t s, uint32_t code) {
    s ^= s << 4;
    s ^= s << 8;
    s ^= s << 16;
    return s ^ code * 0x11111111u;
}
__device__ __forceinline__ uint32_t signs_beside_code(uint32_t x) {
    return x ^ (x << 4 | x >> 28);
}

/* Lane t has the uploaded words of sub-blocks 2t and 2t + 1: word[j] is that of sub-block 2t + (j & 1), row g + 8 (j >> 1).
 * Their codes are those that its own sign words carry; their signs go to, and come from, all four lanes of its g. */
__device__ __forceinline__ size_t e8_word_offset(int t, int j) {
    return COLI_E8_WORDS_OFFSET + 4 * (2 * t + (j & 1));
}
/* Which of them has the signs of class p. */
__device__ constexpr int e8_word_of_class(int p) {
    return (p >> 1) + 2 * (p & 1);
}

__device__ __forceinline__ uint32_t pack_sign_word(const uint32_t word[4], int i, int lane) {
    const int t = lane & 3, owner = (lane & ~3) + i;
    uint32_t s = 0;
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const uint32_t subblock = __shfl_sync(kAllLanes, word[e8_word_of_class(p)], owner);
        s |= spread_signs(coli_e8_signs(subblock, t)) << p;
    }
    return hide_code(s, word[i] >> 28);
}

/* Adds to the lane's words the signs that sign word i of all four lanes has for them. */
__device__ __forceinline__ void unpack_sign_word(uint32_t word[4], uint32_t x, int i, int lane) {
    const int t = lane & 3;
    const uint32_t s = signs_beside_code(x);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        uint32_t subblock = (collect_signs(s >> p) & 127u) << 7 * t;
        subblock |= __shfl_xor_sync(kAllLanes, subblock, 1);
        subblock |= __shfl_xor_sync(kAllLanes, subblock, 2);
        if (t == i) word[e8_word_of_class(p)] |= subblock;
    }
    word[i] |= x >> 28 << 28;
}

using E8Indices = HalfWordUnits<8>;

__device__ __forceinline__ uint32_t *e8_superscales_at(uint8_t *tile, int g) {
    return reinterpret_cast<uint32_t *>(tile + tile_pieces_bytes(COLI_E8)) + g;
}

__device__ __forceinline__ void pack_e8(const LaneRows &rows, uint8_t *tile, int lane) {
    pack_pieces<E8Indices>(rows, tile, lane);
    uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; j++) word[j] = rows.row[j >> 1].load32(e8_word_offset(rows.t, j));
    *piece_at(tile, E8Indices::kPieces, lane) = make_uint4(pack_sign_word(word, 0, lane), pack_sign_word(word, 1, lane),
                                                           pack_sign_word(word, 2, lane), pack_sign_word(word, 3, lane));
    if (rows.t == 0) {
        *e8_superscales_at(tile, lane >> 2) =
            rows.row[0].load16(COLI_E8_SCALE_OFFSET) | rows.row[1].load16(COLI_E8_SCALE_OFFSET) << 16;
    }
}

__device__ __forceinline__ void unpack_e8(const LaneRows &rows, uint8_t *tile, int lane) {
    unpack_pieces<E8Indices>(rows, tile, lane);
    const uint4 signs = *piece_at(tile, E8Indices::kPieces, lane);
    uint32_t word[4] = {0, 0, 0, 0};
    unpack_sign_word(word, signs.x, 0, lane);
    unpack_sign_word(word, signs.y, 1, lane);
    unpack_sign_word(word, signs.z, 2, lane);
    unpack_sign_word(word, signs.w, 3, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) rows.row[j >> 1].store32(e8_word_offset(rows.t, j), word[j]);
    if (rows.t == 0) {
        const uint32_t superscales = *e8_superscales_at(tile, lane >> 2);
        rows.row[0].store16(COLI_E8_SCALE_OFFSET, superscales);
        rows.row[1].store16(COLI_E8_SCALE_OFFSET, superscales >> 16);
    }
}

/*------   Scales in tiles   ------*/

/* Which uploaded scale is number n of a tile. */
struct ScalePlace {
    int row, column;
    bool first; /* no tile further up or left has it too */
};

__device__ __forceinline__ ScalePlace scale_place(const LayoutParams &p, int strip, int k, int n) {
    const int groups = tile_scale_groups(p.format, p.group_size);
    const int top = strip * kStripRows, left = k * kTileColumns;
    if (p.format == COLI_MXFP4) return {top + n / groups, k * groups + n % groups, true};
    if (p.format == COLI_FP8_B128) return {top / COLI_FP8_BLOCK, k * groups + n, top % COLI_FP8_BLOCK == 0};
    const int column = left + n / kStripRows * (kTileColumns / groups);
    return {top + n % kStripRows, column / p.group_size, column % p.group_size == 0};
}

/* Where it is staged; NULL for a scale that does not exist. */
template <class T> __device__ T *staged_scale(const StagedRows &staged, const ScalePlace &place) {
    const ScaleRange &range = staged.scale_range;
    const int row = place.row - range.first_row, column = place.column - range.first_column;
    if (row < 0 || row >= range.rows || column < 0 || column >= range.columns) return nullptr;
    return reinterpret_cast<T *>(staged.scales) + static_cast<size_t>(row) * range.columns + column;
}

/* T holds the bits of a scale. */
template <class T, bool PACK>
__device__ void convert_scales(const LayoutParams &p, uint8_t *tile, int strip, int k, int lane) {
    T *scales = reinterpret_cast<T *>(tile + tile_pieces_bytes(p.format));
    const int count = static_cast<int>(tile_scales_bytes(p.format, p.group_size) / sizeof(T));
    for (int n = lane; n < count; n += kTileLanes) {
        const ScalePlace place = scale_place(p, strip, k, n);
        const bool filler = p.format == COLI_FP8_B128 && n >= tile_scale_groups(p.format, p.group_size);
        T *raw = filler ? nullptr : staged_scale<T>(p.staged, place);
        if (PACK) scales[n] = raw ? *raw : T{0};
        if (!PACK && raw && place.first) *raw = scales[n];
    }
}

/*------   Kernels   ------*/

/* What a row that does not exist holds: the code of zero. */
__device__ __forceinline__ uint32_t zero_codes(int format) {
    if (format == COLI_INT4 || format == COLI_INT4_GROUPED) return 0x88888888u;
    return format == COLI_INT2 ? 0xaaaaaaaau : 0;
}

struct E8Units {};

/* A warp for each tile of the range. */
template <class Units, bool PACK> __global__ void __launch_bounds__(kPackThreads) convert(const LayoutParams p) {
    const int lane = threadIdx.x % kTileLanes;
    const unsigned i = blockIdx.x * (kPackThreads / kTileLanes) + threadIdx.x / kTileLanes;
    if (i >= static_cast<unsigned>(p.range.strips) * p.range.tiles) return;
    const int strip = p.range.first_strip + static_cast<int>(i / p.range.tiles);
    const int k_in_range = static_cast<int>(i % p.range.tiles), k = p.range.first_tile + k_in_range;
    uint8_t *tile = p.tiles + (static_cast<size_t>(strip) * tile_count(p.I) + k) * tile_bytes(p.format, p.group_size);

    const size_t left = k_in_range * coli_geometry_row_bytes(p.format, kTileColumns);
    LaneRows rows;
    rows.t = lane & 3;
    rows.zipped = p.format != COLI_MXFP4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = strip * kStripRows + (lane >> 2) + 8 * half;
        const size_t staged_row = static_cast<size_t>(row - p.range.first_strip * kStripRows);
        rows.row[half].bytes = p.staged.weights + staged_row * p.staged.row_bytes + left;
        rows.row[half].count = row < p.O ? p.staged.row_bytes - left : 0;
        rows.row[half].pad = zero_codes(p.format);
    }

    if constexpr (std::is_same<Units, E8Units>::value) {
        if (PACK)
            pack_e8(rows, tile, lane);
        else
            unpack_e8(rows, tile, lane);
    } else {
        if (PACK)
            pack_pieces<Units>(rows, tile, lane);
        else
            unpack_pieces<Units>(rows, tile, lane);
        if (!scales_in_tiles(p.format, p.group_size)) return;
        if (p.format == COLI_MXFP4)
            convert_scales<uint8_t, PACK>(p, tile, strip, k, lane);
        else
            convert_scales<uint32_t, PACK>(p, tile, strip, k, lane);
    }
}

template <class Units, bool PACK> void launch_convert(const LayoutParams &params, cudaStream_t stream) {
    const size_t tiles = static_cast<size_t>(params.range.strips) * params.range.tiles;
    constexpr size_t tiles_per_block = kPackThreads / kTileLanes;
    const unsigned blocks = static_cast<unsigned>((tiles + tiles_per_block - 1) / tiles_per_block);
    convert<Units, PACK><<<blocks, kPackThreads, 0, stream>>>(params);
}

template <bool PACK> cudaError_t launch(const LayoutParams &params, cudaStream_t stream) {
    switch (params.format) {
    case COLI_F32:
        launch_convert<FloatUnits, PACK>(params, stream);
        break;
    case COLI_INT8:
    case COLI_FP8_B128:
        launch_convert<ByteUnits, PACK>(params, stream);
        break;
    case COLI_INT2:
        launch_convert<HalfWordUnits<2>, PACK>(params, stream);
        break;
    case COLI_E8:
        launch_convert<E8Units, PACK>(params, stream);
        break;
    default:
        launch_convert<NibbleUnits, PACK>(params, stream);
        break;
    }
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_pack(const LayoutParams &params, cudaStream_t stream) {
    return launch<true>(params, stream);
}

cudaError_t launch_unpack(const LayoutParams &params, cudaStream_t stream) {
    return launch<false>(params, stream);
}

} // namespace coli
