/* A thread block encodes a super-block. It is compiled without fusing products and sums (meson.build), and what rounds
 * comes from formats/e8_encode.h or stands here in the order of core/, so that all comparisons come out as they do on the
 * CPU. Minima and maxima do not round, and are taken in any order. */
#include "encode_e8.h"

#include "../../formats/e8_encode.h"

namespace coli {

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kGroups = COLI_E8_BLOCK / 4;              /* of four weights, which share an entry */
constexpr int kGroupsASubblock = COLI_E8_SUBBLOCK / 4;  /* two a lane */
constexpr int kLanesABlock = COLI_E8_BLOCK / COLI_LANE; /* lanes of 8 weights, not of threads */
constexpr int kStoredHalfwords = COLI_E8_BLOCK_BYTES / 2;

/*------   A super-block in global memory   ------*/

struct Place {
    const float *w;
    int first_column, columns; /* that exist */
    uint8_t *block;
};

__device__ Place find_place(const EncodeParams &p) {
    const int blocks = coli_e8_blocks(p.columns), row = blockIdx.x / blocks, first = blockIdx.x % blocks * COLI_E8_BLOCK;
    return {p.w + static_cast<size_t>(row) * p.columns + first, first, min(p.columns - first, COLI_E8_BLOCK),
            p.blocks + static_cast<size_t>(blockIdx.x) * COLI_E8_BLOCK_BYTES};
}

/* Zeros stand for columns that do not exist. */
__device__ void load_weights(const Place &place, float *w) {
    for (int i = threadIdx.x; i < COLI_E8_BLOCK; i += blockDim.x) w[i] = i < place.columns ? place.w[i] : 0.0f;
}

__device__ void store_block(const uint8_t *block, const Place &place) {
    for (int i = threadIdx.x; i < kStoredHalfwords; i += blockDim.x)
        reinterpret_cast<uint16_t *>(place.block)[i] = static_cast<uint16_t>(coli_load_u16(block + 2 * i));
}

__device__ void load_order(const EncoderCodebook &codebook, LengthOrder *order) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) order->entries[i] = codebook.order.entries[i];
    for (int i = threadIdx.x; i <= kCodebookLengths; i += blockDim.x) order->first[i] = codebook.order.first[i];
}

/* Sixteen neighbouring threads have a code each: gives all of them the lowest value, and its code, the lower of equals. */
template <class T> __device__ int lowest_code(T *value, int code) {
    for (int distance = COLI_E8_CODES / 2; distance > 0; distance /= 2) {
        const T other = __shfl_xor_sync(kAllLanes, *value, distance);
        const int other_code = __shfl_xor_sync(kAllLanes, code, distance);
        if (other < *value || (other == *value && other_code < code)) {
            *value = other;
            code = other_code;
        }
    }
    return code;
}

/*------   The reference rule   ------*/

constexpr int kReferenceThreads = COLI_E8_SUBBLOCKS * COLI_E8_CODES;

/* Numbers of the codebook are in double: products with float32 are exact then, and ties are ties. */
struct ReferenceMemory {
    double entries[256][4];
    double lengths[256];
    double products[kCodebookLengths][kGroups]; /* the largest of each length */
    double scales[COLI_E8_SUBBLOCKS];           /* chosen, as are the codes */
    float w[COLI_E8_BLOCK];
    LengthOrder order;
    uint32_t d_bits;
    uint8_t codes[COLI_E8_SUBBLOCKS];
    uint8_t block[COLI_E8_BLOCK_BYTES];
};

__device__ void load_codebook(const EncoderCodebook &codebook, ReferenceMemory &s) {
    for (int entry = threadIdx.x; entry < 256; entry += blockDim.x) {
        double length = 0;
        for (int k = 0; k < 4; k++) {
            const double weight = codebook.bytes[entry][k] * 0.5;
            s.entries[entry][k] = weight;
            length += weight * weight;
        }
        s.lengths[entry] = length;
    }
    load_order(codebook, &s.order);
}

__device__ double product_with(const ReferenceMemory &s, const double m[4], int entry) {
    const double *g = s.entries[entry];
    return coli_e8_reference_product(m[0], m[1], m[2], m[3], g[0], g[1], g[2], g[3]);
}

__device__ void load_magnitudes(const ReferenceMemory &s, int group, double m[4]) {
    for (int k = 0; k < 4; k++) m[k] = fabsf(s.w[4 * group + k]);
}

