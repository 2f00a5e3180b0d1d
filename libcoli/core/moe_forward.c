/* moe_forward.c - one call of an MoE layer: every job of a GPU is started, the CPU computes its own shares, jobs are
 * finished, and what failed in them is computed on the next path: issue, group, single expert, CPU. At last everything is
 * added up. */
#include <limits.h>
#include <stdint.h>
#include <string.h>

#include "expert.h"
#include "matrix.h"
#include "moe_call.h"
#include "status.h"

/*------   Experts on the CPU   ------*/

static coli_status compute(moe_call *c, moe_share *s) {
    FORWARD_ERROR(moe_need_host(c->layer, s->number));
    const coli_expert *m = &s->expert->matrices;
    if (!s->x) moe_pack(c, s);
    FORWARD_ERROR(coli_expert_compute(&m->gate, &m->up, &m->down, s->x, s->x_up, s->rows, s->y));
    s->result = s->y;
    s->path = COLI_MOE_CPU;
    s->done = 1;
    c->layer->last.cpu_bytes += moe_expert_bytes(m);
    return COLI_OK;
}

/* What a GPU failed to do, the CPU does. Its host copies stay until the GPU works again: it may be gone for good. */
static coli_status recover(moe_call *c, moe_job *j) {
    for (int i = 0; i < j->count; i++) {
        moe_share *s = &j->shares[i];
        if (!s->done) FORWARD_ERROR(compute(c, s));
        if (s->path == COLI_MOE_CPU) continue;
        moe_release_host(c->layer, s->number);
        moe_set_why(s->expert, NULL);
    }
    return COLI_OK;
}

/*------   The call   ------*/

static void count_shares(moe_call *c) {
    coli_moe_stats *last = &c->layer->last;
    for (int i = 0; i < c->share_count; i++) {
        const moe_share *s = &c->shares[i];
        last->experts[s->path]++;
        last->pairs[s->path] += s->rows;
    }
}

static coli_status compute_cpu_shares(moe_call *c) {
    for (int i = c->cpu_first; i < c->share_count; i++) FORWARD_ERROR(compute(c, &c->shares[i]));
    return COLI_OK;
}

/* Finishes every job, whatever becomes of the first. */
static coli_status finish_jobs(moe_call *c, coli_status status) {
    for (int i = 0; i < c->job_count; i++) moe_finish(c, &c->jobs[i]);
    for (int i = 0; i < c->job_count && status == COLI_OK; i++) status = recover(c, &c->jobs[i]);
    return status;
}

/* Experts begin ... end - 1. `clock` is when the block began. */
static coli_status run_block(moe_call *c, int begin, int end, double clock) {
    coli_moe_stats *last = &c->layer->last;
    moe_prepare_block(c, begin, end);
    for (int i = 0; i < c->job_count; i++) moe_start(c, &c->jobs[i]);
    double started = coli_seconds();
    coli_status status = compute_cpu_shares(c);
    double computed = coli_seconds();
    status = finish_jobs(c, status);
    double taken = coli_seconds();
    if (status == COLI_OK) moe_sum_block(c, begin, end);
    for (int i = 0; i < c->job_count; i++) moe_end_turn(&c->jobs[i]);
    if (status == COLI_OK) count_shares(c);
    last->issue_seconds += started - clock;
    last->cpu_seconds += computed - started;
    last->take_seconds += taken - computed;
    last->sum_seconds += coli_seconds() - taken;
    return status;
}

static coli_status run_blocks(moe_call *c, double clock) {
    for (int begin = 0, end; begin < moe_experts(c->layer); begin = end) {
        end = moe_block_end(c, begin);
        FORWARD_ERROR(run_block(c, begin, end, clock));
        clock = coli_seconds();
    }
    if (c->sum != c->y) memcpy(c->y, c->sum, c->rows.S * (size_t)c->layer->D * sizeof(float));
    return COLI_OK;
}

/* With the lock that the libraries of the layer's experts need: old ones do not keep calls of several threads apart. */
static coli_status run_locked(moe_call *c, double clock) {
    int uses_gpu = 0;
    coli_access access = COLI_SHARED;
    for (int e = 0; e < moe_experts(c->layer); e++) {
        const coli_backend *backend = c->layer->experts[e].backend;
        uses_gpu |= backend != NULL;
        if (backend && coli_backend_access(backend) == COLI_EXCLUSIVE) access = COLI_EXCLUSIVE;
    }
    if (!uses_gpu) return run_blocks(c, clock);
    coli_backend_lock(access);
    coli_status status = run_blocks(c, clock);
    coli_backend_unlock(access);
    return status;
}

static coli_status prepare_and_run(moe_call *c, const int *ids, const float *weights, int K, const float *shared_weights) {
    double clock = coli_seconds();
    FORWARD_ERROR(moe_prepare(c, ids, weights, K, shared_weights));
    return run_locked(c, clock);
}

static coli_status forward(moe_call *c, const int *ids, const float *weights, int K, const float *shared_weights) {
    coli_moe *layer = c->layer;
    memset(&layer->last, 0, sizeof layer->last);
    coli_status status = prepare_and_run(c, ids, weights, K, shared_weights);
    if (status != COLI_OK) { /* of a call that is not done, what failed counts all the same: its reasons are kept */
        coli_moe_stats failed = {0};
        memcpy(failed.failed, layer->last.failed, sizeof failed.failed);
        layer->last = failed;
        moe_add_stats(&layer->total, &failed);
        return status;
    }
    layer->last.calls = 1;
    layer->last.rows = c->rows.S;
    layer->last.rotations = (uint64_t)c->rows.has_rotated;
    moe_add_heat(layer, c->first, c->rows.S);
    moe_add_stats(&layer->total, &layer->last);
    return COLI_OK;
}

coli_status coli_moe_forward(coli_moe *layer, const float *x, size_t S, const int *ids, const float *weights, int K,
                             const float *shared_weights, float *y) {
    RETURN_ERROR_IF(!layer, COLI_E_ARGUMENT, "coli_moe_forward needs a layer, got NULL");
    RETURN_ERROR_IF(K < 0 || (K == 0 && !layer->has_shared), COLI_E_ARGUMENT, "K must be %d or more, got %d",
                    layer->has_shared ? 0 : 1, K);
    RETURN_ERROR_IF(shared_weights && !layer->has_shared, COLI_E_ARGUMENT,
                    "shared_weights are given, and the layer has no shared expert");
    if (!S) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s, [%zu, %d], is NULL", x ? "y" : "x", S, layer->D);
    RETURN_ERROR_IF(K && (!ids || !weights), COLI_E_ARGUMENT, "%s, [%zu, %d], is NULL", ids ? "weights" : "ids", S, K);
    FORWARD_ERROR(coli_check_rows("x", S, layer->D));
    RETURN_ERROR_IF(S > INT_MAX || S > SIZE_MAX / 1024 / ((size_t)K + 1), COLI_E_SHAPE, "%zu rows of %d pairs are too many",
                    S, K);
    moe_call c = {.layer = layer, .rows = {.x = x, .S = S, .D = layer->D}, .y = y};
    coli_mutex_lock(&layer->mutex);
    coli_status status = forward(&c, ids, weights, K, shared_weights);
    coli_mutex_unlock(&layer->mutex);
    moe_memory_give(c.index);
    moe_memory_give(c.floats);
    return status;
}
