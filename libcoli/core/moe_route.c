/* moe_route.c - from logits to the experts of each row and their weights. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../include/coli/coli_moe.h"
#include "parallel.h"
#include "status.h"

static coli_status check_router(const coli_router *router) {
    RETURN_ERROR_IF(!router, COLI_E_ARGUMENT, "the router is NULL");
    const coli_router *r = router;
    RETURN_ERROR_IF(r->kind != COLI_ROUTER_SOFTMAX && r->kind != COLI_ROUTER_SIGMOID, COLI_E_ARGUMENT,
                    "a router's kind is COLI_ROUTER_SOFTMAX or COLI_ROUTER_SIGMOID, got %d", r->kind);
    RETURN_ERROR_IF(r->experts < 1, COLI_E_SHAPE, "a router needs at least 1 expert, got %d", r->experts);
    RETURN_ERROR_IF(r->top_k < 1 || r->top_k > r->experts, COLI_E_SHAPE, "top_k must be 1 ... %d, the experts; got %d",
                    r->experts, r->top_k);
    RETURN_ERROR_IF(r->groups < 0 || (r->groups && r->experts % r->groups), COLI_E_SHAPE,
                    "%d experts do not make %d equal groups", r->experts, r->groups);
    int most = r->groups, least = r->groups ? 1 : 0;
    RETURN_ERROR_IF(r->top_groups < least || r->top_groups > most, COLI_E_SHAPE, "top_groups must be %d ... %d, got %d",
                    least, most, r->top_groups);
    RETURN_ERROR_IF(r->groups && r->top_k > r->experts / r->groups * r->top_groups, COLI_E_SHAPE,
                    "%d groups of %d experts do not hold top_k = %d", r->top_groups, r->experts / r->groups, r->top_k);
    RETURN_ERROR_IF(!isfinite(r->scale), COLI_E_NOT_FINITE, "the router's scale is %g", (double)r->scale);
    RETURN_ERROR_IF(r->scale <= 0, COLI_E_ARGUMENT, "the router's scale must be above 0, got %g", (double)r->scale);
    for (int e = 0; r->bias && e < r->experts; e++) {
        RETURN_ERROR_IF(!isfinite(r->bias[e]), COLI_E_NOT_FINITE, "the router's bias is %g for expert %d",
                        (double)r->bias[e], e);
    }
    return COLI_OK;
}

/* -1 when a row of logits has what it needs: no NaN, no +infinity, something finite. Else where it fails; `experts` when
 * nothing is finite. */
static int not_finite(const float *logits, int experts) {
    int finite = 0;
    for (int e = 0; e < experts; e++) {
        if (isnan(logits[e]) || logits[e] == INFINITY) return e;
        finite += isfinite(logits[e]) != 0;
    }
    return finite ? -1 : experts;
}

static coli_status check_logits(const float *logits, size_t S, int experts) {
    for (size_t s = 0; s < S; s++) {
        const float *row = logits + s * (size_t)experts;
        int e = not_finite(row, experts);
        RETURN_ERROR_IF(e == experts, COLI_E_NOT_FINITE, "row %zu of the logits has no finite value", s);
        RETURN_ERROR_IF(e >= 0, COLI_E_NOT_FINITE, "row %zu of the logits has %g for expert %d", s, (double)row[e], e);
    }
    return COLI_OK;
}

/* In double, so that the weights are those of the definition rounded once. */
static void softmax(const float *logits, int experts, double *scores) {
    double largest = -HUGE_VAL, sum = 0;
    for (int e = 0; e < experts; e++) largest = fmax(largest, logits[e]);
    for (int e = 0; e < experts; e++) sum += scores[e] = exp(logits[e] - largest);
    for (int e = 0; e < experts; e++) scores[e] /= sum;
}

static void sigmoid(const float *logits, int experts, double *scores) {
    for (int e = 0; e < experts; e++) scores[e] = 1 / (1 + exp(-(double)logits[e]));
}