/* The threads of a warp have the same length, and groups of their own. */
__device__ void find_largest_products(ReferenceMemory &s) {
    const int group = threadIdx.x % kGroups;
    double m[4];
    load_magnitudes(s, group, m);
    for (int length = threadIdx.x / kGroups; length < kCodebookLengths; length += kReferenceThreads / kGroups) {
        double largest = 0;
        for (int i = s.order.first[length]; i < s.order.first[length + 1]; i++) {
            const double product = product_with(s, m, s.order.entries[i]);
            largest = product > largest ? product : largest;
        }
        s.products[length][group] = largest;
    }
}

__device__ uint32_t reference_scale(const float *w) {
    double squares = 0;
    for (int i = 0; i < COLI_E8_BLOCK; i++) squares += static_cast<double>(w[i]) * w[i];
    return coli_e8_reference_scale(squares);
}

/* A thread has a code of a sub-block. */
__device__ void choose_codes(ReferenceMemory &s) {
    const int b = threadIdx.x / COLI_E8_CODES, own_code = threadIdx.x % COLI_E8_CODES;
    const double scale = coli_e8_reference_subscale(coli_f16_to_f32(s.d_bits), own_code);
    double scores[kGroupsASubblock];
#pragma unroll
    for (int g = 0; g < kGroupsASubblock; g++) scores[g] = HUGE_VAL;
    for (int length = 0; length < kCodebookLengths; length++) {
        const double square = scale * s.lengths[s.order.entries[s.order.first[length]]];
        const double *products = s.products[length] + kGroupsASubblock * b;
#pragma unroll
        for (int g = 0; g < kGroupsASubblock; g++) {
            const double score = square - products[g];
            scores[g] = score < scores[g] ? score : scores[g];
        }
    }
    double error = 0;
#pragma unroll
    for (int g = 0; g < kGroupsASubblock; g++) error += scale * scores[g];
    const int code = lowest_code(&error, own_code);
    if (code != own_code) return;
    s.codes[b] = static_cast<uint8_t>(code);
    s.scales[b] = scale;
}

/* Two threads have a group, each one half of the codebook. */
__device__ void choose_reference_entries(ReferenceMemory &s) {
    const int group = threadIdx.x / 2, first = threadIdx.x % 2 * 128;
    const double scale = s.scales[group / kGroupsASubblock];
    double m[4], lowest = HUGE_VAL;
    load_magnitudes(s, group, m);
    int best = first;
    for (int entry = first; entry < first + 128; entry++) {
        const double score = scale * s.lengths[entry] - product_with(s, m, entry);
        if (score < lowest) {
            lowest = score;
            best = entry;
        }
    }
    const double other = __shfl_xor_sync(kAllLanes, lowest, 1);
    const int other_best = __shfl_xor_sync(kAllLanes, best, 1);
    if (first == 0) s.block[group] = static_cast<uint8_t>(other < lowest ? other_best : best);
}

__device__ void store_reference_word(ReferenceMemory &s, int b) {
    uint32_t word = static_cast<uint32_t>(s.codes[b]) << 28;
    for (int l = 0; l < COLI_E8_LANES; l++)
        word |= coli_e8_reference_signs(s.w + COLI_E8_SUBBLOCK * b + COLI_LANE * l) << 7 * l;
    coli_e8_store_word(s.block, b, word);
}

__global__ void __launch_bounds__(kReferenceThreads) encode_reference(const EncodeParams p) {
    __shared__ ReferenceMemory s;
    const Place place = find_place(p);
    load_weights(place, s.w);
    load_codebook(*p.codebook, s);
    __syncthreads();
    for (int i = threadIdx.x; i < COLI_E8_BLOCK; i += kReferenceThreads) {
        if (!(fabsf(s.w[i]) < HUGE_VALF)) *p.not_finite = 1;
    }
    if (threadIdx.x == 0) s.d_bits = reference_scale(s.w); /* meanwhile, the other warps go on */
    find_largest_products(s);
    __syncthreads();
    choose_codes(s);
    __syncthreads();
    choose_reference_entries(s);
    if (threadIdx.x < COLI_E8_SUBBLOCKS) store_reference_word(s, threadIdx.x);
    if (threadIdx.x == 0) coli_e8_store_scale(s.block, s.d_bits);
    __syncthreads();
    store_block(s.block, place);
}

/*------   The search   ------*/

constexpr int kSearchThreads = COLI_E8_SEARCH_TRIALS * COLI_E8_CODES;

