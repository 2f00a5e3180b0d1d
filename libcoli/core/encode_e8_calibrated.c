/* encode_e8_calibrated.c - E8 for the smallest error of the outputs: each lane's error is made up for by the lanes after
 * it.
 *
 * A row's error e costs e H e^T, H being the damped Hessian. With H = R R^T, R upper triangular, that is the square of e R,
 * and element j of e R depends on the errors of columns 0 ... j alone. So lanes are encoded from the first to the last:
 * with r = what the errors so far contribute to a lane's elements of e R, its own best error is -r R_ll^-1, R_ll being the
 * lane's 8 x 8 part of R, and its target the weights less that. This is the feedback of GPTQ in lanes.
 *
 * The super-scale is searched for the targets of its whole super-block, with the errors of earlier super-blocks; the
 * sub-scale code when the lanes of its sub-block come up. When all lanes are there, each is chosen again in a few sweeps,
 * for what is best beside all others: coordinate descent on e H e^T, which never makes a row worse. A lane's eight weights
 * are chosen together by the diagonal of its part of H, each four of them then by all of theirs. Rows are in units of
 * their largest weight, rounded to a power of two. Several rows go through together, because reading R takes longer than
 * multiplying with it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "encode_e8.h"
#include "parallel.h"
#include "status.h"
#include "tables.h"

#define DEFAULT_DAMPING 0.02f
#define PANEL 64 /* columns of R that are computed together */
#define TEAM_ROWS 8
#define SWEEPS 8 /* at most; most of what they gain comes from the first */
#define TILE 64  /* rows of R that stay in the cache for the rows that go through together */

/* The factor R of a Hessian of `columns` columns, filled up to `size`, whole lanes, by columns that matter next to nothing.
 */
typedef struct {
    int columns, size;
    float *factor;     /* [size, size], row-major; below the diagonal 0 */
    float *hessian;    /* [size, size], damped, with a mean diagonal of 1 */
    float *inverses;   /* [size, 8]: of the lanes' 8 x 8 parts of the Hessian */
    float *importance; /* [size]: squares of R's diagonal, which weigh the errors when scales are chosen */
} calibration;

/*------   R   ------*/

static float mean_diagonal(const float *hessian, int columns) {
    double sum = 0;
    for (int i = 0; i < columns; i++) sum += hessian[(size_t)i * (size_t)columns + (size_t)i];
    return (float)(sum / columns);
}

/* The damped Hessian with a mean diagonal of 1, and in `factor` its upper triangle. */
static void damp(const coli_e8_options *options, float mean, calibration *result) {
    float damping = options->damping > 0 ? options->damping : DEFAULT_DAMPING;
    size_t size = (size_t)result->size, columns = (size_t)result->columns;
    memset(result->factor, 0, size * size * sizeof(float));
    memset(result->hessian, 0, size * size * sizeof(float));
    for (size_t i = 0; i < size; i++) {
        for (size_t j = i; j < size; j++) {
            float value = j < columns ? options->hessian[i * columns + j] / mean : 0;
            if (i == j) value = i < columns ? value + damping : 1e-6f;
            result->factor[i * size + j] = result->hessian[i * size + j] = result->hessian[j * size + i] = value;
        }
    }
}

/* The panel's own triangle, from its last column to its first. Returns 1 more than the column of a diagonal element that is
 * not positive, 0 when there is none. */
static int factor_triangle(float *factor, size_t size, int start, int width) {
    for (int j = start + width - 1; j >= start; j--) {
        for (int i = j; i >= start; i--) {
            const float *row_i = factor + (size_t)i * size, *row_j = factor + (size_t)j * size;
            float value = row_i[j];
            for (int k = j + 1; k < start + width; k++) value -= row_i[k] * row_j[k];
            if (i == j && !(value > 0)) return j + 1;
            factor[(size_t)i * size + (size_t)j] = i == j ? sqrtf(value) : value / row_j[j];
        }
    }
    return 0;
}

