/* moe_jobs.c - the experts of a call on GPUs, from path to path: issued, in groups, one by one. */
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#include "matrix.h"
#include "moe_call.h"

/* What a device has issued waits for its take, whichever thread issued it: one at a time. */
#define TURNS 64
static atomic_flag issue_turns[TURNS]; /* by ordinal; zero is clear */

static atomic_flag *turn_of(int device) {
    return &issue_turns[device % TURNS];
}

static int hidden_of(const moe_share *s) {
    return s->expert->matrices.gate.rows;
}

/* Shares from `first` on that one group of a path may hold. */
static int group_length(const moe_job *j, int first, coli_moe_path path) {
    int count = 0;
    size_t rows = 0;
    const moe_share *s = &j->shares[first];
    while (first + count < j->count && count < COLI_CUDA_MAX_EXPERTS) {
        const moe_share *next = &s[count];
        if (!next->expert->can[path] || hidden_of(next) != hidden_of(s) || next->rows > INT_MAX - rows) break;
        rows += next->rows;
        count++;
    }
    return count;
}

static void set_group(moe_job *j, int first, int count) {
    for (int i = 0; i < count; i++) {
        const moe_share *s = &j->shares[first + i];
        for (int k = 0; k < 3; k++) j->tensors[k * count + i] = coli_placed_tensor(s->expert->placed[k]);
        j->group_rows[i] = (int)s->rows;
    }
}

/* `results` are rows [rows, D] of these shares side by side; NULL where they went into sums. */
static void mark_done(moe_job *j, int first, int count, const float *results, coli_moe_path path) {
    for (int i = first; i < first + count; i++) {
        moe_share *s = &j->shares[i];
        s->result = results;
        s->path = path;
        s->done = 1;
        if (results) results += s->rows * (size_t)s->expert->matrices.gate.columns;
    }
}

static void note_failure(moe_job *j, int first, int count, coli_moe_step step, const char *why) {
    moe_note_failure(j->layer, &j->layer->last, step, count, why);
    for (int i = first; i < first + count; i++) moe_set_why(j->shares[i].expert, why);
}

/* After the entry point `name` has returned 0 to this thread. */
static void mark_failed(moe_job *j, int first, int count, coli_moe_step step, const char *name) {
    char why[COLI_WHY_BYTES];
    coli_backend_explain(j->backend, name, why, sizeof why);
    note_failure(j, first, count, step, why);
}

static void pack_job(moe_call *c, moe_job *j) {
    for (int i = 0; i < j->count; i++) moe_pack(c, &j->shares[i]);
}

/* Rows up to which sums are issued: the caller's thread gathers them. */
#define SUM_ROWS 256

/* The library can sum up rows where all experts meet the same x. */
static int may_issue_sums(const moe_call *c, const moe_job *j) {
    if (!j->backend->call.expert_group_issue_sum || j->rows > SUM_ROWS || c->rows.S > SUM_ROWS) return 0;
    for (int i = 0; i < j->count; i++) {
        if (coli_matrix_rotated(&j->shares[i].expert->matrices.gate) !=
            coli_matrix_rotated(&j->shares->expert->matrices.gate))
            return 0;
    }
    return 1;
}

/* Tokens and weights of the job's pairs, side by side. */
static void list_pairs(moe_call *c, moe_job *j) {
    size_t next = 0;
    for (int i = 0; i < j->count; i++) {
        const moe_share *s = &j->shares[i];
        memcpy(j->tokens + next, c->tokens + s->begin, s->rows * sizeof *j->tokens);
        memcpy(j->weights + next, c->pair_weights + s->begin, s->rows * sizeof *j->weights);
        next += s->rows;
    }
}

/* 1 when the group that the job is was issued. */
static int issue_sums(moe_call *c, moe_job *j) {
    int n = j->count, S = (int)c->rows.S;
    const float *x = moe_rows_for(c, &j->shares->expert->matrices.gate);
    list_pairs(c, j);
    return j->backend->call.expert_group_issue_sum(j->tensors, j->tensors + n, j->tensors + 2 * n, j->group_rows, n, x, S,
                                                   j->tokens, S, j->tokens, j->weights);
}