/* An entry's weights. */
struct alignas(16) Entry {
    float g[4];
};
/* Of the two groups of a lane: with all signs as they are, and with one of each group flipped. */
struct alignas(16) LaneLine {
    float kept[2], flipped[2];
};
struct alignas(8) LaneLengths {
    float of[2];
};
enum Candidate { kReference, kFound, kFitted, kCandidates };

struct SearchMemory {
    LaneLine products[256][COLI_E8_LANES]; /* of a length, the largest; with importance, of an entry */
    LaneLengths weighted_lengths[256][COLI_E8_LANES];
    Entry entries[256];
    float lengths[kCodebookLengths];
    float w[COLI_E8_BLOCK], importance[COLI_E8_BLOCK];
    float magnitudes[COLI_E8_BLOCK], weights[COLI_E8_BLOCK]; /* the same in units: at most 1 */
    float decoded[kCandidates][COLI_E8_BLOCK];
    double squares[COLI_E8_SUBBLOCKS];
    double totals[COLI_E8_SEARCH_TRIALS];
    double errors[kCandidates];
    float largest[COLI_E8_SUBBLOCKS], largest_importance[COLI_E8_SUBBLOCKS];
    uint32_t d_bits[COLI_E8_SEARCH_TRIALS];
    LengthOrder order;
    uint8_t signs[kGroups];    /* four bits */
    uint8_t odd[kLanesABlock]; /* negatives, so that one weight of the lane must take the other sign */
    uint8_t codes[COLI_E8_SEARCH_TRIALS][COLI_E8_SUBBLOCKS];
    uint8_t blocks[kCandidates][COLI_E8_BLOCK_BYTES];
};

__device__ void load_codebook(const EncoderCodebook &codebook, SearchMemory &s) {
    for (int entry = threadIdx.x; entry < 256; entry += blockDim.x) {
        const uint8_t *bytes = codebook.bytes[entry];
        for (int k = 0; k < 4; k++) s.entries[entry].g[k] = bytes[k] * 0.5f;
    }
    for (int length = threadIdx.x; length < kCodebookLengths; length += blockDim.x) {
        const uint8_t *bytes = codebook.bytes[codebook.order.entries[codebook.order.first[length]]];
        float sum = 0;
        for (int k = 0; k < 4; k++) sum += bytes[k] * 0.5f * (bytes[k] * 0.5f);
        s.lengths[length] = sum;
    }
    load_order(codebook, &s.order);
}

/* Columns that do not exist weigh nothing. */
__device__ void load_importance(const EncodeParams &p, const Place &place, SearchMemory &s) {
    for (int i = threadIdx.x; i < COLI_E8_BLOCK; i += blockDim.x) {
        const float given = p.importance && i < place.columns ? p.importance[place.first_column + i] : 1.0f;
        s.importance[i] = i < place.columns ? given : 0.0f;
    }
}

__device__ void load_reference(const Place &place, SearchMemory &s) {
    for (int i = threadIdx.x; i < COLI_E8_BLOCK_BYTES; i += blockDim.x) {
        s.blocks[kReference][i] = place.block[i];
        s.blocks[kFound][i] = 0; /* zeros: a super-scale of 0 */
    }
}

__device__ float largest_of(const float *values, int count) {
    float largest = 0;
    for (int i = 0; i < count; i++) largest = fmaxf(largest, fabsf(values[i]));
    return largest;
}

/* Magnitudes, weights and parities, with two barriers. False where all weights are zero. */
__device__ bool set_problem(SearchMemory &s, bool has_importance, double *unit, bool *weighted) {
    const int b = threadIdx.x;
    if (b < COLI_E8_SUBBLOCKS) {
        s.largest[b] = largest_of(s.w + COLI_E8_SUBBLOCK * b, COLI_E8_SUBBLOCK);
        s.largest_importance[b] = largest_of(s.importance + COLI_E8_SUBBLOCK * b, COLI_E8_SUBBLOCK);
    }
    __syncthreads();
    const float largest = largest_of(s.largest, COLI_E8_SUBBLOCKS);
    if (largest == 0) return false;
    const float largest_importance = largest_of(s.largest_importance, COLI_E8_SUBBLOCKS);
    *unit = coli_power_of_two_above(largest);
    *weighted = has_importance && largest_importance > 0; /* importance of zero everywhere counts as none given */
    const double factor = 1 / coli_power_of_two_above(largest_importance);
    for (int i = threadIdx.x; i < COLI_E8_BLOCK; i += blockDim.x) {
        s.magnitudes[i] = coli_e8_magnitude(s.w[i], *unit);
        s.weights[i] = *weighted ? static_cast<float>(s.importance[i] * factor) : 1.0f;
    }
    if (threadIdx.x < kLanesABlock)
        s.odd[threadIdx.x] = static_cast<uint8_t>(coli_e8_is_odd(coli_e8_sign_bits(s.w + COLI_LANE * threadIdx.x)));
    __syncthreads();
    return true;
}