/* Columns start ... start + width - 1 of R in the rows above the panel's triangle, which is done. */
static void solve_panel_row(float *row, const float *factor, size_t size, int start, int width) {
    for (int j = start + width - 1; j >= start; j--) {
        const float *row_j = factor + (size_t)j * size;
        float value = row[j];
        for (int k = j + 1; k < start + width; k++) value -= row[k] * row_j[k];
        row[j] = value / row_j[j];
    }
}

/* Takes from the panel's columns what the finished columns after it contribute: in each row i, sum_k R_ik R_jk. `across` is
 * R's rows of the panel, transposed [columns after it, PANEL]. */
static void reduce_panel(float *factor, size_t size, int start, int width, const float *across) {
    const coli_kernels *kernels = coli_kernels_current();
    int end = start + width, after = (int)size - end;
    int team = coli_team((size_t)end, (size_t)after * PANEL / 8 + 1);
    COLI_PARALLEL_FOR(team, i, (size_t)end, {
        float sums[PANEL] = {0}, *row = factor + i * size;
        kernels->add_products(sums, PANEL, row + end, after, across, PANEL);
        for (int j = (int)i > start ? (int)i - start : 0; j < width; j++) row[start + j] -= sums[j];
    });
}

/* Replaces the upper triangle by R, panel by panel from the last. */
static int factorise(calibration *result, float *across) {
    size_t size = (size_t)result->size;
    float *factor = result->factor;
    for (int end = result->size; end > 0;) {
        int width = end % PANEL ? end % PANEL : PANEL, start = end - width;
        for (int k = end; k < result->size; k++) {
            for (int j = 0; j < PANEL; j++)
                across[(size_t)(k - end) * PANEL + (size_t)j] =
                    j < width ? factor[(size_t)(start + j) * size + (size_t)k] : 0;
        }
        reduce_panel(factor, size, start, width, across);
        int failed = factor_triangle(factor, size, start, width);
        if (failed) return failed;
        int team = coli_team((size_t)start, PANEL * PANEL / 2);
        COLI_PARALLEL_FOR(team, i, (size_t)start, solve_panel_row(factor + i * size, factor, size, start, width));
        end = start;
    }
    return 0;
}

/* Inverse of a positive definite 8 x 8 matrix, whose rows are `stride` apart, by elimination. */
static void invert_lane(const float *matrix, size_t stride, float inverse[COLI_LANE * COLI_LANE]) {
    double left[COLI_LANE][2 * COLI_LANE] = {{0}};
    for (int i = 0; i < COLI_LANE; i++) {
        for (int j = 0; j < COLI_LANE; j++) left[i][j] = matrix[(size_t)i * stride + (size_t)j];
        left[i][COLI_LANE + i] = 1;
    }
    for (int pivot = 0; pivot < COLI_LANE; pivot++) {
        double factor = 1 / left[pivot][pivot];
        for (int j = 0; j < 2 * COLI_LANE; j++) left[pivot][j] *= factor;
        for (int i = 0; i < COLI_LANE; i++) {
            double times = left[i][pivot];
            for (int j = 0; i != pivot && j < 2 * COLI_LANE; j++) left[i][j] -= times * left[pivot][j];
        }
    }
    for (int i = 0; i < COLI_LANE * COLI_LANE; i++) inverse[i] = (float)left[i / COLI_LANE][COLI_LANE + i % COLI_LANE];
}

static coli_status check_hessian(const float *hessian, int columns, float *mean) {
    for (size_t i = 0; i < (size_t)columns; i++) {
        const float *row = hessian + i * (size_t)columns;
        for (size_t j = i; j < (size_t)columns; j++) {
            RETURN_ERROR_IF(!isfinite(row[j]), COLI_E_NOT_FINITE,
                            "the Hessian must be finite, got %f at row %zu, column %zu", (double)row[j], i, j);
        }
    }
    *mean = mean_diagonal(hessian, columns);
    RETURN_ERROR_IF(!(*mean > 0), COLI_E_ARGUMENT, "the Hessian's diagonal must have a positive mean, got %g",
                    (double)*mean);
    return COLI_OK;
}

static void free_calibration(calibration *result) {
    free(result->factor);
    free(result->hessian);
    free(result->inverses);
    free(result->importance);
}

