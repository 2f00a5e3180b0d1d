/* moe_sum.c - the end of a call of an MoE layer: sums that GPUs have made, then rows in the order of the experts. */
#include <string.h>

#include "kernels.h"
#include "moe_call.h"
#include "parallel.h"

#define SUM_COLUMNS 2048 /* of a row of y that stay in the nearest cache while rows are added to them */

/* For each row of x, its pairs that have a row of their own, in the order of the shares: GPU by GPU, then the CPU's. */
static void sort_by_token(moe_call *c) {
    size_t S = c->rows.S, *first = c->token_first;
    memset(first, 0, (S + 1) * sizeof *first);
    for (int i = 0; i < c->share_count; i++) {
        const moe_share *s = &c->shares[i];
        for (size_t p = s->begin; s->result && p < s->begin + s->rows; p++) first[c->tokens[p] + 1]++;
    }
    for (size_t s = 0; s < S; s++) first[s + 1] += first[s];
    for (int i = 0; i < c->share_count; i++) {
        const moe_share *s = &c->shares[i];
        for (size_t r = 0; s->result && r < s->rows; r++) {
            moe_result_row *row = &c->result_rows[first[c->tokens[s->begin + r]]++];
            *row = (moe_result_row){s->result + r * (size_t)c->layer->D, c->pair_weights[s->begin + r], s->job};
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
static const moe_result_row *add_job(row_sum *sum, const moe_job *j, size_t offset, int column, const moe_result_row *next,
                                     const moe_result_row *end) {
    float part[SUM_COLUMNS];
    row_sum of_job = {sum->kernels, part, sum->n, 1};
    for (; next < end && next->job == j; next++) add_row(&of_job, next->row + column, next->weight);
    if (j->sums) add_row(sum, j->sums + offset, 1);
    if (!of_job.is_empty) add_row(sum, part, 1);
    return next;
}

static void sum_columns(const moe_call *c, const coli_kernels *kernels, size_t token, int column, int n, int is_first) {
    size_t offset = token * (size_t)c->layer->D + (size_t)column;
    row_sum sum = {kernels, c->sum + offset, n, is_first};
    const moe_result_row *next = c->result_rows + c->token_first[token], *end = c->result_rows + c->token_first[token + 1];
    for (int i = 0; i < c->job_count; i++) next = add_job(&sum, &c->jobs[i], offset, column, next, end);
    for (; next < end; next++) add_row(&sum, next->row + column, next->weight);
    if (sum.is_empty) memset(sum.y, 0, (size_t)n * sizeof *sum.y);
}

static void sum_token(const moe_call *c, const coli_kernels *kernels, size_t token, int is_first) {
    for (int column = 0, n; column < c->layer->D; column += n) {
        n = c->layer->D - column < SUM_COLUMNS ? c->layer->D - column : SUM_COLUMNS;
        sum_columns(c, kernels, token, column, n, is_first);
    }
}

void moe_sum_block(moe_call *c, int begin, int end) {
    size_t first = c->first[begin], last = c->first[end], S = c->rows.S;
    const coli_kernels *kernels = coli_kernels_current();
    sort_by_token(c);
    int team = coli_team(S, (size_t)c->layer->D * (1 + (last - first) / S));
    COLI_PARALLEL_FOR(team, s, S, sum_token(c, kernels, s, begin == 0));
}