/* RMS of the largest sub-block, with a barrier. */
__device__ double largest_rms(SearchMemory &s, double unit) {
    if (threadIdx.x < COLI_E8_SUBBLOCKS) {
        const float *magnitudes = s.magnitudes + COLI_E8_SUBBLOCK * threadIdx.x;
        double squares = 0;
        for (int i = 0; i < COLI_E8_SUBBLOCK; i++) squares += static_cast<double>(magnitudes[i]) * magnitudes[i];
        s.squares[threadIdx.x] = squares;
    }
    __syncthreads();
    double largest = 0;
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) largest = s.squares[b] > largest ? s.squares[b] : largest;
    return sqrt(largest / COLI_E8_SUBBLOCK) * unit;
}

/* A group of four weights and what their products with entries are made of. */
struct Group {
    float m[4]; /* magnitudes times importance */
    float h[4];

    __device__ Group(const SearchMemory &s, int group) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            h[k] = s.weights[4 * group + k];
            m[k] = s.magnitudes[4 * group + k] * h[k];
        }
    }
    __device__ void products(const Entry &entry, float *kept, float *flipped) const {
        const float *g = entry.g, x0 = m[0] * g[0], x1 = m[1] * g[1], x2 = m[2] * g[2], x3 = m[3] * g[3];
        *kept = coli_e8_kept_product(x0, x1, x2, x3);
        *flipped = coli_e8_flipped_product(*kept, x0, x1, x2, x3);
    }
    __device__ float length(const Entry &entry) const {
        return coli_e8_weighted_length(h, entry.g[0], entry.g[1], entry.g[2], entry.g[3]);
    }
};

/* The lines of sub-block b, lines of one length as one. */
__device__ void set_lines(SearchMemory &s, int b) {
    for (int i = threadIdx.x; i < kCodebookLengths * kGroupsASubblock; i += kSearchThreads) {
        const int g = i % kGroupsASubblock, length = i / kGroupsASubblock;
        const Group group(s, kGroupsASubblock * b + g);
        float most_kept = -HUGE_VALF, most_flipped = -HUGE_VALF;
        for (int j = s.order.first[length]; j < s.order.first[length + 1]; j++) {
            float kept, flipped;
            group.products(s.entries[s.order.entries[j]], &kept, &flipped);
            most_kept = fmaxf(most_kept, kept);
            most_flipped = fmaxf(most_flipped, flipped);
        }
        s.products[length][g / 2].kept[g % 2] = most_kept;
        s.products[length][g / 2].flipped[g % 2] = most_flipped;
    }
}

/* With importance, each entry has a line and lengths of its own. */
__device__ void set_weighted_lines(SearchMemory &s, int b) {
    for (int i = threadIdx.x; i < 256 * kGroupsASubblock; i += kSearchThreads) {
        const int g = i % kGroupsASubblock, entry = i / kGroupsASubblock;
        const Group group(s, kGroupsASubblock * b + g);
        LaneLine &line = s.products[entry][g / 2];
        group.products(s.entries[entry], &line.kept[g % 2], &line.flipped[g % 2]);
        s.weighted_lengths[entry][g / 2].of[g % 2] = group.length(s.entries[entry]);
    }
}

/* How the squared error of lane l under a scale differs from that of zeros. */
template <bool WEIGHTED, bool ODD> __device__ float lane_gain(const SearchMemory &s, int l, float scale) {
    LaneLine lowest = {{HUGE_VALF, HUGE_VALF}, {HUGE_VALF, HUGE_VALF}};
#pragma unroll 4
    for (int i = 0; i < (WEIGHTED ? 256 : kCodebookLengths); i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float square = scale * (WEIGHTED ? s.weighted_lengths[i][l].of[half] : s.lengths[i]);
            lowest.kept[half] = fminf(lowest.kept[half], square - s.products[i][l].kept[half]);
            if (ODD) lowest.flipped[half] = fminf(lowest.flipped[half], square - s.products[i][l].flipped[half]);
        }
    }
    if (!ODD) return scale * (lowest.kept[0] + lowest.kept[1]);
    const float in_first = lowest.flipped[0] + lowest.kept[1], in_second = lowest.kept[0] + lowest.flipped[1];
    return scale * (in_first <= in_second ? in_first : in_second);
}