static coli_status prepare(const coli_encoding *encoding, calibration *result) {
    float mean = 0;
    FORWARD_ERROR(check_hessian(encoding->e8->hessian, encoding->columns, &mean));
    result->columns = encoding->columns;
    result->size = coli_ceil_div(encoding->columns, COLI_LANE) * COLI_LANE;
    size_t size = (size_t)result->size;
    result->factor = malloc(size * size * sizeof(float));
    result->hessian = malloc(size * size * sizeof(float));
    result->inverses = malloc(size * COLI_LANE * sizeof(float));
    result->importance = malloc(size * sizeof(float));
    float *across = malloc(size * PANEL * sizeof(float));
    int failed = 0, complete = result->factor && result->hessian && result->inverses && result->importance && across;
    if (complete) {
        damp(encoding->e8, mean, result);
        failed = factorise(result, across);
        for (size_t i = 0; i < size; i++)
            result->importance[i] = result->factor[i * size + i] * result->factor[i * size + i];
        for (size_t lane = 0; lane < size; lane += COLI_LANE)
            invert_lane(result->hessian + lane * size + lane, size, result->inverses + lane * COLI_LANE);
    }
    free(across);
    RETURN_ERROR_IF(!complete, COLI_E_MEMORY, "no memory for the factor of a Hessian of %d columns", encoding->columns);
    RETURN_ERROR_IF(failed, COLI_E_ARGUMENT,
                    "the Hessian is not positive semidefinite: with damping, its factor fails at column %d", failed - 1);
    return COLI_OK;
}

/*------   Rows   ------*/

/* A row on its way. All lengths are the calibration's size. */
typedef struct {
    float *w;       /* in units */
    float *errors;  /* of the columns that are encoded */
    float *carried; /* e R of the columns that follow, as far as the errors so far make it */
    double unit, cost;
} encoded_row;

/* x with x R_ll = r for the lane that begins at `column`. */
static void solve_lane(const calibration *by, int column, const float r[COLI_LANE], float x[COLI_LANE]) {
    size_t size = (size_t)by->size;
    const float *corner = by->factor + (size_t)column * size + (size_t)column;
    for (int j = 0; j < COLI_LANE; j++) {
        float value = r[j];
        for (int i = 0; i < j; i++) value -= x[i] * corner[(size_t)i * size + (size_t)j];
        x[j] = value / corner[(size_t)j * size + (size_t)j];
    }
}

/* Targets of the columns start ... end - 1, each made up for by nothing but those targets: [end - start]. */
static void continuous_targets(const calibration *by, const encoded_row *row, int start, int end, float *targets) {
    const coli_kernels *kernels = coli_kernels_current();
    float r[COLI_E8_BLOCK], x[COLI_LANE];
    memcpy(r, row->carried + start, (size_t)(end - start) * sizeof(float));
    for (int lane = start; lane < end; lane += COLI_LANE) {
        float *target = targets + (lane - start);
        solve_lane(by, lane, r + (lane - start), x);
        for (int j = 0; j < COLI_LANE; j++) {
            target[j] = row->w[lane + j] + x[j];
            x[j] = -x[j];
        }
        int next = lane + COLI_LANE;
        kernels->add_products(r + (next - start), end - next, x, COLI_LANE,
                              by->factor + (size_t)lane * (size_t)by->size + (size_t)next, (size_t)by->size);
    }
}

/* Takes the lane's errors into account: their cost, and what they carry to the columns up to `end`. */
static void settle_lane(const calibration *by, encoded_row *row, int lane, int end, const float decoded[COLI_LANE]) {
    const coli_kernels *kernels = coli_kernels_current();
    const float *factor_rows = by->factor + (size_t)lane * (size_t)by->size;
    float *errors = row->errors + lane;
    for (int j = 0; j < COLI_LANE; j++) errors[j] = row->w[lane + j] - decoded[j];
    kernels->add_products(row->carried + lane, end - lane, errors, COLI_LANE, factor_rows + lane, (size_t)by->size);
    for (int j = 0; j < COLI_LANE; j++) row->cost += (double)row->carried[lane + j] * row->carried[lane + j];
}

