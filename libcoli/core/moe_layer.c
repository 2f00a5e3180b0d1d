/* moe_layer.c - an MoE layer's life: experts, host copies, heat, counters. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expert.h"
#include "matrix.h"
#include "moe.h"
#include "status.h"

int moe_experts(const coli_moe *layer) {
    return layer->count + layer->has_shared;
}

/*------   Texts   ------*/

static char out_of_memory[] = "the reason is lost: out of memory";

static void set_text(char **text, const char *new) {
    if (*text != out_of_memory) free(*text);
    *text = NULL;
    if (!new) return;
    size_t size = strlen(new) + 1;
    *text = malloc(size);
    if (*text)
        memcpy(*text, new, size);
    else
        *text = out_of_memory;
}

static size_t copy_text(const char *from, char *text, size_t size) {
    if (text && size) snprintf(text, size, "%s", from ? from : "");
    return from ? strlen(from) : 0;
}

/*------   Creation   ------*/

static coli_status check_expert(const coli_expert *expert, int number, int D, int H, int with_weights) {
    coli_status (*check)(const coli_matrix *) = with_weights ? coli_matrix_check : coli_matrix_check_fields;
    char name[32] = "the shared expert";
    if (number >= 0) snprintf(name, sizeof name, "expert %d", number);
    coli_status status = coli_expert_check(&expert->gate, &expert->up, &expert->down, check);
    RETURN_ERROR_IF(status != COLI_OK, status, "%s: %s", name, coli_last_error());
    int wrong = expert->gate.columns != D || (H && expert->gate.rows != H);
    RETURN_ERROR_IF(wrong, COLI_E_SHAPE, "%s: gate must be [%d, %d] as that of the first, got [%d, %d]", name,
                    H ? H : expert->gate.rows, D, expert->gate.rows, expert->gate.columns);
    return COLI_OK;
}

static coli_status check_experts(const coli_expert *experts, int count, const coli_expert *shared, int with_weights) {
    const coli_matrix *gate = count ? &experts[0].gate : &shared->gate;
    for (int e = 0; e < count; e++) FORWARD_ERROR(check_expert(&experts[e], e, gate->columns, gate->rows, with_weights));
    if (shared) FORWARD_ERROR(check_expert(shared, -1, gate->columns, 0, with_weights));
    return COLI_OK;
}

static void forget_weights(coli_matrix *matrix) {
    matrix->weights = matrix->scales = NULL;
}

static void forget_host(moe_expert *expert) {
    forget_weights(&expert->matrices.gate);
    forget_weights(&expert->matrices.up);
    forget_weights(&expert->matrices.down);
    expert->has_host = 0;
}

static void fill_in(coli_moe *layer, const coli_expert *experts, const coli_expert *shared) {
    for (int e = 0; e < moe_experts(layer); e++) {
        moe_expert *expert = &layer->experts[e];
        expert->matrices = e < layer->count ? experts[e] : *shared;
        expert->device = -1;
        expert->has_host = 1;
        if (layer->host.acquire) forget_host(expert);
    }
}

coli_status coli_moe_create(const coli_expert *experts, int count, const coli_expert *shared, const coli_moe_host *host,
                            coli_moe **layer) {
    RETURN_ERROR_IF(!layer, COLI_E_ARGUMENT, "coli_moe_create needs a place for its result, got layer = NULL");
    RETURN_ERROR_IF(count < 0 || (count > 0 && !experts) || (!count && !shared), COLI_E_ARGUMENT,
                    "a layer needs experts: got count = %d, experts = %s, shared = %s", count, experts ? "given" : "NULL",
                    shared ? "given" : "NULL");
    RETURN_ERROR_IF(host && (!host->acquire || !host->release), COLI_E_ARGUMENT,
                    "host copies need both acquire and release, got %s = NULL", host->acquire ? "release" : "acquire");
    FORWARD_ERROR(check_experts(experts, count, shared, !host));
    coli_moe *result = calloc(1, sizeof *result);
    if (result) result->experts = calloc((size_t)count + 1, sizeof *result->experts);
    if (!result || !result->experts) {
        free(result);
        RETURN_ERROR(COLI_E_MEMORY, "no memory for a layer of %d experts", count);
    }
    coli_mutex_init(&result->mutex);
    coli_mutex_init(&result->failure_mutex);
    moe_memory_count_layer(1);
    result->count = count;
    result->has_shared = shared != NULL;
    result->D = count ? experts[0].gate.columns : shared->gate.columns;
    result->half_life = 4096;
    result->heat_unit = 1;
    if (host) result->host = *host;
    fill_in(result, experts, shared);
    *layer = result;
    return COLI_OK;
}

