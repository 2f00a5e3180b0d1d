/* moe_forward.c - one call of an MoE layer.
 *
 * The pairs (row, expert) are sorted by expert; an expert with its rows is a share. The shares of one GPU are a job. Then,
 * in this order: every job is started, the CPU computes its own shares, jobs are finished, and what failed in them is
 * computed on the next path: issue, group, single expert, CPU. At last everything is added up: sums that GPUs
 * have made, then rows in the order of the experts.
 *
 * Many rows are computed in blocks of neighbouring experts, so that memory for packed rows stays bounded. */
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expert.h"
#include "kernels.h"
#include "matrix.h"
#include "moe.h"
#include "parallel.h"
#include "status.h"

#define WHY_BYTES 512
#define BLOCK_FLOATS ((size_t)1 << 26) /* of packed rows and results, 256 MB; more only where one expert has more */
#define SUM_COLUMNS 2048               /* of a row of y that stay in the nearest cache while rows are added to them */

/* An expert with the rows that a call gives it. */
typedef struct share {
    int number;
    moe_expert *expert;
    const struct job *job; /* NULL for the CPU */
    size_t begin, rows;    /* places in the sorted pairs */
    float *packed;         /* room for the rows, twice where gate and up are rotated differently; NULL: taken in place */
    const float *x, *x_up; /* [rows, D], for gate and up; NULL until they are packed */
    float *y;              /* [rows, D], room for the result */
    const float *result;   /* y, or memory of the backend; NULL where it is in the sums of its job */
    int done;
    coli_moe_path path; /* that computed it */
    int failed[COLI_MOE_PATHS];
} share;

typedef enum job_state { WAITING, ISSUED, ISSUED_SUMS, ON_THREAD } job_state;

/* The shares of one GPU. */
typedef struct job {
    share *shares;
    int count;
    size_t rows;
    coli_backend *backend;
    int device;
    job_state state;
    const float *sums;        /* [S, D] of the backend: what its shares add to y; NULL where each has a result of its own */
    ColiCudaTensor **tensors; /* [3, count], room for the arguments of a group */
    int *group_rows;          /* [count] */
    int *tokens;              /* [rows] */
    float *weights;           /* [rows] */
    coli_thread thread;
    char why[WHY_BYTES]; /* the last failure; "" for none */
} job;

/* A row that an expert gave. */
typedef struct result_row {
    const float *row;
    float weight;
    const job *job; /* NULL for the CPU */
} result_row;

/* What a call works with. */
typedef struct call {
    coli_moe *layer;
    coli_rows rows;
    float *y;
    size_t *first;       /* [experts + 1]: the pairs of expert e are first[e] ... first[e + 1] - 1 */
    int *tokens;         /* [pairs]: row of x */
    float *pair_weights; /* [pairs] */
    int *job_tokens;     /* [pairs of the call]: the same for the jobs, those of each side by side */
    float *job_weights;
    /* of one block: */
    share *shares; /* [experts], GPU by GPU, those of the CPU last */
    int share_count, cpu_first;
    job *jobs; /* [experts] */
    int job_count;
    ColiCudaTensor **tensors; /* [3 experts] */
    int *group_rows;          /* [experts] */
    size_t *token_first;      /* [S + 1]: the pairs of the block, sorted by row of x */
    result_row *result_rows;  /* [pairs of the call]: those of the block, sorted by row of x */
    float *packed;            /* rows for experts, and room for their results */
    float *sum;               /* [S, D]: y, or memory beside it while a later block may fail */
} call;

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

