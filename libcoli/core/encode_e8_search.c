/* encode_e8_search.c - E8 with super-scale, sub-scale codes, codebook entries and flipped signs chosen together.
 *
 * For a given sub-scale the best entries and flips of a sub-block are found exactly (kernels: e8_gains), so what is left is
 * the super-scale: a list of them is tried with all 16 codes for each sub-block, and the best is fitted to what was chosen
 * under it. Blocks are brought to magnitudes of at most 1 before, by a power of two. */
#include <math.h>
#include <string.h>

#include "encode_e8.h"
#include "kernels.h"
#include "tables.h"

/* Whether there is anything to weigh: importance of zero everywhere counts as none given. */
static int take_importance(coli_e8_problem *problem, const float *importance) {
    float largest = importance ? coli_largest(importance, COLI_E8_BLOCK) : 0;
    if (largest == 0) return 0;
    double factor = 1 / coli_power_of_two_above(largest);
    for (int i = 0; i < COLI_E8_BLOCK; i++) problem->importance[i] = (float)(importance[i] * factor);
    return 1;
}

void coli_e8_set_lane(coli_e8_subblock *subblock, int lane, const float w[COLI_LANE], double unit) {
    for (int j = 0; j < COLI_LANE; j++) subblock->magnitudes[COLI_LANE * lane + j] = coli_e8_magnitude(w[j], unit);
    subblock->odd[lane] = coli_e8_is_odd(coli_e8_sign_bits(w));
}

void coli_e8_set_problem(coli_e8_problem *problem, const float w[COLI_E8_BLOCK], const float *importance, double unit) {
    int weighted = take_importance(problem, importance);
    problem->unit = unit;
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        coli_e8_subblock *subblock = &problem->subblocks[b];
        subblock->importance = weighted ? problem->importance + COLI_E8_SUBBLOCK * b : NULL;
        for (int l = 0; l < COLI_E8_LANES; l++)
            coli_e8_set_lane(subblock, l, w + COLI_E8_SUBBLOCK * b + COLI_LANE * l, unit);
    }
}

static int lowest_code(const float gains[COLI_E8_CODES]) {
    int code = 0;
    for (int c = 1; c < COLI_E8_CODES; c++) {
        if (gains[c] < gains[code]) code = c;
    }
    return code;
}

int coli_e8_best_code(const coli_e8_subblock *subblock, float d) {
    float scales[COLI_E8_CODES], gains[COLI_E8_CODES];
    for (int c = 0; c < COLI_E8_CODES; c++) scales[c] = coli_e8_scaled(d, (uint32_t)c << 28);
    coli_kernels_current()->e8_gains(coli_e8_search_table(), subblock, scales, COLI_E8_CODES, gains);
    return lowest_code(gains);
}

/* Tries super-scales with all codes; the best, if it is better than *best, goes there. */
static void try_super_scales(const coli_e8_problem *problem, const uint32_t *d_bits, int count, coli_e8_scales *best) {
    float scales[COLI_E8_TRIALS], gains[COLI_E8_TRIALS];
    uint8_t codes[COLI_E8_TRIALS / COLI_E8_CODES][COLI_E8_SUBBLOCKS];
    double totals[COLI_E8_TRIALS / COLI_E8_CODES] = {0};
    for (int i = 0; i < count * COLI_E8_CODES; i++)
        scales[i] = coli_e8_scaled(coli_e8_unit_scale(d_bits[i / COLI_E8_CODES], problem->unit),
                                   (uint32_t)(i % COLI_E8_CODES) << 28);
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        coli_kernels_current()->e8_gains(coli_e8_search_table(), &problem->subblocks[b], scales, count * COLI_E8_CODES,
                                         gains);
        for (int trial = 0; trial < count; trial++) {
            const float *of_codes = gains + COLI_E8_CODES * trial;
            int code = lowest_code(of_codes);
            codes[trial][b] = (uint8_t)code;
            totals[trial] += of_codes[code];
        }
    }
    for (int trial = 0; trial < count; trial++) {
        if (totals[trial] < best->gain) {
            best->gain = totals[trial];
            best->d_bits = d_bits[trial];
            memcpy(best->codes, codes[trial], sizeof best->codes);
        }
    }
}

