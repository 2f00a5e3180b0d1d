/* moe_rows.c - rows on their way to experts and back: rotated once, sorted, packed, summed. */
#include <stdio.h>
#include <string.h>

#include "expert.h"
#include "kernels.h"
#include "matrix.h"
#include "moe.h"
#include "status.h"

coli_status coli_rows_for(coli_rows *rows, const coli_matrix *matrix, const float **x) {
    RETURN_ERROR_IF(!rows || !matrix || !x, COLI_E_ARGUMENT, "coli_rows_for needs rows, a matrix and a place for x");
    RETURN_ERROR_IF(matrix->columns != rows->D, COLI_E_SHAPE, "a matrix of %d columns does not meet rows of %d floats",
                    matrix->columns, rows->D);
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
        kernels->add_products(y + (size_t)tokens[i] * (size_t)D, D, pair_weights + i, 1, rows + i * (size_t)D, 0);
    }
}

/*------   The fallback of one expert   ------*/

coli_status coli_expert_fallback(const coli_backend *backend, const coli_expert_tensors *tensors, const coli_expert *expert,
                                 const float *x_gate, const float *x_up, size_t S, float *y, coli_moe_path *path, char *why,
                                 size_t why_size) {
    RETURN_ERROR_IF(!expert || !path, COLI_E_ARGUMENT, "coli_expert_fallback needs an expert and a place for its path");
    const coli_expert *m = expert;
    FORWARD_ERROR(coli_expert_check(&m->gate, &m->up, &m->down, coli_matrix_check));
    RETURN_ERROR_IF(S && (!x_gate || !x_up || !y), COLI_E_ARGUMENT, "%s of %zu rows is NULL",
                    x_gate ? (x_up ? "y" : "x_up") : "x_gate", S);
    const char *reason = "there are no tensors of it";
    char failure[COLI_WHY_BYTES];
    *path = COLI_MOE_SINGLE;
    if (tensors) reason = coli_backend_why_not_expert_mlp(backend, &m->gate, &m->up, &m->down, S);
    if (!reason && S) {
        coli_access access = coli_backend_access(backend);
        coli_backend_lock(access);
        int done = backend->call.expert_mlp(tensors->gate, tensors->up, tensors->down, y, x_gate, (int)S);
        if (!done) coli_backend_explain(backend, "coli_cuda_expert_mlp", failure, sizeof failure);
        coli_backend_unlock(access);
        if (!done) reason = failure;
    }
    if (why && why_size) snprintf(why, why_size, "%s", reason ? reason : "");
    if (!reason) return COLI_OK;
    *path = COLI_MOE_CPU;
    return S ? coli_expert_compute(&m->gate, &m->up, &m->down, x_gate, x_up, S, y) : COLI_OK;
}
