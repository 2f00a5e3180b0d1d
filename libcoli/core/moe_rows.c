/* moe_rows.c - rows on their way to experts and back: rotated once, sorted, packed, summed. */
#include <string.h>

#include "../include/coli/coli_moe.h"
#include "kernels.h"
#include "matrix.h"
#include "status.h"

coli_status coli_rows_for(coli_rows *rows, const coli_matrix *matrix, const float **x) {
    RETURN_ERROR_IF(!rows || !matrix || !x, COLI_E_ARGUMENT, "coli_rows_for needs rows, a matrix and a place for x");
    if (!coli_matrix_rotated(matrix)) {
        *x = rows->x;
        return COLI_OK;
    }
    if (!rows->has_rotated) FORWARD_ERROR(coli_rotate_rows(rows->x, rows->rotated, rows->S, rows->D));
    rows->has_rotated = 1;
    *x = rows->rotated;
    return COLI_OK;
}

/* 1 for a pair that is to be computed. */
static int counts(int id, float weight) {
    return id >= 0 && weight != 0;
}

static coli_status check_pairs(const int *ids, size_t S, int K, int experts) {
    for (size_t i = 0; i < S * (size_t)K; i++) {
        RETURN_ERROR_IF(ids[i] < -1 || ids[i] >= experts, COLI_E_ARGUMENT, "ids[%zu, %zu] must be -1 ... %d, got %d",
                        i / (size_t)K, i % (size_t)K, experts - 1, ids[i]);
    }
    return COLI_OK;
}

coli_status coli_sort_pairs(const int *ids, const float *weights, size_t S, int K, int experts, size_t *first, int *tokens,
                            float *pair_weights) {
    RETURN_ERROR_IF(!first || experts < 0 || K < 0, COLI_E_ARGUMENT,
                    "coli_sort_pairs needs experts >= 0, K >= 0 and first");
    RETURN_ERROR_IF(S > INT32_MAX, COLI_E_SHAPE, "%zu rows are more than %d", S, INT32_MAX);
    size_t pairs = S * (size_t)K;
    RETURN_ERROR_IF(pairs && (!ids || !weights || !tokens || !pair_weights), COLI_E_ARGUMENT,
                    "ids, weights, tokens and pair_weights of %zu pairs must not be NULL", pairs);
    FORWARD_ERROR(check_pairs(ids, S, K, experts));
    memset(first, 0, ((size_t)experts + 1) * sizeof *first);
    for (size_t i = 0; i < pairs; i++) {
        if (counts(ids[i], weights[i])) first[ids[i] + 1]++;
    }
    for (int e = 0; e < experts; e++) first[e + 1] += first[e];
    for (size_t i = 0; i < pairs; i++) { /* first[e] is the next free place of e, and in the end first[e + 1] */
        if (!counts(ids[i], weights[i])) continue;
        size_t place = first[ids[i]]++;
        tokens[place] = (int)(i / (size_t)K);
        pair_weights[place] = weights[i];
    }
    for (int e = experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
    return COLI_OK;
}

void coli_pack_rows(const float *x, int D, const int *tokens, size_t n, float *packed) {
    for (size_t i = 0; i < n; i++) {
        memcpy(packed + i * (size_t)D, x + (size_t)tokens[i] * (size_t)D, (size_t)D * sizeof(float));
    }
}

void coli_add_rows(const float *rows, int D, const int *tokens, const float *pair_weights, size_t n, float *y) {
    const coli_kernels *kernels = coli_kernels_current();
    for (size_t i = 0; i < n; i++) {
        kernels->add_scaled(y + (size_t)tokens[i] * (size_t)D, rows + i * (size_t)D, pair_weights[i], D);
    }
}