static void first_trials(const coli_e8_problem *problem, uint32_t d_bits[COLI_E8_SEARCH_TRIALS]) {
    double largest = 0;
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        double squares = 0;
        for (int i = 0; i < COLI_E8_SUBBLOCK; i++)
            squares += (double)problem->subblocks[b].magnitudes[i] * problem->subblocks[b].magnitudes[i];
        largest = fmax(largest, squares);
    }
    double rms = sqrt(largest / COLI_E8_SUBBLOCK) * problem->unit;
    for (int trial = 0; trial < COLI_E8_SEARCH_TRIALS; trial++) d_bits[trial] = coli_e8_search_scale(rms, trial);
}

uint32_t coli_e8_choose_lane(const coli_e8_subblock *subblock, int lane, const float w[COLI_LANE], float scale,
                             uint8_t indices[2]) {
    int flip = coli_kernels_current()->e8_choose(coli_e8_search_table(), subblock, lane, scale, indices);
    return coli_e8_sign_bits(w) ^ (flip < 0 ? 0 : 1u << flip);
}

int coli_e8_search_scales(const coli_e8_problem *problem, coli_e8_scales *best) {
    uint32_t d_bits[COLI_E8_SEARCH_TRIALS];
    first_trials(problem, d_bits);
    *best = (coli_e8_scales){0, 0, {0}};
    try_super_scales(problem, d_bits, COLI_E8_SEARCH_TRIALS, best);
    return best->gain < 0;
}

/* Writes the block for those scales. */
static void choose_entries(const coli_e8_problem *problem, const float w[COLI_E8_BLOCK], const coli_e8_scales *scales,
                           uint8_t *block) {
    float d = coli_e8_unit_scale(scales->d_bits, problem->unit);
    for (int b = 0; b < COLI_E8_SUBBLOCKS; b++) {
        uint32_t word = (uint32_t)scales->codes[b] << 28;
        float scale = coli_e8_scaled(d, word);
        for (int l = 0; l < COLI_E8_LANES; l++) {
            int lane = COLI_E8_LANES * b + l;
            uint32_t signs = coli_e8_choose_lane(&problem->subblocks[b], l, w + COLI_LANE * lane, scale, block + 2 * lane);
            word |= (signs & 127u) << 7 * l;
        }
        coli_e8_store_word(block, b, word);
    }
    coli_e8_store_scale(block, scales->d_bits);
}

static uint32_t fitted_super_scale(const float w[COLI_E8_BLOCK], const float *importance, const uint8_t *block) {
    float decoded[COLI_E8_BLOCK];
    double product = 0, square = 0;
    coli_e8_decode_block(block, decoded);
    for (int i = 0; i < COLI_E8_BLOCK; i++) {
        double weighted = (double)(importance ? importance[i] : 1) * decoded[i];
        product += weighted * w[i];
        square += weighted * decoded[i];
    }
    return coli_e8_fitted_scale(product, square, coli_load_u16(block + COLI_E8_SCALE_OFFSET));
}

static double squared_error(const float w[COLI_E8_BLOCK], const float *importance, const uint8_t *block) {
    float decoded[COLI_E8_BLOCK];
    double error = 0;
    coli_e8_decode_block(block, decoded);
    for (int i = 0; i < COLI_E8_BLOCK; i++) {
        error += coli_e8_error(w[i], decoded[i], importance ? importance[i] : 1);
    }
    return error;
}

/* Takes `candidate` where its error is smaller. */
static void keep_better(const float w[COLI_E8_BLOCK], const float *importance, const uint8_t *candidate, uint8_t *block) {
    if (squared_error(w, importance, candidate) < squared_error(w, importance, block))
        memcpy(block, candidate, COLI_E8_BLOCK_BYTES);
}

void coli_e8_search_block(const float w[COLI_E8_BLOCK], const float *importance, uint8_t block[COLI_E8_BLOCK_BYTES]) {
    float largest = coli_largest(w, COLI_E8_BLOCK);
    coli_e8_reference_block(w, block);
    if (largest == 0) return;
    coli_e8_problem problem;
    coli_e8_scales scales;
    uint8_t found[COLI_E8_BLOCK_BYTES] = {0}; /* zeros: a super-scale of 0 */
    coli_e8_set_problem(&problem, w, importance, coli_power_of_two_above(largest));
    if (coli_e8_search_scales(&problem, &scales)) {
        choose_entries(&problem, w, &scales, found);
        keep_better(w, importance, found, block);
        coli_e8_store_scale(found, fitted_super_scale(w, importance, found));
    }
    keep_better(w, importance, found, block);
}