static int issue_rows(moe_call *c, moe_job *j) {
    int n = j->count;
    pack_job(c, j);
    return j->backend->call.expert_group_issue(j->tensors, j->tensors + n, j->tensors + 2 * n, j->group_rows, n,
                                               j->shares->x);
}

/* A job that is one group of few rows is issued, where the device has none outstanding. */
static void issue(moe_call *c, moe_job *j) {
    int sums = may_issue_sums(c, j), fits = sums || j->rows <= COLI_CUDA_MAX_ISSUE_ROWS;
    if (!fits || group_length(j, 0, COLI_MOE_ISSUE) < j->count) return;
    if (atomic_flag_test_and_set(turn_of(j->device))) return;
    set_group(j, 0, j->count);
    if (sums ? issue_sums(c, j) : issue_rows(c, j)) {
        j->state = sums ? MOE_ISSUED_SUMS : MOE_ISSUED;
        return;
    }
    mark_failed(j, 0, j->count, COLI_MOE_STEP_ISSUE,
                sums ? "coli_cuda_expert_group_issue_sum" : "coli_cuda_expert_group_issue");
    atomic_flag_clear(turn_of(j->device));
}

static int is_issued(const moe_job *j) {
    return j->state == MOE_ISSUED || j->state == MOE_ISSUED_SUMS;
}

/* Waits for an issued job. What comes belongs to the backend until moe_end_turn(). */
static void take(moe_job *j) {
    const float *rows = j->backend->call.expert_group_take(j->device);
    if (!rows) {
        mark_failed(j, 0, j->count, COLI_MOE_STEP_TAKE, "coli_cuda_expert_group_take");
        return;
    }
    if (j->state == MOE_ISSUED_SUMS) j->sums = rows;
    mark_done(j, 0, j->count, j->sums ? NULL : rows, COLI_MOE_ISSUE);
}

void moe_end_turn(moe_job *j) {
    if (is_issued(j)) atomic_flag_clear(turn_of(j->device));
    j->state = MOE_WAITING;
}

static int run_group(moe_job *j, int first, int count) {
    moe_share *s = &j->shares[first];
    set_group(j, first, count);
    ColiCudaTensor **t = j->tensors;
    if (j->backend->call.expert_group(t, t + count, t + 2 * count, j->group_rows, count, s->y, s->x)) {
        mark_done(j, first, count, s->y, COLI_MOE_GROUP);
        return 1;
    }
    mark_failed(j, first, count, COLI_MOE_STEP_GROUP, "coli_cuda_expert_group");
    return 0;
}

static void run_single(moe_job *j, int index) {
    moe_share *s = &j->shares[index];
    const coli_expert *m = &s->expert->matrices;
    const char *lacks = coli_backend_why_not_expert_mlp(j->backend, &m->gate, &m->up, &m->down, s->rows);
    if (lacks) {
        note_failure(j, index, 1, COLI_MOE_STEP_SINGLE, lacks);
        return;
    }
    ColiCudaTensor *t[3];
    for (int k = 0; k < 3; k++) t[k] = coli_placed_tensor(s->expert->placed[k]);
    if (j->backend->call.expert_mlp(t[0], t[1], t[2], s->y, s->x, (int)s->rows))
        mark_done(j, index, 1, s->y, COLI_MOE_SINGLE);
    else
        mark_failed(j, index, 1, COLI_MOE_STEP_SINGLE, "coli_cuda_expert_mlp");
}

/* Computes what of the job is not done yet: in groups, and one by one where groups fail or cannot be. */
static void run(void *argument) {
    moe_job *j = argument;
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
void moe_start(moe_call *c, moe_job *j) {
    int others = c->share_count > j->count;
    issue(c, j);
    if (is_issued(j)) return;
    pack_job(c, j);
    if (others && coli_thread_start(&j->thread, run, j)) j->state = MOE_ON_THREAD;
}

/* After this, a share that is not done is the CPU's. */
void moe_finish(moe_call *c, moe_job *j) {
    if (j->state == MOE_ON_THREAD) {
        coli_thread_join(&j->thread);
        j->state = MOE_WAITING;
        return;
    }
    if (is_issued(j)) {
        take(j);
        if (!j->shares->done) pack_job(c, j);
    }
    run(j);
}