template <bool WEIGHTED> __device__ float subblock_gain(const SearchMemory &s, int b, float scale) {
    float gain = 0;
    for (int l = 0; l < COLI_E8_LANES; l++)
        gain +=
            s.odd[COLI_E8_LANES * b + l] ? lane_gain<WEIGHTED, true>(s, l, scale) : lane_gain<WEIGHTED, false>(s, l, scale);
    return gain;
}

/* Each thread has a code of a trial. Returns the best trial, -1 where zeros are better than all; with barriers. */
__device__ int try_super_scales(SearchMemory &s, double unit, bool weighted) {
    const int trial = threadIdx.x / COLI_E8_CODES, own_code = threadIdx.x % COLI_E8_CODES;
    const uint32_t d_bits = coli_e8_search_scale(largest_rms(s, unit), trial);
    const float scale = coli_e8_scaled(coli_e8_unit_scale(d_bits, unit), static_cast<uint32_t>(own_code) << 28);
    double total = 0;
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        weighted ? set_weighted_lines(s, b) : set_lines(s, b);
        __syncthreads();
        float gain = weighted ? subblock_gain<true>(s, b, scale) : subblock_gain<false>(s, b, scale);
        __syncthreads(); /* the lines were read */
        const int code = lowest_code(&gain, own_code);
        if (own_code == 0) s.codes[trial][b] = static_cast<uint8_t>(code);
        total += gain;
    }
    if (own_code == 0) {
        s.totals[trial] = total;
        s.d_bits[trial] = d_bits;
    }
    __syncthreads();
    int best = -1;
    double lowest = 0;
    for (int i = 0; i < COLI_E8_SEARCH_TRIALS; i++) {
        if (!(s.totals[i] < lowest)) continue;
        lowest = s.totals[i];
        best = i;
    }
    return best;
}

/* What a group of four weights chooses under its sub-scale: scores and entries. */
struct GroupChoice {
    float kept, flipped;
    int kept_entry, flipped_entry;
};

__device__ GroupChoice choose_group(const SearchMemory &s, int g, float scale) {
    const Group group(s, g);
    GroupChoice choice = {HUGE_VALF, HUGE_VALF, 0, 0};
    for (int entry = 0; entry < 256; entry++) {
        float kept, flipped;
        group.products(s.entries[entry], &kept, &flipped);
        const float square = scale * group.length(s.entries[entry]);
        if (square - kept < choice.kept) {
            choice.kept = square - kept;
            choice.kept_entry = entry;
        }
        if (square - flipped < choice.flipped) {
            choice.flipped = square - flipped;
            choice.flipped_entry = entry;
        }
    }
    return choice;
}

/* Stores a group's index and signs. Neighbouring threads have the two groups of a lane; where the lane must flip a sign, it
 * is in the group where that costs less, the first of equals. */
__device__ void store_group(const EncoderCodebook &codebook, SearchMemory &s, int g, const GroupChoice &choice) {
    const float other_kept = __shfl_xor_sync(kAllLanes, choice.kept, 1);
    const float other_flipped = __shfl_xor_sync(kAllLanes, choice.flipped, 1);
    const float flipped_here = choice.flipped + other_kept, flipped_there = choice.kept + other_flipped;
    const bool here = g % 2 == 0 ? flipped_here <= flipped_there : flipped_here < flipped_there;
    const bool flips = s.odd[g / 2] && here;
    const int entry = flips ? choice.flipped_entry : choice.kept_entry;
    uint32_t signs = 0;
    for (int k = 0; k < 4; k++) signs |= static_cast<uint32_t>(s.w[4 * g + k] < 0) << k;
    if (flips) signs ^= 1u << coli_e8_flip(s.magnitudes + 4 * g, s.weights + 4 * g, codebook.bytes[entry]);
    s.blocks[kFound][g] = static_cast<uint8_t>(entry);
    s.signs[g] = static_cast<uint8_t>(signs);
}

