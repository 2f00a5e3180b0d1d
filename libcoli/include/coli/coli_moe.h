/* coli_moe.h - whole MoE layers: routing, experts on GPUs and CPU at once, fallback, placement, repinning.
 *
 * Introduction
 *   A layer holds experts of one shape, each three encoded matrices in host memory, and keeps as many of them on GPUs as a
 *   budget allows. One call computes all rows of a batch:
 *
 *       coli_moe *layer;
 *       coli_moe_create(experts, count, NULL, NULL, &layer);
 *       coli_moe_place(&layer, 1, backend, devices, device_count);                     // without it: all on the CPU
 *       coli_route(&router, logits, S, ids, weights);                                  // or the host's own routing
 *       coli_moe_forward(layer, x, S, ids, weights, router.top_k, NULL, y);
 *       coli_moe_repin(&layer, 1, 0.25, 0, NULL);                                      // now and then
 *
 *   The last section has the pieces of that call for hosts with a loop of their own.
 *
 * Conventions
 *   - Those of coli.h. x is plain here, never rotated: the layer makes the rotated copy that E8 needs, once a call.
 *   - Whatever fails on a GPU is computed on the next path, down to the CPU, and counted; a call fails only for bad
 *     arguments, for want of memory, or where host copies of weights cannot be had.
 *   - Results are added in a fixed order: what GPUs have summed up, then other experts in the order of their numbers. So
 *     the same input gives the same bits, whoever is done first. A result does depend on where an expert is.
 *   - Calls on one layer take turns inside; those on different layers may run at once.
 */
#ifndef COLI_MOE_H
#define COLI_MOE_H

#include "coli.h"
#include "coli_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/*------   Routing   ------*/

typedef enum coli_router_kind {
    COLI_ROUTER_SOFTMAX = 0, /* scores are the softmax over all experts (OLMoE, Qwen3-MoE; Mixtral with renormalise) */
    COLI_ROUTER_SIGMOID = 1  /* scores are sigmoids (DeepSeek-V3, GLM) */
} coli_router_kind;

/* How logits become a choice of experts and their weights. */
typedef struct coli_router {
    int kind;          /* a coli_router_kind */
    int experts;       /* E */
    int top_k;         /* K experts a row, 1 ... E */
    int renormalise;   /* 1: the K weights of a row are divided by their sum */
    int groups;        /* 0, or the number of equal groups of neighbouring experts, of which a row uses the best */
    int top_groups;    /* so many of them; 0 where groups is 0 */
    const float *bias; /* [E], added to the scores for the choice alone, not to the weights; or NULL */
    float scale;       /* factor of all weights */
} coli_router;

/* For logits [S, E]: ids [S, K], best first, ties to the lower number, and weights [S, K]. A group counts by its best score
 * with softmax, by the sum of its two best with sigmoid, bias included. A logit of -infinity takes an expert out of the
 * choice as far as others are left; COLI_E_NOT_FINITE names the first NaN or +infinity, and a row without finite logits. */
COLI_API coli_status coli_route(const coli_router *router, const float *logits, size_t S, int *ids, float *weights);

/*------   Layers   ------*/

/* An expert's matrices in host memory: gate and up [H, D], down [D, H], in any formats. */
typedef struct coli_expert {
    coli_matrix gate, up, down;
} coli_expert;

/* Where host copies come from that are not kept for good. Calls for one layer come one at a time, from any thread; they
 * must not call libcoli. */
typedef struct coli_moe_host {
    /* Sets the `weights` and `scales` pointers of the three matrices for expert `expert` (count: the shared one); they stay
     * valid until release. 1, or 0 where they cannot be had. Matrices of another kind than those of the layer, or with
     * another codebook, are refused (COLI_E_STATE), and released. */
    int (*acquire)(void *user, int expert, coli_expert *matrices);
    /* The copies are not needed any more: the expert is on a GPU, or the layer is freed. */
    void (*release)(void *user, int expert);
    void *user;
} coli_moe_host;

/* A layer. Created by coli_moe_create, released by coli_moe_free. */
typedef struct coli_moe coli_moe;

/* A layer of `count` experts of one shape, and with `shared` an expert that every row passes (its H may differ). The
 * structs are copied, weights and codebooks are not: they must outlive the layer. With `host`, the weights and scales
 * pointers of the experts are ignored, and asked for when they are needed; codebooks are kept as ever. COLI_E_SHAPE,
 * COLI_E_FORMAT, ... name the expert that does not fit. */
COLI_API coli_status coli_moe_create(const coli_expert *experts, int count, const coli_expert *shared,
                                     const coli_moe_host *host, coli_moe **layer);
