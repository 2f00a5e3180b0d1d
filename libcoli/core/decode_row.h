/* decode_row.h - one encoded row to float32, for every format. Part of kernels_impl.h.
 *
 * A row is decoded in lanes of 8 columns by the functions of formats/, first to codes, then times the scale of their group.
 * The columns after the last whole lane are decoded as one more lane into a buffer. */
#ifndef COLI_CORE_DECODE_ROW_H
#define COLI_CORE_DECODE_ROW_H

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../formats/geometry.h"
#include "../include/coli/coli.h"
#include "parallel.h"
#include "tables.h"

/* Each of these decodes `count` lanes, from lane `first` of a row on, to w [8 count]. */

static void int8_lanes(const uint8_t *row, int first, int count, float *w) {
    const uint8_t *lanes = row + (size_t)first * 8;
    for (int i = 0; i < count; i++) {
        coli_int8_lane(coli_load_u32(lanes + (size_t)i * 8), coli_load_u32(lanes + (size_t)i * 8 + 4), w + (size_t)i * 8);
    }
}

static void int4_lanes(const uint8_t *row, int first, int count, float *w) {
    const uint8_t *lanes = row + (size_t)first * 4;
    for (int i = 0; i < count; i++) coli_int4_lane(coli_load_u32(lanes + (size_t)i * 4), w + (size_t)i * 8);
}

static void int2_lanes(const uint8_t *row, int first, int count, float *w) {
    const uint8_t *lanes = row + (size_t)first * 2;
    for (int i = 0; i < count; i++) coli_int2_lane(coli_load_u16(lanes + (size_t)i * 2), w + (size_t)i * 8);
}

static void int3_lanes(const uint8_t *row, int first, int count, float *w) {
    const int lanes_a_group = COLI_INT3_GROUP / COLI_LANE;
    for (int i = 0; i < count; i++) {
        const uint8_t *group = row + (size_t)((first + i) / lanes_a_group) * COLI_INT3_GROUP_BYTES;
        int lane = (first + i) % lanes_a_group;
        coli_int3_lane(coli_load_u16(group + 2 * lane), group[COLI_INT3_HIGH_OFFSET + lane], w + (size_t)i * 8);
    }
}

static void mxfp4_lanes(const uint8_t *row, int first, int count, float *w) {
    const uint8_t *lanes = row + (size_t)first * 4;
    for (int i = 0; i < count; i++) coli_mxfp4_lane(coli_load_u32(lanes + (size_t)i * 4), w + (size_t)i * 8);
}

static void fp8_lanes(const uint8_t *row, int first, int count, float *w) {
    const uint8_t *lanes = row + (size_t)first * 8;
    const float *table = coli_e4m3_table();
    for (int i = 0; i < count; i++) {
        const uint8_t *lane = lanes + (size_t)i * 8;
        coli_fp8_lane(coli_load_u32(lane), coli_load_u32(lane + 4), table, w + (size_t)i * 8);
    }
}

#define E8_LANES_A_BLOCK (COLI_E8_BLOCK / COLI_LANE)
#define E8_LANES_A_WORD (COLI_E8_SUBBLOCK / COLI_LANE)

/* The 32 weights of a sub-block, each as coli_e8_weight() gives it, from its 8 indices, its 32 signs and its sub-scale. The
 * vector forms read the codebook as floats, byte * 0.5, and flip signs by the bits of one word. */