static uint32_t encode_lane(const calibration *by, encoded_row *row, coli_e8_subblock *subblock, int lane, int end,
                            float scale, uint8_t indices[2]) {
    float x[COLI_LANE], target[COLI_LANE], decoded[COLI_LANE];
    int l = lane / COLI_LANE % COLI_E8_LANES;
    solve_lane(by, lane, row->carried + lane, x);
    for (int j = 0; j < COLI_LANE; j++) target[j] = row->w[lane + j] + x[j];
    coli_e8_set_lane(subblock, l, target, 1);
    uint32_t signs = coli_e8_choose_lane(subblock, l, target, scale, indices);
    const uint8_t *codebook = coli_e8_codebook();
    coli_e8_lane(codebook + 4 * indices[0], codebook + 4 * indices[1], signs, scale, decoded);
    settle_lane(by, row, lane, end, decoded);
    return signs;
}

/* Columns start ... end - 1, a super-block or what there is of the last. */
static void encode_super_block(const calibration *by, encoded_row *row, int start, int end, uint8_t *block) {
    float targets[COLI_E8_BLOCK] = {0}, importance[COLI_E8_BLOCK] = {0};
    coli_e8_problem problem;
    coli_e8_scales scales;
    memset(block, 0, COLI_E8_BLOCK_BYTES);
    memcpy(importance, by->importance + start, (size_t)(end - start) * sizeof(float));
    continuous_targets(by, row, start, end, targets);
    coli_e8_set_problem(&problem, targets, importance, 1);
    problem.unit = row->unit; /* the targets are in units already */
    coli_e8_search_scales(&problem, &scales);
    float d = coli_e8_unit_scale(scales.d_bits, row->unit);
    for (int b = 0; b < COLI_E8_SUBBLOCKS && start + COLI_E8_SUBBLOCK * b < end; b++) {
        coli_e8_subblock *subblock = &problem.subblocks[b];
        int first = start + COLI_E8_SUBBLOCK * b, last = first + COLI_E8_SUBBLOCK < end ? first + COLI_E8_SUBBLOCK : end;
        continuous_targets(by, row, first, last, targets);
        for (int lane = first; lane < last; lane += COLI_LANE)
            coli_e8_set_lane(subblock, (lane - first) / COLI_LANE, targets + (lane - first), 1);
        uint32_t word = (uint32_t)coli_e8_best_code(subblock, d) << 28;
        float scale = coli_e8_scaled(d, word);
        for (int lane = first; lane < last; lane += COLI_LANE) {
            uint32_t signs = encode_lane(by, row, subblock, lane, end, scale, block + (lane - start) / 4);
            word |= (signs & 127u) << 7 * ((lane - first) / COLI_LANE);
        }
        coli_e8_store_word(block, b, word);
    }
    coli_e8_store_scale(block, scales.d_bits);
}

/* The same accounts for bytes that are there already. */
static void settle_super_block(const calibration *by, encoded_row *row, int start, int end, const uint8_t *block) {
    float decoded[COLI_E8_BLOCK];
    coli_e8_decode_block(block, decoded);
    for (int i = 0; i < end - start; i++) decoded[i] = (float)(decoded[i] / row->unit);
    for (int lane = start; lane < end; lane += COLI_LANE) settle_lane(by, row, lane, end, decoded + (lane - start));
}

/* carried = what the errors of the columns before `start` contribute to the columns start ... end - 1. */
static void carry(const calibration *by, encoded_row *rows, int count, int start, int end) {
    const coli_kernels *kernels = coli_kernels_current();
    size_t size = (size_t)by->size;
    for (int i = 0; i < count; i++) memset(rows[i].carried + start, 0, (size_t)(end - start) * sizeof(float));
    for (int k = 0; k < start; k += TILE) { /* super-blocks are whole tiles */
        for (int i = 0; i < count; i++) {
            kernels->add_products(rows[i].carried + start, end - start, rows[i].errors + k, TILE,
                                  by->factor + (size_t)k * size + (size_t)start, size);
        }
    }
}