/* Releases the layer and its tensors; no other call on it may be in progress. NULL is allowed. */
COLI_API void coli_moe_free(coli_moe *layer);

/* y [S, D] = sum over k of weights[s, k] * expert ids[s, k] (x[s]), plus the shared expert. ids [S, K] are 0 ... count - 1,
 * or -1 for none; pairs of weight 0 are not computed. `shared_weights` [S] are factors of the shared expert, NULL means 1.
 * K may be 0 where there is a shared expert. y may be x. */
COLI_API coli_status coli_moe_forward(coli_moe *layer, const float *x, size_t S, const int *ids, const float *weights,
                                      int K, const float *shared_weights, float *y);

/*------   Placement   ------*/

#define COLI_MOE_AUTO SIZE_MAX             /* a budget: what is free on the device, less the reserve */
#define COLI_MOE_RESERVE ((size_t)2 << 30) /* a usual reserve, for activations and attention caches */

typedef struct coli_moe_device {
    int device;     /* CUDA ordinal */
    size_t budget;  /* bytes for the experts of the layers in the call, those placed before included; or COLI_MOE_AUTO */
    size_t reserve; /* bytes that COLI_MOE_AUTO leaves free */
} coli_moe_device;

/* Uploads the experts of all these layers, shared ones first, then the hottest, each whole or not at all, to the device
 * with the most room left, until budgets are used up. Devices must have been configured by coli_backend_init. Experts that
 * are on a GPU stay there, so the call may be repeated; those whose tensors coli_cuda_shutdown has released are uploaded
 * again. An expert that the library cannot take, such as one in int3-g64, is left out. A device that fails gets no more in
 * this call, and the next one is tried. COLI_OK also where nothing could be placed, or `backend` is NULL:
 * coli_moe_why_cpu() says why, and the log has a line for each reason. `backend` must outlive the layers' stay on the
 * GPUs. */
COLI_API coli_status coli_moe_place(coli_moe *const *layers, int layer_count, coli_backend *backend,
                                    const coli_moe_device *devices, int device_count);
/* Takes all experts of the layer off the GPUs. Host copies that were released are asked for when they are needed. */
COLI_API void coli_moe_unplace(coli_moe *layer);
/* GPU ordinal of an expert (count: the shared one), or -1 for the CPU. */
COLI_API int coli_moe_device_of(coli_moe *layer, int expert);
/* Copies why an expert is on the CPU, or why it was computed there last; "" while the GPU does the work. Returns the whole
 * text's length. */
COLI_API size_t coli_moe_why_cpu(coli_moe *layer, int expert, char *text, size_t size);

/* Use of each expert: rows of coli_moe_forward, older ones counting less, halved every `half_life` rows of the layer (4096
 * at first; 0: never). The second call replaces heat [count], such as that of an earlier run. */
COLI_API coli_status coli_moe_get_heat(coli_moe *layer, double *heat);
COLI_API coli_status coli_moe_set_heat(coli_moe *layer, const double *heat);
COLI_API coli_status coli_moe_set_half_life(coli_moe *layer, double half_life);

typedef struct coli_moe_repinned {
    uint64_t swaps;  /* experts that came to a GPU, one for each that left */
    uint64_t failed; /* swaps that failed; both experts are then on the CPU, or, without weights to copy, as they were */
    uint64_t bytes;  /* weights and scales that were copied to GPUs */
    double seconds;
} coli_moe_repinned;

/* Swaps the hottest experts on the CPU for the coldest on GPUs by overwriting these in place, where all three matrices have
 * the same formats, shapes and codebooks, while the hotter's heat is above (1 + hysteresis) times the colder's and at least
 * one row; at most `max_swaps` (0: no limit). Waits for calls in progress. `result` may be NULL. */
COLI_API coli_status coli_moe_repin(coli_moe *const *layers, int layer_count, double hysteresis, int max_swaps,
                                    coli_moe_repinned *result);

/*------   Telemetry   ------*/

typedef enum coli_moe_path {
    COLI_MOE_ISSUE = 0,  /* a group that was issued, and taken later */
    COLI_MOE_GROUP = 1,  /* a group in one call */
    COLI_MOE_SINGLE = 2, /* coli_cuda_expert_mlp */
    COLI_MOE_CPU = 3
} coli_moe_path;
#define COLI_MOE_PATHS 4

/* What may fail on a GPU; another path does the work then. SINGLE, the last before the CPU, fails as well where the library
 * cannot compute the expert so. */