void coli_moe_free(coli_moe *layer) {
    if (!layer) return;
    for (int e = 0; e < moe_experts(layer); e++) {
        moe_drop(&layer->experts[e], NULL);
        moe_release_host(layer, e);
    }
    for (int step = 0; step < COLI_MOE_STEPS; step++) set_text(&layer->why_failed[step], NULL);
    coli_mutex_destroy(&layer->failure_mutex);
    coli_mutex_destroy(&layer->mutex);
    free(layer->experts);
    free(layer);
    moe_memory_count_layer(-1);
}

/*------   Host copies   ------*/

static int matrices_alike(const coli_matrix *a, const coli_matrix *b) {
    return coli_matrix_same_kind(a, b) && coli_matrix_same_codebook(a, b);
}

int moe_same_kind(const coli_expert *a, const coli_expert *b) {
    return matrices_alike(&a->gate, &b->gate) && matrices_alike(&a->up, &b->up) && matrices_alike(&a->down, &b->down);
}

size_t moe_expert_bytes(const coli_expert *expert) {
    return coli_matrix_bytes(&expert->gate) + coli_matrix_bytes(&expert->up) + coli_matrix_bytes(&expert->down);
}

int moe_needs_two_inputs(const coli_expert *expert) {
    return coli_expert_why_two_inputs(&expert->gate, &expert->up) != NULL;
}

static void take_pointers(coli_matrix *matrix, const coli_matrix *given) {
    matrix->weights = given->weights;
    matrix->scales = given->scales;
}

static coli_status check_given(const coli_expert *given, const coli_expert *known, int number) {
    coli_status status = coli_expert_check(&given->gate, &given->up, &given->down, coli_matrix_check);
    RETURN_ERROR_IF(status != COLI_OK, status, "what acquire gave for expert %d: %s", number, coli_last_error());
    RETURN_ERROR_IF(
        !moe_same_kind(given, known), COLI_E_STATE,
        "acquire gave other matrices for expert %d than the layer was made of: another format, shape or codebook", number);
    return COLI_OK;
}

coli_status moe_need_host(coli_moe *layer, int number) {
    moe_expert *expert = &layer->experts[number];
    if (expert->has_host) return COLI_OK;
    coli_expert *m = &expert->matrices, given = *m; /* a copy, since the host may write anything there */
    RETURN_ERROR_IF(!layer->host.acquire(layer->host.user, number, &given), COLI_E_STATE,
                    "the weights of expert %d cannot be had back: acquire gave 0", number);
    coli_status status = check_given(&given, m, number);
    if (status != COLI_OK) {
        layer->host.release(layer->host.user, number);
        return status;
    }
    take_pointers(&m->gate, &given.gate);
    take_pointers(&m->up, &given.up);
    take_pointers(&m->down, &given.down);
    expert->has_host = 1;
    return COLI_OK;
}

void moe_release_host(coli_moe *layer, int number) {
    moe_expert *expert = &layer->experts[number];
    if (!layer->host.acquire || !expert->has_host) return;
    forget_host(expert);
    layer->host.release(layer->host.user, number);
}

/*------   Reasons   ------*/

void moe_set_why(moe_expert *expert, const char *why) {
    if (expert->why_cpu || why) set_text(&expert->why_cpu, why);
}

void moe_drop(moe_expert *expert, const char *why) {
    for (int i = 0; i < 3; i++) {
        coli_placed_free(expert->placed[i]);
        expert->placed[i] = NULL;
    }
    expert->backend = NULL;
    expert->device = -1;
    moe_set_why(expert, why);
}

void moe_note_failure(coli_moe *layer, coli_moe_stats *stats, coli_moe_step step, int experts, const char *reason) {
    coli_mutex_lock(&layer->failure_mutex);
    stats->failed[step] += (uint64_t)experts;
    set_text(&layer->why_failed[step], reason);
    uint64_t failures = ++layer->failures;
    coli_mutex_unlock(&layer->failure_mutex);
    int is_power_of_two = !(failures & (failures - 1));
    if (is_power_of_two) coli_log(1, "failure %llu of an MoE layer: %s", (unsigned long long)failures, reason);
}

/*------   Heat   ------*/

double moe_heat_of(const coli_moe *layer, const moe_expert *expert) {
    return expert->heat / layer->heat_unit;
}

static void rescale_heat(coli_moe *layer) {
    for (int e = 0; e < layer->count; e++) layer->experts[e].heat /= layer->heat_unit;
    layer->heat_unit = 1;
}

void moe_add_heat(coli_moe *layer, const size_t *first, size_t S) {
    if (layer->half_life > 0) layer->heat_unit *= exp2((double)S / layer->half_life);
    if (layer->heat_unit > 1e200) rescale_heat(layer);
    for (int e = 0; e < layer->count; e++) layer->experts[e].heat += (double)(first[e + 1] - first[e]) * layer->heat_unit;
}