enum { MEASURE, ENCODE };

/* Encodes rows into `bytes` [count, row bytes], or measures what is there; the rows' costs say how well. */
static void walk_rows(const calibration *by, encoded_row *rows, int count, int task, uint8_t *bytes) {
    size_t row_bytes = coli_e8_row_bytes(by->columns);
    for (int i = 0; i < count; i++) rows[i].cost = 0;
    for (int start = 0; start < by->size; start += COLI_E8_BLOCK, bytes += COLI_E8_BLOCK_BYTES) {
        int end = start + COLI_E8_BLOCK < by->size ? start + COLI_E8_BLOCK : by->size;
        carry(by, rows, count, start, end);
        for (int i = 0; i < count; i++) {
            uint8_t *block = bytes + (size_t)i * row_bytes;
            if (task == ENCODE) {
                encode_super_block(by, &rows[i], start, end, block);
            } else {
                settle_super_block(by, &rows[i], start, end, block);
            }
        }
    }
}

/*------   Lanes once more, with all others known   ------*/

/* gradients [size] of a row = e H */
static void set_gradients(const calibration *by, encoded_row *rows, int count) {
    const coli_kernels *kernels = coli_kernels_current();
    size_t size = (size_t)by->size;
    for (int i = 0; i < count; i++) memset(rows[i].carried, 0, size * sizeof(float));
    for (int k = 0; k < by->size; k += COLI_LANE) {
        for (int i = 0; i < count; i++)
            kernels->add_products(rows[i].carried, by->size, rows[i].errors + k, COLI_LANE, by->hessian + (size_t)k * size,
                                  size);
    }
}

/* How the cost changes when the lane's errors change by `change`. */
static double cost_of_change(const calibration *by, const float *gradient, int lane, const float change[COLI_LANE]) {
    size_t size = (size_t)by->size;
    const float *corner = by->hessian + (size_t)lane * size + (size_t)lane;
    double cost = 0;
    for (int i = 0; i < COLI_LANE; i++) {
        double sum = 2.0 * gradient[i];
        for (int j = 0; j < COLI_LANE; j++) sum += (double)corner[(size_t)i * size + (size_t)j] * change[j];
        cost += sum * change[i];
    }
    return cost;
}

/* Gives a lane other entries and signs where that lowers the cost; returns whether it did. */
static int take_lane(const calibration *by, encoded_row *row, int lane, float scale, const uint8_t found[2], uint32_t signs,
                     uint32_t *word, uint8_t indices[2]) {
    const uint8_t *codebook = coli_e8_codebook();
    int l = lane / COLI_LANE % COLI_E8_LANES;
    float *errors = row->errors + lane, decoded[COLI_LANE], change[COLI_LANE];
    if (found[0] == indices[0] && found[1] == indices[1] && (signs & 127u) == (*word >> 7 * l & 127u)) return 0;
    coli_e8_lane(codebook + 4 * found[0], codebook + 4 * found[1], signs, scale, decoded);
    for (int j = 0; j < COLI_LANE; j++) change[j] = row->w[lane + j] - decoded[j] - errors[j];
    double cost = cost_of_change(by, row->carried + lane, lane, change);
    if (!(cost < 0)) return 0;
    row->cost += cost;
    for (int j = 0; j < COLI_LANE; j++) errors[j] += change[j];
    coli_kernels_current()->add_products(row->carried, by->size, change, COLI_LANE,
                                         by->hessian + (size_t)lane * (size_t)by->size, (size_t)by->size);
    indices[0] = found[0];
    indices[1] = found[1];
    *word = (*word & ~(127u << 7 * l)) | (signs & 127u) << 7 * l;
    return 1;
}