/* The block for the scales of a trial, with barriers. */
__device__ void choose_entries(const EncoderCodebook &codebook, SearchMemory &s, double unit, int trial) {
    const float d = coli_e8_unit_scale(s.d_bits[trial], unit);
    const int thread = threadIdx.x;
    if (thread < kGroups) {
        const uint32_t code = s.codes[trial][thread / kGroupsASubblock];
        store_group(codebook, s, thread, choose_group(s, thread, coli_e8_scaled(d, code << 28)));
    }
    __syncthreads();
    if (thread < COLI_E8_SUBBLOCKS) {
        uint32_t word = static_cast<uint32_t>(s.codes[trial][thread]) << 28;
        for (int l = 0; l < COLI_E8_LANES; l++) {
            const uint8_t *signs = s.signs + kGroupsASubblock * thread + 2 * l;
            word |= ((signs[0] | static_cast<uint32_t>(signs[1]) << 4) & 127u) << 7 * l;
        }
        coli_e8_store_word(s.blocks[kFound], thread, word);
    }
    if (thread == 0) coli_e8_store_scale(s.blocks[kFound], s.d_bits[trial]);
    __syncthreads();
}

__device__ void decode(const EncoderCodebook &codebook, SearchMemory &s, Candidate candidate, int lane) {
    coli_e8_decode_lane(s.blocks[candidate], lane, codebook.bytes[0], s.decoded[candidate] + COLI_LANE * lane);
}

__device__ double squared_error(const SearchMemory &s, Candidate candidate) {
    double error = 0;
    for (int i = 0; i < COLI_E8_BLOCK; i++) error += coli_e8_error(s.w[i], s.decoded[candidate][i], s.importance[i]);
    return error;
}

__device__ uint32_t fitted_scale(const SearchMemory &s) {
    double product = 0, square = 0;
    for (int i = 0; i < COLI_E8_BLOCK; i++) {
        const float decoded = s.decoded[kFound][i];
        const double weighted = static_cast<double>(s.importance[i]) * decoded;
        product += weighted * s.w[i];
        square += weighted * decoded;
    }
    return coli_e8_fitted_scale(product, square, coli_load_u16(s.blocks[kFound] + COLI_E8_SCALE_OFFSET));
}

/* What was found, with its super-scale fitted, and the errors of all candidates; with barriers. Sums over the block follow
 * the order of its weights, each in a warp of its own. */
__device__ void weigh_candidates(const EncoderCodebook &codebook, SearchMemory &s) {
    constexpr int kWarp = 32;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (warp < kFitted) decode(codebook, s, static_cast<Candidate>(warp), lane);
    for (int i = threadIdx.x; i < COLI_E8_SCALE_OFFSET; i += kSearchThreads) s.blocks[kFitted][i] = s.blocks[kFound][i];
    __syncthreads();
    if (lane == 0 && warp < kFitted) s.errors[warp] = squared_error(s, static_cast<Candidate>(warp));
    if (lane == 0 && warp == kFitted) coli_e8_store_scale(s.blocks[kFitted], fitted_scale(s));
    __syncthreads();
    if (warp == kFitted) decode(codebook, s, kFitted, lane);
    __syncthreads();
    if (lane == 0 && warp == kFitted) s.errors[kFitted] = squared_error(s, kFitted);
    __syncthreads();
}

__global__ void __launch_bounds__(kSearchThreads) encode_search(const EncodeParams p) {
    __shared__ SearchMemory s;
    const Place place = find_place(p);
    load_weights(place, s.w);
    load_importance(p, place, s);
    load_reference(place, s);
    load_codebook(*p.codebook, s);
    __syncthreads();
    double unit;
    bool weighted;
    if (!set_problem(s, p.importance || place.columns < COLI_E8_BLOCK, &unit, &weighted)) return;
    const int trial = try_super_scales(s, unit, weighted);
    if (trial >= 0) choose_entries(*p.codebook, s, unit, trial);
    weigh_candidates(*p.codebook, s);
    Candidate best = s.errors[kFound] < s.errors[kReference] ? kFound : kReference;
    if (s.errors[kFitted] < s.errors[best]) best = kFitted;
    if (best != kReference) store_block(s.blocks[best], place);
}

int super_blocks(const EncodeParams &params) {
    return params.rows * coli_e8_blocks(params.columns);
}

} // namespace

cudaError_t launch_encode_reference(const EncodeParams &params, cudaStream_t stream) {
    encode_reference<<<super_blocks(params), kReferenceThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

cudaError_t launch_encode_search(const EncodeParams &params, cudaStream_t stream) {
    encode_search<<<super_blocks(params), kSearchThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

} // namespace coli
