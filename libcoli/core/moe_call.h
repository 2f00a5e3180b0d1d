/* moe_call.h - one call of an MoE layer, as the files that work on it see it.
 *
 * The pairs (row, expert) are sorted by expert; an expert with its rows is a share (moe_shares.c). The shares of one GPU
 * are a job (moe_jobs.c). Many rows are computed in blocks of neighbouring experts, so that memory for packed rows stays
 * bounded; each block ends in a sum (moe_sum.c). moe_forward.c leads. */
#ifndef COLI_CORE_MOE_CALL_H
#define COLI_CORE_MOE_CALL_H

#include "backend.h"
#include "moe.h"

/* An expert with the rows that a call gives it. */
typedef struct moe_share {
    int number;
    moe_expert *expert;
    const struct moe_job *job; /* NULL for the CPU */
    size_t begin, rows;        /* places in the sorted pairs */
    float *packed;         /* room for the rows, twice where gate and up are rotated differently; NULL: taken in place */
    const float *x, *x_up; /* [rows, D], for gate and up; NULL until they are packed */
    float *y;              /* [rows, D], room for the result */
    const float *result;   /* y, or memory of the backend; NULL where it is in the sums of its job */
    int done;
    coli_moe_path path; /* that computed it */
} moe_share;

typedef enum moe_job_state { MOE_WAITING, MOE_ISSUED, MOE_ISSUED_SUMS, MOE_ON_THREAD } moe_job_state;

/* The shares of one GPU. */
typedef struct moe_job {
    coli_moe *layer;
    moe_share *shares;
    int count;
    size_t rows;
    coli_backend *backend;
    int device;
    moe_job_state state;
    const float *sums;        /* [S, D] of the backend: what its shares add to y; NULL where each has a result of its own */
    ColiCudaTensor **tensors; /* [3, count], room for the arguments of a group */
    int *group_rows;          /* [count] */
    int *tokens;              /* [rows] */
    float *weights;           /* [rows] */
    coli_thread thread;
} moe_job;

/* A row that an expert gave. */
typedef struct moe_result_row {
    const float *row;
    float weight;
    const moe_job *job; /* NULL for the CPU */
} moe_result_row;

/* What a call works with. */
typedef struct moe_call {
    coli_moe *layer;
    coli_rows rows;
    float *y;
    size_t *first;       /* [experts + 1]: the pairs of expert e are first[e] ... first[e + 1] - 1 */
    int *tokens;         /* [pairs]: row of x */
    float *pair_weights; /* [pairs] */
    int *job_tokens;     /* [pairs of the call]: the same for the jobs, those of each side by side */
    float *job_weights;
    /* of one block: */
    moe_share *shares; /* [experts], GPU by GPU, those of the CPU last */
    int share_count, cpu_first;
    moe_job *jobs; /* [experts] */
    int job_count;
    ColiCudaTensor **tensors;    /* [3 experts] */
    int *group_rows;             /* [experts] */
    size_t *token_first;         /* [S + 1]: the pairs of the block, sorted by row of x */
    moe_result_row *result_rows; /* [pairs of the call]: those of the block, sorted by row of x */
    float *packed;               /* rows for experts, and room for their results */
    float *sum;                  /* [S, D]: y, or memory beside it while a later block may fail */
    moe_memory index, floats;    /* where all this is */
} moe_call;

/*------   moe_shares.c   ------*/

/* Sorts the pairs, makes room for all that the call needs, and rotates the rows once if some expert wants that. */
coli_status moe_prepare(moe_call *c, const int *ids, const float *weights, int K, const float *shared_weights);
/* The expert after the block that begins with expert `begin`. */
int moe_block_end(const moe_call *c, int begin);
/* Makes the shares and jobs of experts begin ... end - 1. */
void moe_prepare_block(moe_call *c, int begin, int end);
/* The rows that a matrix must meet, all of them. */
const float *moe_rows_for(moe_call *c, const coli_matrix *matrix);
/* Puts the rows of a share where its expert wants them. */
void moe_pack(moe_call *c, moe_share *s);

/*------   moe_jobs.c   ------*/

/* Issued, or else on a thread where there is something to do meanwhile; a job that waits is run when the CPU is done. */
void moe_start(moe_call *c, moe_job *j);
/* Waits for the job, or runs it. After this, a share that is not done is the CPU's. */
void moe_finish(moe_call *c, moe_job *j);
/* Gives back to the library what it gave. */
void moe_end_turn(moe_job *j);

/*------   moe_sum.c   ------*/

/* Adds the results of experts begin ... end - 1 to c->sum, or begins it where `begin` is 0. */
void moe_sum_block(moe_call *c, int begin, int end);

#endif