/* Chooses a lane again for what is best beside all others; returns whether it changed. */
static int improve_lane(const calibration *by, encoded_row *row, coli_e8_subblock *subblock, int lane, float scale,
                        uint32_t *word, uint8_t indices[2]) {
    int l = lane / COLI_LANE % COLI_E8_LANES;
    const float *gradient = row->carried + lane, *errors = row->errors + lane;
    float target[COLI_LANE];
    uint8_t found[2];
    for (int j = 0; j < COLI_LANE; j++) {
        float step = 0;
        for (int i = 0; i < COLI_LANE; i++) step += gradient[i] * by->inverses[(lane + i) * COLI_LANE + j];
        target[j] = row->w[lane + j] - errors[j] + step;
    }
    coli_e8_set_lane(subblock, l, target, 1);
    uint32_t signs = coli_e8_choose_lane(subblock, l, target, scale, found);
    return take_lane(by, row, lane, scale, found, signs, word, indices);
}

/* Signs to try with a group: as they are, and with the two of its weights flipped that are nearest to zero. */
static uint32_t flipped_pair(const float target[4]) {
    int first = 0, second;
    for (int k = 1; k < 4; k++) first = fabsf(target[k]) < fabsf(target[first]) ? k : first;
    second = first == 0;
    for (int k = 0; k < 4; k++) second = k != first && fabsf(target[k]) < fabsf(target[second]) ? k : second;
    return 1u << first | 1u << second;
}

/* Chooses the entry of half a lane again, by the Hessian's own 4 x 4 part. */
static int improve_group(const calibration *by, encoded_row *row, int lane, int half, float scale, uint32_t *word,
                         uint8_t indices[2]) {
    int l = lane / COLI_LANE % COLI_E8_LANES, start = lane + 4 * half;
    size_t size = (size_t)by->size;
    uint32_t signs = coli_e8_signs(*word, l);
    float pull[4], target[4], lowest = HUGE_VALF;
    uint32_t chosen = signs;
    uint8_t found[2] = {indices[0], indices[1]};
    for (int k = 0; k < 4; k++) {
        const float *hessian = by->hessian + (size_t)(start + k) * size + (size_t)start;
        pull[k] = row->carried[start + k];
        for (int j = 0; j < 4; j++) pull[k] += hessian[j] * (row->w[start + j] - row->errors[start + j]);
        target[k] = pull[k] / hessian[k];
    }
    for (int flip = 0; flip < 2; flip++) {
        uint32_t tried = signs ^ (flip ? flipped_pair(target) << 4 * half : 0);
        float linear[4], quadratic[4][4], score, signed_scale[4];
        for (int k = 0; k < 4; k++) signed_scale[k] = tried >> (4 * half + k) & 1u ? -scale : scale;
        for (int k = 0; k < 4; k++) {
            const float *hessian = by->hessian + (size_t)(start + k) * size + (size_t)start;
            linear[k] = -2 * signed_scale[k] * pull[k];
            for (int j = 0; j < 4; j++) quadratic[k][j] = (j == k ? 1 : 2) * signed_scale[k] * signed_scale[j] * hessian[j];
        }
        int entry = coli_kernels_current()->e8_lowest_quadratic(coli_e8_search_table(), linear, quadratic, &score);
        if (score < lowest) {
            lowest = score;
            found[half] = (uint8_t)entry;
            chosen = tried;
        }
    }
    return take_lane(by, row, lane, scale, found, chosen, word, indices);
}

static void improve_row(const calibration *by, encoded_row *row, uint8_t *bytes) {
    coli_e8_subblock subblock;
    for (int sweep = 0, changed = 1; sweep < SWEEPS && changed; sweep++) {
        changed = 0;
        for (int first = 0; first < by->size; first += COLI_E8_SUBBLOCK) {
            uint8_t *block = bytes + (size_t)(first / COLI_E8_BLOCK) * COLI_E8_BLOCK_BYTES;
            int b = first % COLI_E8_BLOCK / COLI_E8_SUBBLOCK;
            uint32_t word = coli_load_u32(block + COLI_E8_WORDS_OFFSET + 4 * b);
            float d = coli_e8_unit_scale(coli_load_u16(block + COLI_E8_SCALE_OFFSET), row->unit);
            float importance[COLI_E8_SUBBLOCK] = {0};
            for (int i = 0; i < COLI_E8_SUBBLOCK && first + i < by->size; i++)
                importance[i] = by->hessian[(size_t)(first + i) * (size_t)(by->size + 1)];
            subblock.importance = importance;
            float scale = coli_e8_scaled(d, word);
            for (int lane = first; lane < first + COLI_E8_SUBBLOCK && lane < by->size; lane += COLI_LANE) {
                uint8_t *indices = block + lane % COLI_E8_BLOCK / 4;
                changed |= improve_lane(by, row, &subblock, lane, scale, &word, indices);
                for (int half = 0; half < 2; half++) changed |= improve_group(by, row, lane, half, scale, &word, indices);
            }
            coli_e8_store_word(block, b, word);
        }
    }
}