typedef enum coli_moe_step {
    COLI_MOE_STEP_ISSUE = 0,  /* coli_cuda_expert_group_issue, or ..._issue_sum */
    COLI_MOE_STEP_TAKE = 1,   /* coli_cuda_expert_group_take, after a good issue */
    COLI_MOE_STEP_GROUP = 2,  /* coli_cuda_expert_group */
    COLI_MOE_STEP_SINGLE = 3, /* coli_cuda_expert_mlp */
    COLI_MOE_STEP_UPDATE = 4  /* a swap of coli_moe_repin: both experts are then on the CPU, or as they were */
} coli_moe_step;
#define COLI_MOE_STEPS 5

typedef struct coli_moe_stats {
    uint64_t calls, rows;             /* coli_moe_forward, and its S */
    uint64_t experts[COLI_MOE_PATHS]; /* experts with rows, by the path that computed them */
    uint64_t pairs[COLI_MOE_PATHS];   /* their rows */
    uint64_t failed[COLI_MOE_STEPS];  /* experts that a step failed on: coli_moe_why_failed() says why */
    uint64_t rotations;               /* rotated copies of x: at most one a call */
    uint64_t cpu_bytes;               /* weights and scales that the CPU read */
    double issue_seconds;             /* sorting, rotation, packing, and starting the GPUs */
    double cpu_seconds;               /* experts on the CPU */
    double take_seconds;              /* waiting for GPUs, and computing anew what failed */
    double sum_seconds;               /* adding the experts' rows */
    coli_moe_repinned repinned;
} coli_moe_stats;

/* Sums since the layer was created, and the last call alone; either may be NULL. Of a call that ended in an error, only
 * `failed` counts. `size` is sizeof(coli_moe_stats) of the caller's header: later versions may have more fields, and write
 * no more than that. */
COLI_API coli_status coli_moe_get_stats(coli_moe *layer, coli_moe_stats *total, coli_moe_stats *last, size_t size);
/* Copies why a step failed last; "" when it never did. Returns the whole text's length. */
COLI_API size_t coli_moe_why_failed(coli_moe *layer, coli_moe_step step, char *text, size_t size);

/* Calls keep the memory that they worked in, up to 512 MB in the process, for the next call of any layer. This gives it
 * back to the system, as coli_moe_free of the last layer does. Any thread, any time. */
COLI_API void coli_moe_trim(void);

/*------   Pieces for hosts with a loop of their own   ------*/

/* Rows of activations, and their rotated copy, which is made when the first matrix needs it and serves all others. */
typedef struct coli_rows {
    const float *x; /* [S, D], plain */
    size_t S;
    int D;
    float *rotated;  /* [S, D], the caller's memory; filled by coli_rows_for */
    int has_rotated; /* 0 at first; 1 once it is filled */
} coli_rows;

/* *x = the rows that a gate or up matrix [H, D] must meet: the plain ones, or the rotated ones where the matrix is rotated
 * E8. COLI_E_SHAPE for a matrix of other columns. One thread at a time. */
COLI_API coli_status coli_rows_for(coli_rows *rows, const coli_matrix *matrix, const float **x);

/* Sorts the pairs of ids and weights [S, K] by expert, stably: first[e] ... first[e + 1] - 1 are the places of expert e in
 * tokens and pair_weights, with the row of x and the weight of each. first is [experts + 1], the others [S * K]. Ids of -1
 * and weights of 0 are left out. COLI_E_ARGUMENT names an id that is out of range. */
COLI_API coli_status coli_sort_pairs(const int *ids, const float *weights, size_t S, int K, int experts, size_t *first,
                                     int *tokens, float *pair_weights);
/* packed [n, D] = the rows tokens[0 ... n - 1] of x [S, D]. */
COLI_API void coli_pack_rows(const float *x, int D, const int *tokens, size_t n, float *packed);
/* y[tokens[i]] += pair_weights[i] * rows[i], for i = 0 ... n - 1 in this order; y is [S, D], rows [n, D]. */
COLI_API void coli_add_rows(const float *rows, int D, const int *tokens, const float *pair_weights, size_t n, float *y);

/* An expert's tensors on a device. */
typedef struct coli_expert_tensors {
    ColiCudaTensor *gate, *up, *down;
} coli_expert_tensors;

/* Computes an expert for rows that another path has failed on: by coli_cuda_expert_mlp where `tensors` is not NULL, and
 * where that fails or may not be used, on the CPU. x_gate and x_up [S, D] are what coli_rows_for gives for the two, y is
 * [S, D]. *path is the one that did it, and `why` (may be NULL) says why it was not the first. */
COLI_API coli_status coli_expert_fallback(const coli_backend *backend, const coli_expert_tensors *tensors,
                                          const coli_expert *expert, const float *x_gate, const float *x_up, size_t S,
                                          float *y, coli_moe_path *path, char *why, size_t why_size);

#ifdef __cplusplus
}
#endif
#endif
