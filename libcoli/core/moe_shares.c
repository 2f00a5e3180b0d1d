/* moe_shares.c - the pairs of a call of an MoE layer, sorted into shares of experts and jobs of GPUs, and memory for them.
 */
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "matrix.h"
#include "moe_call.h"
#include "status.h"

#define BLOCK_FLOATS ((size_t)1 << 26) /* of packed rows and results, 256 MB; more only where one expert has more */

/*------   Memory   ------*/

/* Hands out parts of a piece of memory; with base = NULL it only counts them. */
typedef struct arena {
    char *base;
    size_t used;
} arena;

static void *part(arena *a, size_t count, size_t size) {
    void *result = a->base ? a->base + a->used : NULL;
    a->used += (count * size + 63) / 64 * 64;
    return result;
}

static void lay_out_index(moe_call *c, arena *a, size_t pairs) {
    size_t experts = (size_t)moe_experts(c->layer);
    c->first = part(a, experts + 1, sizeof *c->first);
    c->tokens = part(a, pairs, sizeof *c->tokens);
    c->pair_weights = part(a, pairs, sizeof *c->pair_weights);
    c->job_tokens = part(a, pairs, sizeof *c->job_tokens);
    c->job_weights = part(a, pairs, sizeof *c->job_weights);
    c->shares = part(a, experts, sizeof *c->shares);
    c->jobs = part(a, experts, sizeof *c->jobs);
    c->tensors = part(a, 3 * experts, sizeof *c->tensors);
    c->group_rows = part(a, experts, sizeof *c->group_rows);
    c->token_first = part(a, c->rows.S + 1, sizeof *c->token_first);
    c->result_rows = part(a, pairs, sizeof *c->result_rows);
}

static coli_status allocate_index(moe_call *c, size_t pairs) {
    arena count = {0};
    lay_out_index(c, &count, pairs);
    c->index = moe_memory_take(count.used);
    arena memory = {c->index.start, 0};
    RETURN_ERROR_IF(!memory.base, COLI_E_MEMORY, "no memory for the %zu bytes that sort %zu pairs", count.used, pairs);
    lay_out_index(c, &memory, pairs);
    return COLI_OK;
}

/* The expert that all rows pass may take them where they are; groups want theirs side by side. */
static int takes_rows_in_place(const moe_call *c, int number) {
    return number == c->layer->count && !c->layer->experts[number].backend;
}

static size_t rows_of(const moe_call *c, int number) {
    return c->first[number + 1] - c->first[number];
}

/* Floats of a share: its result, and its packed rows. */
static size_t share_floats(const moe_call *c, int number) {
    size_t copies =
        takes_rows_in_place(c, number) ? 1 : 2 + (size_t)moe_needs_two_inputs(&c->layer->experts[number].matrices);
    return copies * rows_of(c, number) * (size_t)c->layer->D;
}

/* The expert after the block that begins with expert `begin`. */
int moe_block_end(const moe_call *c, int begin) {
    size_t floats = share_floats(c, begin);
    int end = begin + 1;
    while (end < moe_experts(c->layer) && floats + share_floats(c, end) <= BLOCK_FLOATS) floats += share_floats(c, end++);
    return end;
}

/* A matrix that rows must be rotated for; NULL where no expert with rows has one. */
static const coli_matrix *needs_rotation(const moe_call *c) {
    for (int e = 0; e < moe_experts(c->layer); e++) {
        const coli_expert *m = &c->layer->experts[e].matrices;
        if (rows_of(c, e) && coli_matrix_rotated(&m->gate)) return &m->gate;
        if (rows_of(c, e) && coli_matrix_rotated(&m->up)) return &m->up;
    }
    return NULL;
}

static coli_status rotate_once(moe_call *c) {
    const float *x;
    const coli_matrix *matrix = needs_rotation(c);
    return matrix ? coli_rows_for(&c->rows, matrix, &x) : COLI_OK;
}

static coli_status allocate_rows(moe_call *c) {
    size_t most = 0, x_floats = c->rows.S * (size_t)c->layer->D;
    int blocks = 0;
    for (int begin = 0, end; begin < moe_experts(c->layer); begin = end, blocks++) {
        size_t floats = 0;
        end = moe_block_end(c, begin);
        for (int e = begin; e < end; e++) floats += share_floats(c, e);
        if (floats > most) most = floats;
    }
    int rotates = needs_rotation(c) != NULL, sums_beside = blocks > 1;
    size_t bytes = (most + x_floats * (size_t)(rotates + sums_beside)) * sizeof(float);
    c->floats = moe_memory_take(bytes);
    float *memory = c->floats.start;
    RETURN_ERROR_IF(!memory, COLI_E_MEMORY, "no memory for %zu bytes of rows on their way to %d experts", bytes,
                    moe_experts(c->layer));
    c->rows.rotated = memory;
    c->sum = sums_beside ? memory + (size_t)rotates * x_floats : c->y;
    c->packed = memory + (size_t)(rotates + sums_beside) * x_floats;
    return COLI_OK;
}

/*------   Sorting   ------*/