#if defined(__AVX512F__)
static inline void e8_subblock(const float *magnitudes, const uint8_t *index, uint32_t signs, float subscale, float *w) {
    const __m512 scale = _mm512_set1_ps(subscale);
    const __m512i sign_bit = _mm512_set1_epi32((int)0x80000000u);
    for (int half = 0; half < 2; half++, index += 4, signs >>= 16, w += 16) {
        __m512 entries = _mm512_castps128_ps512(_mm_loadu_ps(magnitudes + 4 * (size_t)index[0]));
        entries = _mm512_insertf32x4(entries, _mm_loadu_ps(magnitudes + 4 * (size_t)index[1]), 1);
        entries = _mm512_insertf32x4(entries, _mm_loadu_ps(magnitudes + 4 * (size_t)index[2]), 2);
        entries = _mm512_insertf32x4(entries, _mm_loadu_ps(magnitudes + 4 * (size_t)index[3]), 3);
        __m512i weights = _mm512_castps_si512(_mm512_mul_ps(entries, scale));
        weights = _mm512_mask_xor_epi32(weights, (__mmask16)signs, weights, sign_bit);
        _mm512_storeu_ps(w, _mm512_castsi512_ps(weights));
    }
}
#elif defined(__AVX2__)
static inline void e8_subblock(const float *magnitudes, const uint8_t *index, uint32_t signs, float subscale, float *w) {
    const __m256 scale = _mm256_set1_ps(subscale), sign_bit = _mm256_set1_ps(-0.0f);
    const __m256i to_sign_bit = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    for (int lane = 0; lane < E8_LANES_A_WORD; lane++, index += 2, signs >>= 8, w += 8) {
        __m256 entries = _mm256_castps128_ps256(_mm_loadu_ps(magnitudes + 4 * (size_t)index[0]));
        entries = _mm256_insertf128_ps(entries, _mm_loadu_ps(magnitudes + 4 * (size_t)index[1]), 1);
        __m256i shifted = _mm256_sllv_epi32(_mm256_set1_epi32((int)signs), to_sign_bit);
        __m256 flips = _mm256_and_ps(_mm256_castsi256_ps(shifted), sign_bit);
        _mm256_storeu_ps(w, _mm256_xor_ps(_mm256_mul_ps(entries, scale), flips));
    }
}
#else
static inline void e8_subblock(const float *magnitudes, const uint8_t *index, uint32_t signs, float subscale, float *w) {
    for (int i = 0; i < COLI_E8_SUBBLOCK; i++) {
        float weight = magnitudes[4 * (size_t)index[i / 4] + i % 4] * subscale;
        w[i] = coli_bits_to_f32(coli_f32_to_bits(weight) ^ (signs >> i & 1u) << 31);
    }
}
#endif

static void e8_block(const uint8_t *block, const float *magnitudes, float *w) {
    const float d = coli_f16_to_f32(coli_load_u16(block + COLI_E8_SCALE_OFFSET));
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        uint32_t word = coli_load_u32(block + COLI_E8_WORDS_OFFSET + 4 * b);
        const uint8_t *index = block + COLI_E8_INDICES / COLI_E8_SUBBLOCKS * b;
        e8_subblock(magnitudes, index, coli_e8_subblock_signs(word), coli_e8_scaled(d, word), w + COLI_E8_SUBBLOCK * b);
    }
}

/* Lane `lane` of a super-block. */
static void e8_lane(const uint8_t *block, int lane, const uint8_t *codebook, float *w) {
    int b = lane / E8_LANES_A_WORD, l = lane % E8_LANES_A_WORD;
    uint32_t word = coli_load_u32(block + COLI_E8_WORDS_OFFSET + 4 * b);
    float subscale = coli_e8_subscale(coli_load_u16(block + COLI_E8_SCALE_OFFSET), word);
    coli_e8_lane(codebook + 4 * block[2 * lane], codebook + 4 * block[2 * lane + 1], coli_e8_signs(word, l), subscale, w);
}

/* `codebook` is NULL for the published one, whose magnitudes are at hand as floats; others are decoded lane by lane. */
static void e8_lanes(const uint8_t *row, int first, int count, const uint8_t *codebook, float *w) {
    const float *magnitudes = coli_e8_magnitudes();
    const uint8_t *bytes = codebook ? codebook : coli_e8_codebook();
    for (int lane = first, end = first + count; lane < end;) {
        const uint8_t *block = row + (size_t)(lane / E8_LANES_A_BLOCK) * COLI_E8_BLOCK_BYTES;
        int within = lane % E8_LANES_A_BLOCK, whole = !codebook && within == 0 && lane + E8_LANES_A_BLOCK <= end;
        if (whole)
            e8_block(block, magnitudes, w);
        else
            e8_lane(block, within, bytes, w);
        lane += whole ? E8_LANES_A_BLOCK : 1;
        w += whole ? COLI_E8_BLOCK : COLI_LANE;
    }
}