static void lay_out_index(call *c, arena *a, size_t pairs) {
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

static coli_status allocate_index(call *c, size_t pairs) {
    arena count = {0};
    lay_out_index(c, &count, pairs);
    arena memory = {moe_reserve(&c->layer->index, count.used), 0};
    RETURN_ERROR_IF(!memory.base, COLI_E_MEMORY, "no memory for the %zu bytes that sort %zu pairs", count.used, pairs);
    lay_out_index(c, &memory, pairs);
    return COLI_OK;
}

/* The expert that all rows pass may take them where they are; groups want theirs side by side. */
static int takes_rows_in_place(const call *c, int number) {
    return number == c->layer->count && !c->layer->experts[number].backend;
}

static size_t rows_of(const call *c, int number) {
    return c->first[number + 1] - c->first[number];
}

/* Floats of a share: its result, and its packed rows. */
static size_t share_floats(const call *c, int number) {
    size_t copies =
        takes_rows_in_place(c, number) ? 1 : 2 + (size_t)moe_needs_two_inputs(&c->layer->experts[number].matrices);
    return copies * rows_of(c, number) * (size_t)c->layer->D;
}

/* The expert after the block that begins with expert `begin`. */
static int block_end(const call *c, int begin) {
    size_t floats = share_floats(c, begin);
    int end = begin + 1;
    while (end < moe_experts(c->layer) && floats + share_floats(c, end) <= BLOCK_FLOATS) floats += share_floats(c, end++);
    return end;
}

/* A matrix that rows must be rotated for; NULL where no expert with rows has one. */
static const coli_matrix *needs_rotation(const call *c) {
    for (int e = 0; e < moe_experts(c->layer); e++) {
        const coli_expert *m = &c->layer->experts[e].matrices;
        if (rows_of(c, e) && coli_matrix_rotated(&m->gate)) return &m->gate;
        if (rows_of(c, e) && coli_matrix_rotated(&m->up)) return &m->up;
    }
    return NULL;
}

static coli_status rotate_once(call *c) {
    const float *x;
    const coli_matrix *matrix = needs_rotation(c);
    return matrix ? coli_rows_for(&c->rows, matrix, &x) : COLI_OK;
}

static coli_status allocate_rows(call *c) {
    size_t most = 0, x_floats = c->rows.S * (size_t)c->layer->D;
    int blocks = 0;
    for (int begin = 0, end; begin < moe_experts(c->layer); begin = end, blocks++) {
        size_t floats = 0;
        end = block_end(c, begin);
        for (int e = begin; e < end; e++) floats += share_floats(c, e);
        if (floats > most) most = floats;
    }
    int rotates = needs_rotation(c) != NULL, sums_beside = blocks > 1;
    size_t bytes = (most + x_floats * (size_t)(rotates + sums_beside)) * sizeof(float);
    float *memory = moe_reserve(&c->layer->floats, bytes);
    RETURN_ERROR_IF(!memory, COLI_E_MEMORY, "no memory for %zu bytes of rows on their way to %d experts", bytes,
                    moe_experts(c->layer));
    c->rows.rotated = memory;
    c->sum = sums_beside ? memory + (size_t)rotates * x_floats : c->y;
    c->packed = memory + (size_t)(rotates + sums_beside) * x_floats;
    return COLI_OK;
}

/*------   Sorting   ------*/

static void add_shared_pairs(call *c, const float *shared_weights) {
    size_t first = c->first[c->layer->count], S = c->rows.S;
    for (size_t s = 0; s < S; s++) {
        c->tokens[first + s] = (int)s;
        c->pair_weights[first + s] = shared_weights ? shared_weights[s] : 1;
    }
    c->first[c->layer->count + 1] = first + S;
}

static int is_on(const moe_expert *expert, const job *where) {
    return expert->backend == where->backend && expert->device == where->device;
}

static int by_device(const void *a, const void *b) {
    const job *one = a, *two = b;
    return (one->device > two->device) - (one->device < two->device);
}

/* Lists the GPUs of the experts of a block as jobs without shares, in an order that does not depend on the rows. */
static void list_jobs(call *c, int begin, int end) {
    c->job_count = 0;
    for (int e = begin; e < end; e++) {
        moe_expert *expert = &c->layer->experts[e];
        if (!expert->backend || !rows_of(c, e)) continue;
        int known = 0;
        for (int i = 0; i < c->job_count && !known; i++) known = is_on(expert, &c->jobs[i]);
        if (known) continue;
        job *next = &c->jobs[c->job_count++];
        memset(next, 0, sizeof *next);
        next->backend = expert->backend;
        next->device = expert->device;
    }
    qsort(c->jobs, (size_t)c->job_count, sizeof *c->jobs, by_device);
}

static share *add_share(call *c, int number) {
    share *next = &c->shares[c->share_count++];
    memset(next, 0, sizeof *next);
    next->number = number;
    next->expert = &c->layer->experts[number];
    next->begin = c->first[number];
    next->rows = rows_of(c, number);
    return next;
}

/* *pairs counts those of the jobs before. */
static void fill_job(call *c, job *j, int begin, int end, size_t *pairs) {
    int first = c->share_count;
    for (int e = begin; e < end; e++) {
        if (!rows_of(c, e) || !is_on(&c->layer->experts[e], j)) continue;
        share *next = add_share(c, e);
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

static void sort_shares(call *c, int begin, int end) {
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
static const float *rows_for(call *c, const coli_matrix *matrix) {
    const float *x = c->rows.x;
    coli_rows_for(&c->rows, matrix, &x);
    return x;
}

/* Where the rows of all shares are to be packed, side by side for those of a job, as groups want them; then room for the
 * results, likewise. */
static void assign_room(call *c) {
    size_t D = (size_t)c->layer->D;
    float *next = c->packed;
    for (int i = 0; i < c->share_count; i++) {
        share *s = &c->shares[i];
        if (takes_rows_in_place(c, s->number)) continue;
        s->packed = next;
        next += s->rows * D * (1 + (size_t)moe_needs_two_inputs(&s->expert->matrices));
    }
    for (int i = 0; i < c->share_count; i++) {
        c->shares[i].y = next;
        next += c->shares[i].rows * D;
    }
}

static void pack(call *c, share *s) {
    const coli_expert *m = &s->expert->matrices;
    const int *tokens = c->tokens + s->begin;
    int D = c->layer->D;
    s->x = rows_for(c, &m->gate);
    s->x_up = rows_for(c, &m->up);
    if (!s->packed) return; /* where they are */
    coli_pack_rows(s->x, D, tokens, s->rows, s->packed);
    s->x = s->packed;
    if (moe_needs_two_inputs(m)) coli_pack_rows(s->x_up, D, tokens, s->rows, s->packed + s->rows * (size_t)D);
    s->x_up = moe_needs_two_inputs(m) ? s->packed + s->rows * (size_t)D : s->x;
}

/*------   Experts on GPUs   ------*/

/* What a device has issued waits for its take, whichever thread issued it: one at a time. */
#define TURNS 64
static atomic_flag issue_turns[TURNS]; /* by ordinal; zero is clear */

static atomic_flag *turn_of(int device) {
    return &issue_turns[device % TURNS];
}

static int hidden_of(const share *s) {
    return s->expert->matrices.gate.rows;
}

/* Shares from `first` on that one group of a path may hold. */
static int group_length(const job *j, int first, coli_moe_path path) {
    int count = 0;
    size_t rows = 0;
    const share *s = &j->shares[first];
    while (first + count < j->count && count < COLI_CUDA_MAX_EXPERTS) {
        const share *next = &s[count];
        if (!next->expert->can[path] || hidden_of(next) != hidden_of(s) || next->rows > INT_MAX - rows) break;
        rows += next->rows;
        count++;
    }
    return count;
}

static void set_group(job *j, int first, int count) {
    for (int i = 0; i < count; i++) {
        const share *s = &j->shares[first + i];
        for (int k = 0; k < 3; k++) j->tensors[k * count + i] = coli_placed_tensor(s->expert->placed[k]);
        j->group_rows[i] = (int)s->rows;
    }
}

/* `results` are rows [rows, D] of these shares side by side; NULL where they went into sums. */
static void mark_done(job *j, int first, int count, const float *results, coli_moe_path path) {
    for (int i = first; i < first + count; i++) {
        share *s = &j->shares[i];
        s->result = results;
        s->path = path;
        s->done = 1;
        if (results) results += s->rows * (size_t)s->expert->matrices.gate.columns;
    }
}

static void mark_failed(job *j, int first, int count, coli_moe_path path, const char *name) {
    coli_backend_explain(j->backend, name, j->why, sizeof j->why);
    for (int i = first; i < first + count; i++) j->shares[i].failed[path] = 1;
}

static void pack_job(call *c, job *j) {
    for (int i = 0; i < j->count; i++) pack(c, &j->shares[i]);
}

/* Rows up to which sums are issued: the caller's thread gathers them. */
#define SUM_ROWS 256

/* The library can sum up rows where all experts meet the same x. */
static int may_issue_sums(const call *c, const job *j) {
    if (!j->backend->call.expert_group_issue_sum || j->rows > SUM_ROWS || c->rows.S > SUM_ROWS) return 0;
    for (int i = 0; i < j->count; i++) {
        if (coli_matrix_rotated(&j->shares[i].expert->matrices.gate) !=
            coli_matrix_rotated(&j->shares->expert->matrices.gate))
            return 0;
    }
    return 1;
}

/* Tokens and weights of the job's pairs, side by side. */
static void list_pairs(call *c, job *j) {
    size_t next = 0;
    for (int i = 0; i < j->count; i++) {
        const share *s = &j->shares[i];
        memcpy(j->tokens + next, c->tokens + s->begin, s->rows * sizeof *j->tokens);
        memcpy(j->weights + next, c->pair_weights + s->begin, s->rows * sizeof *j->weights);
        next += s->rows;
    }
}

/* 1 when the group that the job is was issued. */
static int issue_sums(call *c, job *j) {
    int n = j->count, S = (int)c->rows.S;
    const float *x = rows_for(c, &j->shares->expert->matrices.gate);
    list_pairs(c, j);
    return j->backend->call.expert_group_issue_sum(j->tensors, j->tensors + n, j->tensors + 2 * n, j->group_rows, n, x, S,
                                                   j->tokens, S, j->tokens, j->weights);
}

static int issue_rows(call *c, job *j) {
    int n = j->count;
    pack_job(c, j);
    return j->backend->call.expert_group_issue(j->tensors, j->tensors + n, j->tensors + 2 * n, j->group_rows, n,
                                               j->shares->x);
}

/* A job that is one group of few rows is issued, where the device has none outstanding. */
static void issue(call *c, job *j) {
    int sums = may_issue_sums(c, j), fits = sums || j->rows <= COLI_CUDA_MAX_ISSUE_ROWS;
    if (!fits || group_length(j, 0, COLI_MOE_ISSUE) < j->count) return;
    if (atomic_flag_test_and_set(turn_of(j->device))) return;
    set_group(j, 0, j->count);
    if (sums ? issue_sums(c, j) : issue_rows(c, j)) {
        j->state = sums ? ISSUED_SUMS : ISSUED;
        return;
    }
    mark_failed(j, 0, j->count, COLI_MOE_ISSUE, sums ? "coli_cuda_expert_group_issue_sum" : "coli_cuda_expert_group_issue");
    atomic_flag_clear(turn_of(j->device));
}

static int is_issued(const job *j) {
    return j->state == ISSUED || j->state == ISSUED_SUMS;
}

/* Waits for an issued job. What comes belongs to the backend until end_turn(). */
static void take(job *j) {
    const float *rows = j->backend->call.expert_group_take(j->device);
    if (!rows) {
        mark_failed(j, 0, j->count, COLI_MOE_ISSUE, "coli_cuda_expert_group_take");
        return;
    }
    if (j->state == ISSUED_SUMS) j->sums = rows;
    mark_done(j, 0, j->count, j->sums ? NULL : rows, COLI_MOE_ISSUE);
}

static void end_turn(job *j) {
    if (is_issued(j)) atomic_flag_clear(turn_of(j->device));
    j->state = WAITING;
}

static int run_group(job *j, int first, int count) {
    share *s = &j->shares[first];
    set_group(j, first, count);
    ColiCudaTensor **t = j->tensors;
    if (j->backend->call.expert_group(t, t + count, t + 2 * count, j->group_rows, count, s->y, s->x)) {
        mark_done(j, first, count, s->y, COLI_MOE_GROUP);
        return 1;
    }
    mark_failed(j, first, count, COLI_MOE_GROUP, "coli_cuda_expert_group");
    return 0;
}

/* No path takes the rows, and none has failed on them: the CPU does not take over without a reason. */
static void explain_no_single(job *j, const share *s) {
    const coli_expert *m = &s->expert->matrices;
    const char *lacks = coli_backend_why_not_expert(j->backend, "expert_mlp", &m->gate, &m->up, &m->down);
    if (!j->why[0]) snprintf(j->why, sizeof j->why, "%s", lacks ? lacks : "it has more rows than a GPU call takes");
}

static void run_single(job *j, int index) {
    share *s = &j->shares[index];
    ColiCudaTensor *t[3];
    for (int k = 0; k < 3; k++) t[k] = coli_placed_tensor(s->expert->placed[k]);
    if (!s->expert->can[COLI_MOE_SINGLE] || s->rows > INT_MAX) {
        explain_no_single(j, s);
        return;
    }
    if (j->backend->call.expert_mlp(t[0], t[1], t[2], s->y, s->x, (int)s->rows))
        mark_done(j, index, 1, s->y, COLI_MOE_SINGLE);
    else
        mark_failed(j, index, 1, COLI_MOE_SINGLE, "coli_cuda_expert_mlp");
}

/* Computes what of the job is not done yet: in groups, and one by one where groups fail or cannot be. */
static void run(void *argument) {
    job *j = argument;
    for (int first = 0, count; first < j->count; first += count) {
        count = 1;
        if (j->shares[first].done) continue;
        int grouped = group_length(j, first, COLI_MOE_GROUP);
        if (grouped) count = grouped;
        if (grouped && run_group(j, first, count)) continue;
        for (int i = first; i < first + count; i++) run_single(j, i);
    }
}

/* Issued, or else on a thread where there is something to do meanwhile; a job that waits is run when the CPU is done. */
static void start(call *c, job *j) {
    int others = c->share_count > j->count;
    issue(c, j);
    if (is_issued(j)) return;
    pack_job(c, j);
    if (others && coli_thread_start(&j->thread, run, j)) j->state = ON_THREAD;
}

/* After this, a share that is not done is the CPU's. */
static void finish(call *c, job *j) {
    if (j->state == ON_THREAD) {
        coli_thread_join(&j->thread);
        j->state = WAITING;
        return;
    }
    if (is_issued(j)) {
        take(j);
        if (!j->shares->done) pack_job(c, j);
    }
    run(j);
}

/*------   Experts on the CPU   ------*/

static coli_status compute(call *c, share *s) {
    FORWARD_ERROR(moe_need_host(c->layer, s->number));
    const coli_expert *m = &s->expert->matrices;
    if (!s->x) pack(c, s);
    FORWARD_ERROR(coli_expert_compute(&m->gate, &m->up, &m->down, s->x, s->x_up, s->rows, s->y));
    s->result = s->y;
    s->path = COLI_MOE_CPU;
    s->done = 1;
    c->layer->last.cpu_bytes += moe_expert_bytes(m);
    return COLI_OK;
}

/* What a GPU failed to do, the CPU does. Its host copies stay until the GPU works again: it may be gone for good. */
static coli_status recover(call *c, job *j) {
    for (int i = 0; i < j->count; i++) {
        share *s = &j->shares[i];
        if (!s->done) FORWARD_ERROR(compute(c, s));
        if (s->path != COLI_MOE_CPU) moe_release_host(c->layer, s->number);
        moe_set_why(s->expert, s->path == COLI_MOE_CPU ? j->why : NULL);
    }
    if (j->why[0]) moe_note_failure(c->layer, j->why);
    return COLI_OK;
}

/*------   The sum   ------*/

/* For each row of x, its pairs that have a row of their own, in the order of the shares: GPU by GPU, then the CPU's. */
static void sort_by_token(call *c) {
    size_t S = c->rows.S, *first = c->token_first;
    memset(first, 0, (S + 1) * sizeof *first);
    for (int i = 0; i < c->share_count; i++) {
        const share *s = &c->shares[i];
        for (size_t p = s->begin; s->result && p < s->begin + s->rows; p++) first[c->tokens[p] + 1]++;
    }
    for (size_t s = 0; s < S; s++) first[s + 1] += first[s];
    for (int i = 0; i < c->share_count; i++) {
        const share *s = &c->shares[i];
        for (size_t r = 0; s->result && r < s->rows; r++) {
            result_row *row = &c->result_rows[first[c->tokens[s->begin + r]]++];
            *row = (result_row){s->result + r * (size_t)c->layer->D, c->pair_weights[s->begin + r], s->job};
        }
    }
    for (size_t s = S; s > 0; s--) first[s] = first[s - 1];
    first[0] = 0;
}

/* A sum of rows [n], which has none yet where is_empty is 1. */
typedef struct row_sum {
    const coli_kernels *kernels;
    float *y;
    int n, is_empty;
} row_sum;

static void add_row(row_sum *sum, const float *row, float weight) {
    if (sum->is_empty) memset(sum->y, 0, (size_t)sum->n * sizeof *sum->y);
    sum->is_empty = 0;
    sum->kernels->add_products(sum->y, sum->n, &weight, 1, row, 0);
}

/* Adds what a GPU gives for a token. Its rows are added up by themselves first, as the GPU would: the bits must not depend
 * on who does it. */
static const result_row *add_job(row_sum *sum, const job *j, size_t offset, int column, const result_row *next,
                                 const result_row *end) {
    float part[SUM_COLUMNS];
    row_sum of_job = {sum->kernels, part, sum->n, 1};
    for (; next < end && next->job == j; next++) add_row(&of_job, next->row + column, next->weight);
    if (j->sums) add_row(sum, j->sums + offset, 1);
    if (!of_job.is_empty) add_row(sum, part, 1);
    return next;
}

static void sum_columns(const call *c, const coli_kernels *kernels, size_t token, int column, int n, int is_first) {
    size_t offset = token * (size_t)c->layer->D + (size_t)column;
    row_sum sum = {kernels, c->sum + offset, n, is_first};
    const result_row *next = c->result_rows + c->token_first[token], *end = c->result_rows + c->token_first[token + 1];
    for (int i = 0; i < c->job_count; i++) next = add_job(&sum, &c->jobs[i], offset, column, next, end);
    for (; next < end; next++) add_row(&sum, next->row + column, next->weight);
    if (sum.is_empty) memset(sum.y, 0, (size_t)n * sizeof *sum.y);
}

static void sum_token(const call *c, const coli_kernels *kernels, size_t token, int is_first) {
    for (int column = 0, n; column < c->layer->D; column += n) {
        n = c->layer->D - column < SUM_COLUMNS ? c->layer->D - column : SUM_COLUMNS;
        sum_columns(c, kernels, token, column, n, is_first);
    }
}

static void sum_block(call *c, int begin, int end) {
    size_t first = c->first[begin], last = c->first[end], S = c->rows.S;
    const coli_kernels *kernels = coli_kernels_current();
    sort_by_token(c);
    int team = coli_team(S, (size_t)c->layer->D * (1 + (last - first) / S));
    if (team == 1) {
        for (size_t s = 0; s < S; s++) sum_token(c, kernels, s, begin == 0);
        return;
    }
    COLI_PARALLEL_FOR(team)
    for (size_t s = 0; s < S; s++) sum_token(c, kernels, s, begin == 0);
}

/*------   The call   ------*/

static void count_shares(call *c) {
    coli_moe_stats *last = &c->layer->last;
    for (int i = 0; i < c->share_count; i++) {
        const share *s = &c->shares[i];
        last->experts[s->path]++;
        last->pairs[s->path] += s->rows;
        for (int path = 0; path < COLI_MOE_PATHS; path++) last->failed[path] += (uint64_t)s->failed[path];
    }
}

static coli_status compute_cpu_shares(call *c) {
    for (int i = c->cpu_first; i < c->share_count; i++) FORWARD_ERROR(compute(c, &c->shares[i]));
    return COLI_OK;
}

/* Finishes every job, whatever becomes of the first. */
static coli_status finish_jobs(call *c, coli_status status) {
    for (int i = 0; i < c->job_count; i++) finish(c, &c->jobs[i]);
    for (int i = 0; i < c->job_count && status == COLI_OK; i++) status = recover(c, &c->jobs[i]);
    return status;
}

/* Experts begin ... end - 1. `clock` is when the block began. */
static coli_status run_block(call *c, int begin, int end, double clock) {
    coli_moe_stats *last = &c->layer->last;
    sort_shares(c, begin, end);
    assign_room(c);
    for (int i = 0; i < c->job_count; i++) start(c, &c->jobs[i]);
    double started = coli_seconds();
    coli_status status = compute_cpu_shares(c);
    double computed = coli_seconds();
    status = finish_jobs(c, status);
    double taken = coli_seconds();
    if (status == COLI_OK) sum_block(c, begin, end);
    for (int i = 0; i < c->job_count; i++) end_turn(&c->jobs[i]);
    if (status == COLI_OK) count_shares(c);
    last->issue_seconds += started - clock;
    last->cpu_seconds += computed - started;
    last->take_seconds += taken - computed;
    last->sum_seconds += coli_seconds() - taken;
    return status;
}

static coli_status run_blocks(call *c, double clock) {
    for (int begin = 0, end; begin < moe_experts(c->layer); begin = end) {
        end = block_end(c, begin);
        FORWARD_ERROR(run_block(c, begin, end, clock));
        clock = coli_seconds();
    }
    if (c->sum != c->y) memcpy(c->y, c->sum, c->rows.S * (size_t)c->layer->D * sizeof(float));
    return COLI_OK;
}

/* With the lock that the libraries of the layer's experts need: old ones do not keep calls of several threads apart. */
static coli_status run_locked(call *c, double clock) {
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

static coli_status forward(call *c, const int *ids, const float *weights, int K, const float *shared_weights) {
    double clock = coli_seconds();
    coli_moe *layer = c->layer;
    size_t pairs = c->rows.S * ((size_t)K + (size_t)layer->has_shared);
    memset(&layer->last, 0, sizeof layer->last);
    FORWARD_ERROR(allocate_index(c, pairs));
    FORWARD_ERROR(coli_sort_pairs(ids, weights, c->rows.S, K, layer->count, c->first, c->tokens, c->pair_weights));
    if (layer->has_shared) add_shared_pairs(c, shared_weights);
    FORWARD_ERROR(allocate_rows(c));
    FORWARD_ERROR(rotate_once(c));
    FORWARD_ERROR(run_locked(c, clock));
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
    call c = {.layer = layer, .rows = {.x = x, .S = S, .D = layer->D}, .y = y};
    coli_mutex_lock(&layer->mutex);
    coli_status status = forward(&c, ids, weights, K, shared_weights);
    moe_trim(&layer->index);
    moe_trim(&layer->floats);
    coli_mutex_unlock(&layer->mutex);
    return status;
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
    char failure[WHY_BYTES];
    *path = COLI_MOE_SINGLE;
    if (tensors) reason = coli_backend_why_not_expert(backend, "expert_mlp", &m->gate, &m->up, &m->down);
    if (!reason && moe_needs_two_inputs(m)) reason = "its gate and up matrices need different inputs";
    if (!reason && S > INT_MAX) reason = "it has more rows than a GPU call takes";
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