static void add_shared_pairs(moe_call *c, const float *shared_weights) {
    size_t first = c->first[c->layer->count], S = c->rows.S;
    for (size_t s = 0; s < S; s++) {
        c->tokens[first + s] = (int)s;
        c->pair_weights[first + s] = shared_weights ? shared_weights[s] : 1;
    }
    c->first[c->layer->count + 1] = first + S;
}

static int is_on(const moe_expert *expert, const moe_job *where) {
    return expert->backend == where->backend && expert->device == where->device;
}

static int by_device(const void *a, const void *b) {
    const moe_job *one = a, *two = b;
    return (one->device > two->device) - (one->device < two->device);
}

/* Lists the GPUs of the experts of a block as jobs without shares, in an order that does not depend on the rows. */
static void list_jobs(moe_call *c, int begin, int end) {
    c->job_count = 0;
    for (int e = begin; e < end; e++) {
        moe_expert *expert = &c->layer->experts[e];
        if (!expert->backend || !rows_of(c, e)) continue;
        int known = 0;
        for (int i = 0; i < c->job_count && !known; i++) known = is_on(expert, &c->jobs[i]);
        if (known) continue;
        moe_job *next = &c->jobs[c->job_count++];
        memset(next, 0, sizeof *next);
        next->layer = c->layer;
        next->backend = expert->backend;
        next->device = expert->device;
    }
    qsort(c->jobs, (size_t)c->job_count, sizeof *c->jobs, by_device);
}

static moe_share *add_share(moe_call *c, int number) {
    moe_share *next = &c->shares[c->share_count++];
    memset(next, 0, sizeof *next);
    next->number = number;
    next->expert = &c->layer->experts[number];
    next->begin = c->first[number];
    next->rows = rows_of(c, number);
    return next;
}

/* *pairs counts those of the jobs before. */
static void fill_job(moe_call *c, moe_job *j, int begin, int end, size_t *pairs) {
    int first = c->share_count;
    for (int e = begin; e < end; e++) {
        if (!rows_of(c, e) || !is_on(&c->layer->experts[e], j)) continue;
        moe_share *next = add_share(c, e);
        next->job = j;
        j->rows += next->rows;
    }
    j->shares = c->shares + first;
    j->count = c->share_count - first;
    j->tensors = c->tensors + 3 * first;
    j->group_rows = c->group_rows + first;
    j->tokens = c->job_tokens + *pairs;
    j->weights = c->job_weights + *pairs;
    *pairs += j->rows;
}

static void sort_shares(moe_call *c, int begin, int end) {
    size_t pairs = 0;
    c->share_count = 0;
    list_jobs(c, begin, end);
    for (int i = 0; i < c->job_count; i++) fill_job(c, &c->jobs[i], begin, end, &pairs);
    c->cpu_first = c->share_count;
    for (int e = begin; e < end; e++) {
        if (rows_of(c, e) && !c->layer->experts[e].backend) add_share(c, e);
    }
}

/* The rows that a matrix must meet. The rotated copy is made before any share needs it. */
const float *moe_rows_for(moe_call *c, const coli_matrix *matrix) {
    const float *x = c->rows.x;
    coli_rows_for(&c->rows, matrix, &x);
    return x;
}

/* Where the rows of all shares are to be packed, side by side for those of a job, as groups want them; then room for the
 * results, likewise. */
static void assign_room(moe_call *c) {
    size_t D = (size_t)c->layer->D;
    float *next = c->packed;
    for (int i = 0; i < c->share_count; i++) {
        moe_share *s = &c->shares[i];
        if (takes_rows_in_place(c, s->number)) continue;
        s->packed = next;
        next += s->rows * D * (1 + (size_t)moe_needs_two_inputs(&s->expert->matrices));
    }
    for (int i = 0; i < c->share_count; i++) {
        c->shares[i].y = next;
        next += c->shares[i].rows * D;
    }
}

void moe_pack(moe_call *c, moe_share *s) {
    const coli_expert *m = &s->expert->matrices;
    const int *tokens = c->tokens + s->begin;
    int D = c->layer->D;
    s->x = moe_rows_for(c, &m->gate);
    s->x_up = moe_rows_for(c, &m->up);
    if (!s->packed) return; /* where they are */
    coli_pack_rows(s->x, D, tokens, s->rows, s->packed);
    s->x = s->packed;
    if (moe_needs_two_inputs(m)) coli_pack_rows(s->x_up, D, tokens, s->rows, s->packed + s->rows * (size_t)D);
    s->x_up = moe_needs_two_inputs(m) ? s->packed + s->rows * (size_t)D : s->x;
}

/*------   A call, and a block of it   ------*/

coli_status moe_prepare(moe_call *c, const int *ids, const float *weights, int K, const float *shared_weights) {
    coli_moe *layer = c->layer;
    FORWARD_ERROR(allocate_index(c, c->rows.S * ((size_t)K + (size_t)layer->has_shared)));
    FORWARD_ERROR(coli_sort_pairs(ids, weights, c->rows.S, K, layer->count, c->first, c->tokens, c->pair_weights));
    if (layer->has_shared) add_shared_pairs(c, shared_weights);
    FORWARD_ERROR(allocate_rows(c));
    return rotate_once(c);
}

void moe_prepare_block(moe_call *c, int begin, int end) {
    sort_shares(c, begin, end);
    assign_room(c);
}