static void decode_lanes(const coli_matrix *matrix, const uint8_t *row, int first, int count, float *w) {
    switch (matrix->format) {
    case COLI_F32:
        memcpy(w, row + (size_t)first * 8 * sizeof(float), (size_t)count * 8 * sizeof(float));
        break;
    case COLI_INT8:
        int8_lanes(row, first, count, w);
        break;
    case COLI_INT4:
    case COLI_INT4_GROUPED:
        int4_lanes(row, first, count, w);
        break;
    case COLI_INT2:
        int2_lanes(row, first, count, w);
        break;
    case COLI_INT3_G64:
        int3_lanes(row, first, count, w);
        break;
    case COLI_E8:
        e8_lanes(row, first, count, matrix->codebook, w);
        break;
    case COLI_MXFP4:
        mxfp4_lanes(row, first, count, w);
        break;
    case COLI_FP8_B128:
        fp8_lanes(row, first, count, w);
        break;
    }
}

/* Bytes of a lane where lanes are packed one after another, so that a row may end inside one; 0 where rows are made of
 * whole groups, which hold the last lane in full. */
static size_t packed_lane_bytes(int format) {
    int whole_groups = format == COLI_INT3_G64 || format == COLI_E8;
    return whole_groups ? 0 : coli_geometry_row_bytes(format, COLI_LANE);
}

static void decode_tail(const coli_matrix *matrix, const uint8_t *row, int lane, int columns, float *w) {
    uint8_t padded[COLI_LANE * sizeof(float)] = {0};
    float decoded[COLI_LANE];
    size_t lane_bytes = packed_lane_bytes(matrix->format);
    if (lane_bytes) {
        memcpy(padded, row + (size_t)lane * lane_bytes, coli_geometry_row_bytes(matrix->format, columns));
        decode_lanes(matrix, padded, 0, 1, decoded);
    } else {
        decode_lanes(matrix, row, lane, 1, decoded);
    }
    memcpy(w, decoded, (size_t)columns * sizeof(float));
}

static float load_scale(const coli_matrix *matrix, size_t index) {
    float scale;
    if (matrix->format == COLI_MXFP4) return coli_ue8m0_to_f32(((const uint8_t *)matrix->scales)[index]);
    memcpy(&scale, (const uint8_t *)matrix->scales + index * sizeof scale, sizeof scale);
    return scale;
}

static void apply_scales(const coli_matrix *matrix, int row, float *w) {
    int shared = coli_geometry_scale_columns(matrix->format, matrix->columns, matrix->group_size);
    int groups = coli_ceil_div(matrix->columns, shared);
    size_t first = (size_t)(row / coli_geometry_scale_rows(matrix->format)) * (size_t)groups;
    for (int g = 0; g < groups; g++) {
        float scale = load_scale(matrix, first + (size_t)g);
        float *group = w + (size_t)g * (size_t)shared;
        int columns = g + 1 < groups ? shared : matrix->columns - g * shared;
        for (int i = 0; i < columns; i++) group[i] *= scale;
    }
}

static void decode_row(const coli_matrix *matrix, int row, float *w) {
    int columns = matrix->columns, lanes = columns / COLI_LANE, rest = columns % COLI_LANE;
    size_t row_bytes = coli_geometry_row_bytes(matrix->format, columns);
    const uint8_t *bytes = (const uint8_t *)matrix->weights + (size_t)row * row_bytes;
    decode_lanes(matrix, bytes, 0, lanes, w);
    if (rest) decode_tail(matrix, bytes, lanes, rest, w + (size_t)lanes * COLI_LANE);
    if (coli_geometry_scale_columns(matrix->format, columns, matrix->group_size)) apply_scales(matrix, row, w);
}

#endif