coli_status coli_moe_get_heat(coli_moe *layer, double *heat) {
    RETURN_ERROR_IF(!layer || !heat, COLI_E_ARGUMENT, "coli_moe_get_heat needs a layer and a place for its result");
    coli_mutex_lock(&layer->mutex);
    for (int e = 0; e < layer->count; e++) heat[e] = moe_heat_of(layer, &layer->experts[e]);
    coli_mutex_unlock(&layer->mutex);
    return COLI_OK;
}

coli_status coli_moe_set_heat(coli_moe *layer, const double *heat) {
    RETURN_ERROR_IF(!layer || !heat, COLI_E_ARGUMENT, "coli_moe_set_heat needs a layer and heat");
    for (int e = 0; e < layer->count; e++) {
        RETURN_ERROR_IF(!(heat[e] >= 0 && heat[e] < 1e100), COLI_E_ARGUMENT,
                        "heat must be 0 ... 1e100, got %g for expert %d", heat[e], e);
    }
    coli_mutex_lock(&layer->mutex);
    for (int e = 0; e < layer->count; e++) layer->experts[e].heat = heat[e];
    layer->heat_unit = 1;
    coli_mutex_unlock(&layer->mutex);
    return COLI_OK;
}

coli_status coli_moe_set_half_life(coli_moe *layer, double half_life) {
    RETURN_ERROR_IF(!layer || !(half_life >= 0), COLI_E_ARGUMENT,
                    "coli_moe_set_half_life needs a layer and rows >= 0, got %g", half_life);
    coli_mutex_lock(&layer->mutex);
    layer->half_life = half_life;
    coli_mutex_unlock(&layer->mutex);
    return COLI_OK;
}

/*------   Telemetry   ------*/

void moe_add_repinned(coli_moe_repinned *sum, const coli_moe_repinned *more) {
    sum->swaps += more->swaps;
    sum->failed += more->failed;
    sum->bytes += more->bytes;
    sum->seconds += more->seconds;
}

void moe_add_stats(coli_moe_stats *sum, const coli_moe_stats *more) {
    sum->calls += more->calls;
    sum->rows += more->rows;
    for (int path = 0; path < COLI_MOE_PATHS; path++) {
        sum->experts[path] += more->experts[path];
        sum->pairs[path] += more->pairs[path];
    }
    for (int step = 0; step < COLI_MOE_STEPS; step++) sum->failed[step] += more->failed[step];
    sum->rotations += more->rotations;
    sum->cpu_bytes += more->cpu_bytes;
    sum->issue_seconds += more->issue_seconds;
    sum->cpu_seconds += more->cpu_seconds;
    sum->take_seconds += more->take_seconds;
    sum->sum_seconds += more->sum_seconds;
    moe_add_repinned(&sum->repinned, &more->repinned);
}

coli_status coli_moe_get_stats(coli_moe *layer, coli_moe_stats *total, coli_moe_stats *last, size_t size) {
    RETURN_ERROR_IF(!layer || !size, COLI_E_ARGUMENT, "coli_moe_get_stats needs a layer and the size of its results");
    if (size > sizeof layer->total) size = sizeof layer->total;
    coli_mutex_lock(&layer->mutex);
    if (total) memcpy(total, &layer->total, size);
    if (last) memcpy(last, &layer->last, size);
    coli_mutex_unlock(&layer->mutex);
    return COLI_OK;
}

size_t coli_moe_why_failed(coli_moe *layer, coli_moe_step step, char *text, size_t size) {
    if (!layer || (int)step < 0 || step >= COLI_MOE_STEPS)
        return copy_text(layer ? "there is no such step" : "the layer is NULL", text, size);
    coli_mutex_lock(&layer->failure_mutex);
    size_t length = copy_text(layer->why_failed[step], text, size);
    coli_mutex_unlock(&layer->failure_mutex);
    return length;
}

size_t coli_moe_why_cpu(coli_moe *layer, int number, char *text, size_t size) {
    if (!layer || number < 0 || number >= moe_experts(layer)) return copy_text("there is no such expert", text, size);
    coli_mutex_lock(&layer->mutex);
    const moe_expert *expert = &layer->experts[number];
    const char *why = expert->why_cpu;
    if (!why && expert->device < 0) why = "it was never placed";
    size_t length = copy_text(why, text, size);
    coli_mutex_unlock(&layer->mutex);
    return length;
}

int coli_moe_device_of(coli_moe *layer, int number) {
    if (!layer || number < 0 || number >= moe_experts(layer)) return -1;
    coli_mutex_lock(&layer->mutex);
    int device = layer->experts[number].device;
    coli_mutex_unlock(&layer->mutex);
    return device;
}