static void load_row(const coli_encoding *encoding, int number, int size, encoded_row *row) {
    const float *w = encoding->w + (size_t)number * (size_t)encoding->columns;
    row->unit = coli_power_of_two_above(coli_largest(w, encoding->columns));
    for (int i = 0; i < size; i++) row->w[i] = i < encoding->columns ? (float)(w[i] * (1 / row->unit)) : 0;
}

/* Encodes rows both ways and keeps the better one of each. `found` has room for their bytes. */
static void encode_together(const coli_encoding *encoding, const calibration *by, int first, int count, encoded_row *rows,
                            uint8_t *found) {
    size_t row_bytes = coli_e8_row_bytes(encoding->columns);
    uint8_t *bytes = encoding->weights + (size_t)first * row_bytes;
    const coli_e8_options options = {.size = sizeof options, .quality = COLI_E8_SEARCH};
    coli_encoding search = *encoding;
    double costs[TEAM_ROWS];
    search.e8 = &options;
    for (int i = 0; i < count; i++) {
        coli_encode_e8_row(&search, first + i);
        load_row(encoding, first + i, by->size, &rows[i]);
    }
    walk_rows(by, rows, count, MEASURE, bytes);
    for (int i = 0; i < count; i++) costs[i] = rows[i].cost;
    walk_rows(by, rows, count, ENCODE, found);
    set_gradients(by, rows, count);
    for (int i = 0; i < count; i++) improve_row(by, &rows[i], found + (size_t)i * row_bytes);
    for (int i = 0; i < count; i++) {
        if (rows[i].cost < costs[i]) memcpy(bytes + (size_t)i * row_bytes, found + (size_t)i * row_bytes, row_bytes);
    }
}

static coli_status encode_all(const coli_encoding *encoding, const calibration *by) {
    size_t size = (size_t)by->size, row_bytes = coli_e8_row_bytes(encoding->columns);
    int teams = coli_ceil_div(encoding->rows, TEAM_ROWS);
    int threads = coli_team((size_t)teams, TEAM_ROWS * size * size);
    float *floats = malloc((size_t)threads * TEAM_ROWS * 3 * size * sizeof(float));
    uint8_t *found = malloc((size_t)threads * TEAM_ROWS * row_bytes);
    if (floats && found) {
        COLI_PARALLEL_FOR(threads, team, (size_t)teams, {
            int first = (int)team * TEAM_ROWS, left = encoding->rows - first;
            encoded_row rows[TEAM_ROWS];
            for (size_t i = 0; i < TEAM_ROWS; i++) {
                float *of_row = floats + (coli_worker * TEAM_ROWS + i) * 3 * size;
                rows[i] = (encoded_row){of_row, of_row + size, of_row + 2 * size, 1, 0};
            }
            encode_together(encoding, by, first, left < TEAM_ROWS ? left : TEAM_ROWS, rows,
                            found + coli_worker * TEAM_ROWS * row_bytes);
        });
    }
    free(floats);
    free(found);
    RETURN_ERROR_IF(!floats || !found, COLI_E_MEMORY, "no memory for encoding rows of %d columns", encoding->columns);
    return COLI_OK;
}

coli_status coli_encode_e8_calibrated(const coli_encoding *encoding) {
    calibration by = {0, 0, NULL, NULL, NULL, NULL};
    coli_status status = prepare(encoding, &by);
    if (status == COLI_OK) status = encode_all(encoding, &by);
    free_calibration(&by);
    return status;
}