#define CHOSEN NAN /* in place of a value that must not be chosen again */

/* Index of the largest value, the first of equals, among those that are not chosen; there is one. */
static int best(const double *values, int count) {
    int index = -1;
    for (int i = 0; i < count; i++) {
        if (!isnan(values[i]) && (index < 0 || values[i] > values[index])) index = i;
    }
    return index;
}

static double second_best(const double *values, int count, int best_index) {
    double value = -HUGE_VAL;
    for (int i = 0; i < count; i++) {
        if (i != best_index) value = fmax(value, values[i]);
    }
    return value;
}

/* How a group counts against the others: by those of its experts that are not taken out. */
static double group_value(const coli_router *router, const double *choice, int size) {
    int first = best(choice, size);
    double second = second_best(choice, size, first);
    int by_one = router->kind == COLI_ROUTER_SOFTMAX || second == -HUGE_VAL;
    return by_one ? choice[first] : choice[first] + second;
}

/* Takes the experts of all but the best groups out of the choice, for good: the others are enough for top_k. `values` has
 * room for a double a group. */
static void keep_best_groups(const coli_router *router, double *choice, double *values) {
    int groups = router->groups, size = router->experts / groups;
    for (int g = 0; g < groups; g++) values[g] = group_value(router, choice + (size_t)g * (size_t)size, size);
    for (int kept = 0; kept < router->top_groups; kept++) values[best(values, groups)] = CHOSEN;
    for (int g = 0; g < groups; g++) {
        int left_out = !isnan(values[g]);
        for (int i = 0; left_out && i < size; i++) choice[g * size + i] = CHOSEN;
    }
}

/* One row. `scratch` has room for three doubles an expert. */
static void route_row(const coli_router *router, const float *logits, int *ids, float *weights, double *scratch) {
    int experts = router->experts;
    double *scores = scratch, *choice = scratch + experts, *groups = scratch + 2 * (size_t)experts, sum = 0;
    if (router->kind == COLI_ROUTER_SOFTMAX)
        softmax(logits, experts, scores);
    else
        sigmoid(logits, experts, scores);
    for (int e = 0; e < experts; e++) {
        choice[e] = logits[e] == -INFINITY ? -HUGE_VAL : scores[e] + (router->bias ? (double)router->bias[e] : 0);
    }
    if (router->groups) keep_best_groups(router, choice, groups);
    for (int k = 0; k < router->top_k; k++) {
        ids[k] = best(choice, experts);
        sum += scores[ids[k]];
        choice[ids[k]] = CHOSEN;
    }
    double factor = router->scale / (router->renormalise ? sum + 1e-20 : 1);
    for (int k = 0; k < router->top_k; k++) weights[k] = (float)(scores[ids[k]] * factor);
}

coli_status coli_route(const coli_router *router, const float *logits, size_t S, int *ids, float *weights) {
    FORWARD_ERROR(check_router(router));
    if (!S) return COLI_OK;
    RETURN_ERROR_IF(!logits || !ids || !weights, COLI_E_ARGUMENT, "%s of %zu rows is NULL",
                    !logits ? "logits" : (!ids ? "ids" : "weights"), S);
    FORWARD_ERROR(check_logits(logits, S, router->experts));
    size_t experts = (size_t)router->experts, K = (size_t)router->top_k;
    int team = coli_team(S, experts * (8 + K));
    double *scratch = malloc((size_t)team * 3 * experts * sizeof(double));
    RETURN_ERROR_IF(!scratch, COLI_E_MEMORY, "no memory to route to %d experts on %d threads", router->experts, team);
    COLI_PARALLEL_FOR(team, s, S, {
        double *own = scratch + coli_worker * 3 * experts;
        route_row(router, logits + s * experts, ids + s * K, weights + s * K, own);
    });
    free(scratch);
    return COLI_OK;
}
